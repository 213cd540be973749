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
    int page[(rows + 31) / 32], slot[(rows + 31) / 32];  // page -1: there is no such row

    __device__ __forceinline__ void find(const catalog_args& args, const Divisor& page_size, int sequence,
                                         int first_key, int end) {
        const auto* table =
            static_cast<const std::int32_t*>(args.block_table.data) + sequence * args.block_table.stride_batch;
#pragma unroll
        for (int i = 0; i < (rows + 31) / 32; ++i) {
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

// Copies `rows` rows from number `first_row` of each tile on.
template <class Row, int hdim, int rows, bool padded>
class KvCopy {
    using T = typename Row::dtype;

    static constexpr int pieces = hdim / 8;
    static constexpr int steps = rows * pieces / 32;
    static constexpr int period = pieces / std::gcd(pieces, 32);  // steps after which a lane has the same column again
    static constexpr int period_rows = 32 * period / pieces;
    static_assert(hdim % 64 == 0 && rows * pieces % 32 == 0);

   public:
    __device__ __forceinline__ KvCopy(const catalog_tensor& tensor, const Sequence& seq, int head, int hdim_stored,
                                      int first_row)
        : stride(tensor.stride_seqlen), page_stride(tensor.stride_batch), hdim_stored(hdim_stored),
          first_row(first_row) {
        const T* start = rows_of<const T>(tensor, Row::paged_kv ? 0 : seq.batch, head, seq.first_k);
#pragma unroll
        for (int part = 0; part < period; ++part)
            source[part] = start + piece_of(part) * 8 + (Row::paged_kv ? 0 : (first_row + row_of(part)) * stride);
    }

    // To `tile`, from the tile that starts at `first_key`; keys from `end` on are zeros.
    __device__ __forceinline__ void copy(std::uint32_t tile, int first_key, int end, const Places<rows>& places) const {
        const std::int64_t start = first_key * stride;
#pragma unroll
        for (int step = 0; step < steps; ++step) {
            const int part = step % period, row = row_of(step);
            const T* from = source[part];
            bool exists = !padded || piece_of(step) * 8 < hdim_stored;
            if constexpr (Row::paged_kv) {
                const int turn = step / period * period_rows / 32;
                const int page = __shfl_sync(0xffffffff, places.page[turn], row % 32);
                const int slot = __shfl_sync(0xffffffff, places.slot[turn], row % 32);
                exists &= page >= 0;
                from += page * page_stride + slot * stride;
            } else {
                exists &= first_key + first_row + row < end;
                from += start + step / period * period_rows * stride;
            }
            copy_async(tile + piece_offset<hdim>(first_row + row, piece_of(step)), from, exists);
        }
    }

   private:
    static __device__ __forceinline__ int row_of(int step) {
        return (32 * (step % period) + static_cast<int>(threadIdx.x % 32)) / pieces + step / period * period_rows;
    }

    static __device__ __forceinline__ int piece_of(int step) {
        return (32 * (step % period) + static_cast<int>(threadIdx.x % 32)) % pieces;
    }

    const T* source[period];
    std::int64_t stride, page_stride;
    int hdim_stored, first_row;
};

}  // namespace catalog::cuda
