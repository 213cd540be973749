// The keys that a query sees: a half-open range, and the first keys to the left of it (sinks). Both ends of the range
// grow with the query, so the first and last row of a query tile determine all ranges of the tile.
#pragma once

#include <algorithm>
#include <cstdint>

namespace catalog::host {

struct KeyRange {
    std::int64_t begin, end;

    bool empty() const { return begin >= end; }
    bool contains(KeyRange other) const { return begin <= other.begin && other.end <= end; }
};

inline KeyRange intersect(KeyRange a, KeyRange b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }

// The keys of one of `splits` equal parts, which start at multiples of `step`.
inline KeyRange keys_of_split(std::int64_t seqlen_k, std::int64_t split, std::int64_t splits, int step) {
    const std::int64_t part = ((seqlen_k + splits - 1) / splits + step - 1) / step * step;
    return {std::min(split * part, seqlen_k), std::min((split + 1) * part, seqlen_k)};
}

// Keys from `diagonal + query - left` to `diagonal + query + right`, and the first `sinks` of the keys left of them. A
// negative side is unbounded. `keys` are all keys that exist.
struct Window {
    std::int64_t left, right, diagonal, sinks;
    KeyRange keys;

    std::int64_t center(std::int64_t query) const { return query + diagonal; }

    // Without sinks.
    KeyRange visible(std::int64_t query) const {
        const std::int64_t begin = left < 0 ? keys.begin : center(query) - left;
        const std::int64_t end = right < 0 ? keys.end : center(query) + right + 1;
        return intersect({begin, end}, keys);
    }
};

// Columns of a tile: keys counted from its first.
struct Columns {
    int begin, end;

    bool operator==(const Columns& other) const { return begin == other.begin && end == other.end; }
};

// Keys that some query, or every query, of a tile sees.
inline KeyRange seen_by_some(KeyRange first, KeyRange last) { return {first.begin, last.end}; }
inline KeyRange seen_by_all(KeyRange first, KeyRange last) { return {last.begin, first.end}; }

}  // namespace catalog::host
