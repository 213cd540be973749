// Where lanes find rows of a tile in shared memory, for products by mma.sync.
#pragma once

#include <cstdint>

#include "cuda/hopper.hpp"
#include "cuda/tf32.hpp"

namespace catalog::cuda {

// Rows of a tile in shared memory follow each other; their pieces of 16 bytes are permuted among eight, by the row's
// number, so that the same column of eight rows lies in different banks; among four, by every second row's, where a row
// is no multiple of 128 bytes. `panel_rows` > 0: in panels of that many rows of 128 bytes, as wgmma reads them.
template <int row_bytes, int panel_rows = 0>
__device__ __forceinline__ std::uint32_t piece_offset(int row, int piece) {
    if constexpr (panel_rows > 0)
        return piece / 8 * (panel_rows * 128) + row * 128 + ((piece % 8 ^ (row & 7)) << 4);
    const int permutation = row_bytes % 128 == 0 ? row & 7 : row / 2 & 3;
    return row * row_bytes + ((piece ^ permutation) << 4);
}

// Where a lane finds its rows of 8 x 8 matrices of 16 bits in one tile. Steps along the head dim change bits 5 and 6 of
// the address, which the permutation of pieces occupies too, and then the address by 128; or bit 5, and then by 64.
template <int row_bytes>
class MatrixRows {
    static constexpr int steps = row_bytes % 128 == 0 ? 4 : 2;

   public:
    // The lane's row of the first 16 rows, and its piece of the first two.
    __device__ __forceinline__ MatrixRows(std::uint32_t tile, int row, int piece)
        : address(tile + piece_offset<row_bytes>(row, piece)) {}

    // In the 16 rows from `first_row` on, the 32 bytes from 32 * step on.
    __device__ __forceinline__ std::uint32_t at(int first_row, int step) const {
        return (address ^ (step % steps << 5)) + first_row * row_bytes + step / steps * (32 * steps);
    }

   private:
    std::uint32_t address;
};

// Where a lane finds the values of its two keys of every eight, in the column lane / 4 of every eight. Rows 2 (lane % 4) of
// eight neighbours, and those that follow, are permuted differently: 32 lanes read from 32 banks.
template <int hdim>
class ValueRows {
    using Rows = MatrixRows<hdim * 4>;

   public:
    __device__ __forceinline__ ValueRows(std::uint32_t tile, int lane)
        : even(tile + lane / 4 % 4 * 4, lane % 4 * 2, lane / 16),
          odd(tile + lane / 4 % 4 * 4, lane % 4 * 2 + 1, lane / 16) {}

    // Of the eight keys from `first_key` on, in the columns from 8 n on.
    __device__ __forceinline__ TwoTf32<2> load(int first_key, int n) const {
        return TwoTf32<2>({load_word(even.at(first_key, n)), load_word(odd.at(first_key, n))});
    }

   private:
    static __device__ __forceinline__ std::uint32_t load_word(std::uint32_t address) {
        std::uint32_t word;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
        return word;
    }

    Rows even, odd;
};

}  // namespace catalog::cuda
