// How kernels for few queries are divided into blocks, and their launch: a block has some rows of one K/V head of one
// sequence, and all keys or one part of them.
#pragma once

#include <algorithm>
#include <climits>

#include "cuda/common/scores.hpp"
#include "cuda/kernel_launch.hpp"
#include "kv_copy.hpp"

namespace catalog::cuda {

// What the host computes for a launch.
template <class Row>
struct MmaGrid {
    int tiles;  // of the longest sequence
    Divisor heads, page_size;  // page_size: without pages, how many keys share factors
    Scores<Row> scores;
    KvSteps k_steps, v_steps;
};

// Whether blocks whose rows attend to the same keys are neighbours, so that the L2 has the keys of all of them.
template <class Row>
inline constexpr bool neighbours_share_keys = false;

// Whether the heads that share a K/V head are rows of the same blocks. Each may have a block mask of its own.
template <class Row>
inline constexpr bool heads_share_rows = !Row::block_mask;

// What a block answers: up to tile_m0 rows of one K/V head of one sequence, against one split of the keys.
template <class Row, bool partial>
struct MmaWork {
    const MmaGrid<Row>& grid;
    Sequence seq;
    int head_k, split, first_row, rows;  // no rows: there is nothing to do
    int head_q;                          // of all rows, unless heads share them

    // Heads of one sequence are worked on at the same time; the last tiles, which see most under a causal mask, first.
    __device__ __forceinline__ MmaWork(const catalog_args& args, const MmaGrid<Row>& grid, int zero) : grid(grid) {
        const int heads = static_cast<int>(heads_share_rows<Row> ? args.nhead_k : args.nhead_q);
        const int batch = static_cast<int>(args.batch);
        const int splits = partial ? static_cast<int>(args.num_splits) : 1;
        const int block = static_cast<int>(blockIdx.x) + zero;
        const int of_tile = neighbours_share_keys<Row> ? block / grid.tiles : block, of_head = of_tile / heads;
        const int of_sequence = of_head / batch;
        const int tile = neighbours_share_keys<Row> ? block - of_tile * grid.tiles : of_sequence / splits;
        head_k = of_tile - of_head * heads;
        if constexpr (!heads_share_rows<Row>) {
            head_q = head_k;
            head_k /= static_cast<int>(args.nhead_q / args.nhead_k);
        }
        split = of_sequence % splits;
        first_row = (grid.tiles - 1 - tile) * Row::tile_m0;
        seq = sequence_of<Row>(args, of_head - of_sequence * batch);
        rows = rows_left();
    }

    __device__ __forceinline__ MmaWork(const MmaGrid<Row>& grid, const Sequence& seq, int head_k, int row_tile)
        : grid(grid), seq(seq), head_k(head_k), split(0), first_row(row_tile * Row::tile_m0), rows(rows_left()) {}

    // The keys that there are: all, or those of the split.
    __device__ __forceinline__ KeyRange keys(const catalog_args& args) const {
        if constexpr (!partial) return {0, seq.seqlen_k};
        return keys_of_split(seq.seqlen_k, split, static_cast<int>(args.num_splits), Row::tile_n0);
    }

    __device__ __forceinline__ QueryRow row_at(int row) const { return query_row(first_row + row, grid.heads); }

    __device__ __forceinline__ int head_of(const QueryRow& at) const {
        return heads_share_rows<Row> ? head_k * static_cast<int>(grid.heads.divisor) + at.head : head_q;
    }

    // Whether the block mask has the rows attend to the tile of keys from `key` on.
    __device__ __forceinline__ bool attends_to(const catalog_args& args, int key) const {
        if constexpr (!Row::block_mask) return true;
        const int row = first_row / static_cast<int>(args.block_mask_q);
        const int column = key / static_cast<int>(args.block_mask_kv);
        return rows_of<const std::uint8_t>(args.block_mask, seq.batch, head_q, row)[column] != 0;
    }

    template <class Element>
    __device__ __forceinline__ Element* element_of(const catalog_tensor& tensor, const QueryRow& at) const {
        return rows_of<Element>(tensor, seq.batch, head_of(at), seq.first_q + at.query, split);
    }

    // Where the results of a row of the tile go: O of a split, O itself, and LSE, NULL where it is not wanted.
    static constexpr bool of_part = partial;

