// Tiles of K and V on their way into shared memory, copied by single warps from vectorized pages: with x elements in 16
// bytes, K (num_pages, nhead_k, hdim_q / x, page_size, x) and V (num_pages, nhead_k, page_size / x, hdim_v, x).
#pragma once

#include "kv_copy.hpp"
#include "lane_keys.hpp"

namespace catalog::cuda {

// K goes where KvCopy puts it, in the order of LaneKeys. The lanes of a warp have neighbouring keys, whose pieces are
// neighbours in the cache.
template <class Row, int hdim, int rows, int warps, bool padded>
class KeyVectors {
    using T = typename Row::dtype;
    static constexpr int keys = rows < 32 ? rows : 32;  // that a warp copies at a time
    static constexpr int row_bytes = hdim * sizeof(T), pieces = row_bytes / 16, step = 32 / keys;
    static constexpr int permuted = row_bytes % 128 == 0 ? 8 : 4;  // see piece_offset
    static_assert(rows % keys == 0 && 32 % keys == 0 && permuted % step == 0 && pieces % step == 0);
    static_assert(!LaneKeys<Row>::fours || keys % 16 == 0);

   public:
    // `turn`: from piece to piece.
    static __host__ KvSteps steps_of(const catalog_args& args, const catalog_tensor&) {
        return {16, args.page_size * 16, 0};
    }

    __device__ __forceinline__ KeyVectors(const catalog_tensor& tensor, const KvSteps& steps, std::int64_t hdim_stored,
                                          const Sequence&, int head)
        : tensor(tensor),
          steps(steps),
          hdim_stored(hdim_stored),
          source(static_cast<const char*>(tensor.data) + head * (tensor.stride_nhead * sizeof(T)) +
                 threadIdx.x % 32 / keys * steps.turn) {}

    __device__ __forceinline__ void skip(int) {}

    __device__ __forceinline__ void copy(std::uint32_t tile, const Places<Row, rows>& places, int zero) const {
        const int thread = static_cast<int>(threadIdx.x) + zero, row = thread % keys, first = thread % 32 / keys;
        const int key = LaneKeys<Row>::in_row(row);
        const int stored = (padded ? static_cast<int>(hdim_stored) / in_vector<Row> : pieces) - first;
#pragma unroll
        for (int i = 0; i < Places<Row, rows>::count; ++i) {
            const int page = __shfl_sync(0xffffffff, places.page[i], key);
            const int slot = __shfl_sync(0xffffffff, places.slot[i], key);
            const char* from = source + page * (tensor.stride_batch * sizeof(T)) + slot * steps.row;
            const int there = page >= 0 ? stored : 0;
            const std::uint32_t target = tile + piece_offset<row_bytes>(thread / 32 % warps * rows + 32 * i + row, first);
#pragma unroll
            for (int piece = 0; piece < pieces; piece += step, from += step * steps.turn)
                copy_async((target ^ (piece % permuted << 4)) + piece / permuted * (permuted * 16), from, piece < there);
        }
    }

   private:
    const catalog_tensor& tensor;
    const KvSteps& steps;
    const std::int64_t hdim_stored;
    const char* const source;
};

// V lies in shared memory as in a page: x tokens of a column in 16 bytes, then the next columns, then the next x tokens.
template <class Row, int hdim, int rows, int warps, bool padded>
class ValueVectors {
    using T = typename Row::dtype;
    static constexpr int x = in_vector<Row>;
    static_assert(hdim % 32 == 0 && rows % x == 0);

   public:
    static __host__ KvSteps steps_of(const catalog_args& args, const catalog_tensor&) {
        return {static_cast<std::int64_t>(args.hdim_v * sizeof(T)), 0, 0};
    }

    __device__ __forceinline__ ValueVectors(const catalog_tensor& tensor, const KvSteps& steps,
                                            std::int64_t hdim_stored, const Sequence&, int head)
        : tensor(tensor),
          steps(steps),
          hdim_stored(hdim_stored),
          source(static_cast<const char*>(tensor.data) + head * (tensor.stride_nhead * sizeof(T)) + threadIdx.x % 32 * 16) {}

    __device__ __forceinline__ void skip(int) {}

    // x tokens are in one page. Those behind the last one are zeros.
    __device__ __forceinline__ void copy(std::uint32_t tile, const Places<Row, rows>& places, int zero) const {
        const int thread = static_cast<int>(threadIdx.x) + zero, lane = thread % 32;
        const int stored = (padded ? static_cast<int>(hdim_stored) : hdim) - lane;
        const std::uint32_t target = tile + (thread / 32 % warps * (rows / x) * hdim + lane) * 16;
#pragma unroll
        for (int row = 0; row < rows; row += x) {
            const int page = __shfl_sync(0xffffffff, places.page[row / 32], row % 32);
            const int slot = __shfl_sync(0xffffffff, places.slot[row / 32], row % 32);
            const char* from = source + page * (tensor.stride_batch * sizeof(T)) + slot * steps.row;
            const std::uint32_t exist = __ballot_sync(0xffffffff, places.page[row / 32] >= 0) >> row % 32;
            const int tokens = __popc(exist & ((1 << x) - 1)), bytes = tokens * static_cast<int>(sizeof(T));
            const std::uint32_t to = target + row / x * hdim * 16;
            // Copies of a length that is known when they are compiled are cheaper.
            if (tokens % x == 0) {
#pragma unroll
                for (int column = 0; column < hdim; column += 32)
                    copy_async(to + column * 16, from + column * 16, tokens > 0 && column < stored);
            } else {
#pragma unroll 1
                for (int column = 0; column < hdim; column += 32)
                    copy_async_first(to + column * 16, from + column * 16, column < stored ? bytes : 0);
            }
        }
    }

   private:
    const catalog_tensor& tensor;
    const KvSteps& steps;
    const std::int64_t hdim_stored;
    const char* const source;
};

}  // namespace catalog::cuda
