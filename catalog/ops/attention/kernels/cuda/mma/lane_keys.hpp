// Which keys of a tile a lane has scores of.
#pragma once

#include "cuda/common/call.hpp"

namespace catalog::cuda {

// Of every eight two neighbours. Where 16 values of a column lie together, in 16 bytes, matrices of 16 bits give a lane four
// of them at once, and it has scores of the same four of every 16 keys.
template <class Row>
struct LaneKeys {
    static constexpr bool fours = is_vectorized<Row> && has_bytes<Row>;

    static __device__ __forceinline__ int first(int lane) { return lane % 4 * (fours ? 4 : 2); }

    // From the first one to the two of s[m][n]; see MmaTile.
    static __device__ __forceinline__ constexpr int offset(int n) { return fours ? n / 2 * 16 + n % 2 * 2 : 8 * n; }

    // The key in a row of shared memory, whose every eight rows are the keys of an s[m][n].
    static __device__ __forceinline__ constexpr int in_row(int row) {
        return fours ? row / 16 * 16 + offset(row / 8 % 2) + row % 8 / 2 * 4 + row % 2 : row;
    }
};

}  // namespace catalog::cuda
