// Which keys a query sees: a half-open range, whose ends both grow with the query. So what a tile of queries sees
// follows from its first and its last row.
#pragma once

#include <cstdint>

#include "abi/catalog_abi.h"
#include "cuda/traits.hpp"

namespace catalog::cuda {

struct KeyRange {
    int begin, end;
};

__device__ __forceinline__ KeyRange intersect(KeyRange a, KeyRange b) {
    return {max(a.begin, b.begin), min(a.end, b.end)};
}

// Keys that some, or that every, query of a tile sees.
__device__ __forceinline__ KeyRange seen_by_some(KeyRange first, KeyRange last) { return {first.begin, last.end}; }
__device__ __forceinline__ KeyRange seen_by_all(KeyRange first, KeyRange last) { return {last.begin, first.end}; }

// The keys of one of `splits` equal parts, which start at multiples of `step`.
__device__ __forceinline__ KeyRange keys_of_split(int seqlen_k, int split, int splits, int step) {
    const std::int64_t part = ((seqlen_k + splits - 1) / splits + step - 1) / step * static_cast<std::int64_t>(step);
    const std::int64_t stored = seqlen_k;
    return {static_cast<int>(min(split * part, stored)), static_cast<int>(min((split + 1) * part, stored))};
}

// Keys from `query + diagonal - left` to `query + diagonal + right`; a side is unbounded when it is negative. `keys`
// are all that there are.
template <Mask mask>
struct Window {
    int left, right, diagonal;
    KeyRange keys;

    __device__ __forceinline__ int center(int query) const { return query + diagonal; }

    __device__ __forceinline__ KeyRange visible(int query) const {
        if constexpr (mask == Mask::none) return keys;
        if constexpr (mask == Mask::causal) return {keys.begin, min(center(query) + 1, keys.end)};
        const int begin = left < 0 ? keys.begin : center(query) - left;
        const int end = right < 0 ? keys.end : center(query) + right + 1;
        return intersect({begin, end}, keys);
    }
};

// The mask of a sequence, within `keys`.
template <Mask mask>
__device__ __forceinline__ Window<mask> window_of(const catalog_args& args, int seqlen_q, int seqlen_k, KeyRange keys) {
    // Without a mask ALiBi measures distances from the last query and key.
    const bool at_end = mask == Mask::none || args.mask_corner == CATALOG_BOTTOM_RIGHT;
    // No distance within the sequence exceeds this; a larger window would only overflow.
    const std::int64_t longest = seqlen_q + seqlen_k;
    return {static_cast<int>(max(min(args.window_left, longest), std::int64_t{-1})),
            static_cast<int>(max(min(args.window_right, longest), std::int64_t{-1})), at_end ? seqlen_k - seqlen_q : 0,
            keys};
}

}  // namespace catalog::cuda