    __device__ __forceinline__ float* part_of(const catalog_args& args, int row) const {
        return element_of<float>(args.o_acc, row_at(row));
    }

    __device__ __forceinline__ typename Row::otype* o_of(const catalog_args& args, int row) const {
        return element_of<typename Row::otype>(args.o, row_at(row));
    }

    __device__ __forceinline__ float* lse_of(const catalog_args& args, int row) const {
        if constexpr (!partial && !Row::lse) return nullptr;
        const catalog_tensor& lse = partial ? args.lse_acc : args.lse;
        return lse.data ? element_of<float>(lse, row_at(row)) : nullptr;
    }

   private:
    __device__ __forceinline__ int rows_left() const {
        return max(0, min(Row::tile_m0, seq.seqlen_q * static_cast<int>(grid.heads.divisor) - first_row));
    }
};

// The queries in shared memory, of a call with a scale that is not positive: see Scores. By `threads` threads.
template <class T>
__device__ __forceinline__ void rescale_queries(const catalog_args& args, std::uint32_t q, int bytes, int thread,
                                                int threads) {
    const std::uint32_t kept = args.scale == 0.0f ? 0 : 0xffffffffu;
    const std::uint32_t signs = sizeof(T) == 1 ? 0x80808080u : sizeof(T) == 2 ? 0x80008000u : 0x80000000u;
    const std::uint32_t flipped = args.scale == 0.0f ? 0 : signs;
    for (int offset = thread * 4; offset < bytes; offset += threads * 4) {
        std::uint32_t pair;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(q + offset) : "memory");
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(q + offset), "r"((pair & kept) ^ flipped) : "memory");
    }
}

// What the host checks of a call without parts of the keys.
template <class Row>
inline catalog_status check_whole(const catalog_args* args) {
    if (const catalog_status status = check_call<Row>(args); status != CATALOG_OK) return status;
    if (args->num_splits != 1) return CATALOG_BAD_ARGUMENT;
    const bool has_outputs = args->o.data && aligned_queries<Row, typename Row::otype>(*args, args->o);
    return has_outputs || !has_queries(*args) ? CATALOG_OK : CATALOG_BAD_ARGUMENT;
}

// Of one with parts.
template <class Row>
inline catalog_status check_splits(const catalog_args* args) {
    if (const catalog_status status = check_call<Row>(args); status != CATALOG_OK) return status;
    const bool has_outputs = args->o_acc.data && args->lse_acc.data &&
                             aligned_queries<Row, float>(*args, args->o_acc, args->num_splits);
    return has_outputs || !has_queries(*args) ? CATALOG_OK : CATALOG_BAD_ARGUMENT;
}

// `Shape` has the number of threads of a block, the bytes of its shared memory, and what copies keys and values. `more` are
// the kernel's parameters behind those that all have.
template <class Row, bool partial, class Shape, class... More>
inline catalog_status launch_work(const catalog_args& args, void (*kernel)(catalog_args, MmaGrid<Row>, More...),
                                  cudaStream_t stream, const More&... more) {
    if (!has_queries(args)) return CATALOG_OK;
    const std::int64_t heads = heads_share_rows<Row> ? heads_per_kv_head(args) : 1;
    const std::int64_t tiles = (args.seqlen_q * heads + Row::tile_m0 - 1) / Row::tile_m0;
    const std::int64_t splits = partial ? args.num_splits : 1;
    std::int64_t blocks;
    if (__builtin_mul_overflow(tiles * splits, args.batch * (args.nhead_q / heads), &blocks) || blocks > INT_MAX)
        return CATALOG_BAD_ARGUMENT;
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::shared_bytes) != cudaSuccess)
        return launched(), CATALOG_DEVICE_ERROR;
    const std::int64_t block = Row::qscale == Qscale::blockscale ? std::min(args.block_scale_size_kv, most_tokens) : 1;
    const MmaGrid<Row> grid{static_cast<int>(tiles), Divisor(heads), Divisor(Row::paged_kv ? args.page_size : block),
                            Scores<Row>(args), Shape::KCopy::steps_of(args, args.k), Shape::VCopy::steps_of(args, args.v)};
    kernel<<<static_cast<unsigned>(blocks), Shape::threads, Shape::shared_bytes, stream>>>(args, grid, more...);
    return launched();
}

}  // namespace catalog::cuda
