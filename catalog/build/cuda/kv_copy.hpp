// Rows of K or V on their way into shared memory, copied by single warps: from dense tensors, or from pages of a cache.
#pragma once

#include <numeric>

#include "mma.hpp"
#include "sequence.hpp"

namespace catalog::cuda {

// Rows of a tile in shared memory follow each other; their pieces of 16 bytes are permuted among eight, by the row's
// number, so that the same column of eight rows lies in different banks.
template <int hdim>
__device__ __forceinline__ std::uint32_t piece_offset(int row, int piece) {
    return row * (hdim * 2) + ((piece ^ (row & 7)) << 4);
}

// The places of `rows` rows of a paged cache: lane i holds those of rows i, i + 32, ...
template <int rows>
struct Places {
    static constexpr int count = (rows + 31) / 32;
    int page[count], slot[count];  // page -1: there is no such row

    __device__ __forceinline__ void find(const catalog_args& args, const Divisor& page_size, int sequence,
                                         int first_key, int end) {
        const auto* table =
            static_cast<const std::int32_t*>(args.block_table.data) + sequence * args.block_table.stride_batch;
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const int row = 32 * i + static_cast<int>(threadIdx.x % 32), key = first_key + row;
            page[i] = -1;
            slot[i] = 0;
            if (row < rows && key < end) {
                const int index = page_size.quotient(key);
                const int number = table[index];
                slot[i] = key - index * static_cast<int>(page_size.divisor);
                if (0 <= number && number < args.num_pages) page[i] = number;
            }
        }
    }
};

// Copies, tile after tile, the rows of one of the `warps` warps that share this: `rows` each. A lane has pieces of rows
// `turn_rows` apart; which, repeats after `period` steps.
template <class Row, int hdim, int rows, int warps, bool padded>
class KvCopy {
    using T = typename Row::dtype;

    static constexpr int pieces = hdim / 8;
    static constexpr int period = pieces / std::gcd(pieces, 32), turn_rows = 32 * period / pieces;
    static_assert(hdim % 64 == 0 && rows % turn_rows == 0);
    static_assert(rows % 8 == 0 || 8 % rows == 0);  // so that a turn changes the permutation of pieces by a constant

    // The first of a lane's pieces. Computed anew for every tile: registers are scarce.
    struct Piece {
        int row, row_of_warp, piece;

        __device__ __forceinline__ Piece(int part, int hdim_stored) {
            const int thread = opaque(static_cast<int>(threadIdx.x)), number = 32 * part + thread % 32;
            row_of_warp = number / pieces;
            row = thread / 32 % warps * rows + row_of_warp;
            piece = number % pieces;
            exists = !padded || piece * 8 < hdim_stored;
        }

        // After so many rows.
        __device__ __forceinline__ std::uint32_t target(std::uint32_t tile, int rows_before) const {
            return ((tile + piece_offset<hdim>(row, piece)) ^ (rows_before % 8 << 4)) + rows_before * (hdim * 2);
        }

        bool exists;
    };

   public:
    __device__ __forceinline__ KvCopy(const catalog_tensor& tensor, const Sequence& seq, int head, int hdim_stored)
        : tensor(tensor), hdim_stored(hdim_stored) {
        const T* start = rows_of<const T>(tensor, Row::paged_kv ? 0 : seq.batch, head, seq.first_k);
#pragma unroll
        for (int part = 0; part < period; ++part) {
            const Piece first(part, hdim_stored);
            source[part] = start + first.piece * 8 + (Row::paged_kv ? 0 : first.row * stride());
        }
    }

    // The first key of the next tile is `keys` further on.
    __device__ __forceinline__ void advance(int keys) {
        if constexpr (!Row::paged_kv)
#pragma unroll
            for (int part = 0; part < period; ++part) source[part] += keys * stride();
    }

    // To `tile`. `left`: keys that there are from the tile's first on; the others are zeros.
    __device__ __forceinline__ void copy(std::uint32_t tile, int left) const {
#pragma unroll
        for (int part = 0; part < period; ++part) {
            const Piece first(part, hdim_stored);
            const int rows_left = first.exists ? left - first.row : 0;
#pragma unroll
            for (int row = 0; row < rows; row += turn_rows)
                copy_async(first.target(tile, row), source[part] + row * stride(), row < rows_left);
        }
    }

    __device__ __forceinline__ void copy(std::uint32_t tile, const Places<rows>& places) const {
        std::int64_t offset[Places<rows>::count];
        std::uint32_t exist[Places<rows>::count];
#pragma unroll
        for (int i = 0; i < Places<rows>::count; ++i) {
            offset[i] = places.page[i] * tensor.stride_batch + places.slot[i] * stride();
            exist[i] = __ballot_sync(0xffffffff, places.page[i] >= 0);
        }
#pragma unroll
        for (int part = 0; part < period; ++part) {
            const Piece first(part, hdim_stored);
#pragma unroll
            for (int row = 0; row < rows; row += turn_rows) {
                const std::uint32_t exists = first.exists ? exist[row / 32] >> first.row_of_warp : 0;
                const std::int64_t place = __shfl_sync(0xffffffff, offset[row / 32], first.row_of_warp + row % 32);
                copy_async(first.target(tile, row), source[part] + place, exists & 1u << row % 32);
            }
        }
    }

   private:
    __device__ __forceinline__ std::int64_t stride() const { return tensor.stride_seqlen; }

    const catalog_tensor& tensor;
    const T* source[period];
    int hdim_stored;
};

}  // namespace catalog::cuda
