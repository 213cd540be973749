// Which keys a query sees, as a half-open range. Both ends grow with the query, so the ranges of a tile of queries
// follow from its first and its last row.
#pragma once

#include <algorithm>
#include <cstdint>

namespace catalog::host {

enum class Mask { none, causal, generic };

struct KeyRange {
    std::int64_t begin, end;

    bool empty() const { return begin >= end; }
    bool contains(KeyRange other) const { return begin <= other.begin && other.end <= end; }
};

inline KeyRange intersect(KeyRange a, KeyRange b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }

// Keys from `diagonal + query - left` to `diagonal + query + right`; a side is unbounded when it is negative.
struct Window {
    std::int64_t left, right, diagonal, seqlen_k;

    KeyRange visible(std::int64_t query) const {
        const std::int64_t center = query + diagonal;
        const std::int64_t begin = left < 0 ? 0 : center - left;
        const std::int64_t end = right < 0 ? seqlen_k : center + right + 1;
        return intersect({begin, end}, {0, seqlen_k});
    }
};

// Keys that some, or that every, query of a tile sees.
inline KeyRange seen_by_some(KeyRange first, KeyRange last) { return {first.begin, last.end}; }
inline KeyRange seen_by_all(KeyRange first, KeyRange last) { return {last.begin, first.end}; }

}  // namespace catalog::host
