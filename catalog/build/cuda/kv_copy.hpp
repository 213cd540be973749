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

// Copies, tile after tile, the `rows` rows from number `first_row` of each tile on. A lane has pieces of rows `turn_rows`
// apart; which, repeats after `period` steps.
template <class Row, int hdim, int rows, bool padded>
class KvCopy {
    using T = typename Row::dtype;

    static constexpr int pieces = hdim / 8;
    static constexpr int period = pieces / std::gcd(pieces, 32), turn_rows = 32 * period / pieces;
    static constexpr int turns = rows / turn_rows;
    static_assert(hdim % 64 == 0 && rows % turn_rows == 0);
    static_assert(rows % 8 == 0 || 8 % rows == 0);  // so that a turn changes the permutation of pieces by a constant

   public:
    __device__ __forceinline__ KvCopy(const catalog_tensor& tensor, const Sequence& seq, int head, int hdim_stored,
                                      int first_row)
        : tensor(tensor), hdim_stored(hdim_stored), first_row(first_row) {
        const T* start = rows_of<const T>(tensor, Row::paged_kv ? 0 : seq.batch, head, seq.first_k);
#pragma unroll
        for (int part = 0; part < period; ++part)
            source[part] = start + piece_of(part) * 8 + (Row::paged_kv ? 0 : (first_row + row_of(part)) * stride());
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
            const int rows_left = is_stored(part) ? left - first_row - row_of(part) : 0;
#pragma unroll
            for (int turn = 0; turn < turns; ++turn)
                copy_async(target(tile, part, turn), source[part] + turn * turn_rows * stride(),
                           turn * turn_rows < rows_left);
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
        for (int part = 0; part < period; ++part)
#pragma unroll
            for (int turn = 0; turn < turns; ++turn) {
                const int i = turn * turn_rows / 32, row = turn * turn_rows % 32;
                const std::uint32_t exists = is_stored(part) ? exist[i] >> row_of(part) : 0;
                copy_async(target(tile, part, turn),
                           source[part] + __shfl_sync(0xffffffff, offset[i], row_of(part) + row), exists & 1u << row);
            }
    }

   private:
    __device__ __forceinline__ std::int64_t stride() const { return tensor.stride_seqlen; }

    static __device__ __forceinline__ int row_of(int part) {
        return (32 * part + static_cast<int>(threadIdx.x % 32)) / pieces;
    }

    static __device__ __forceinline__ int piece_of(int part) {
        return (32 * part + static_cast<int>(threadIdx.x % 32)) % pieces;
    }

    __device__ __forceinline__ bool is_stored(int part) const { return !padded || piece_of(part) * 8 < hdim_stored; }

    __device__ __forceinline__ std::uint32_t target(std::uint32_t tile, int part, int turn) const {
        const int rows_before = turn * turn_rows;
        return ((tile + piece_offset<hdim>(first_row + row_of(part), piece_of(part))) ^ (rows_before % 8 << 4)) +
               rows_before * (hdim * 2);
    }

    const catalog_tensor& tensor;
    const T* source[period];
    int hdim_stored, first_row;
};

}  // namespace catalog::cuda
