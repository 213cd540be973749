// Forward of multi-head latent attention (MLA) with wgmma, after the projections of K and V are absorbed: a head dim of 512
// and 64 elements that are rotated, and V usually the first 512 of K. Then each tile of keys is copied once, while the one
// before it is worked on. A V elsewhere is copied beside its keys, and products wait for both.
#pragma once

#include "latent_rows.hpp"
#include "cuda/mma/staged_queries.hpp"

namespace catalog::cuda {

// Whether V is the beginning of K, element by element.
inline bool values_begin_keys(const catalog_args& args) {
    const catalog_tensor &k = args.k, &v = args.v;
    return k.data == v.data && k.stride_batch == v.stride_batch && k.stride_nhead == v.stride_nhead &&
           k.stride_seqlen == v.stride_seqlen;
}

// The tiles of keys on their way into shared memory, in order; `end`: no row sees keys from there on.
template <class Row, bool partial, bool one_cache>
class LatentCopies {
    using Shape = LatentShape<Row>;

   public:
    __device__ __forceinline__ LatentCopies(const catalog_args& args, const MmaWork<Row, partial>& work,
                                            std::uint32_t stages, int first_key, int end)
        : args(args),
          work(work),
          stages(stages),
          end(end),
          k_copy(args.k, work.grid.k_steps, args.hdim_q, work.seq, work.head_k),
          v_copy(args.v, work.grid.v_steps, args.hdim_v, work.seq, work.head_k) {
        k_copy.skip(first_key);
        if constexpr (!one_cache) v_copy.skip(first_key);
    }

    // The tile that begins at `key`: its keys to a stage, and values that lie elsewhere to the other one. A group of copies
    // even where there is no such tile: waits count groups.
    __device__ __forceinline__ void start(int key, int stage) {
        if (key < end) {
            copy(k_copy, stages + stage * Shape::stage_bytes, key);
            if constexpr (!one_cache) copy(v_copy, stages + (1 - stage) * Shape::stage_bytes, key);
        }
        copy_commit();
    }

   private:
    template <class Copy>
    __device__ __forceinline__ void copy(Copy& copy, std::uint32_t target, int key) {
        constexpr int rows = Shape::keys / Shape::warps;
        if constexpr (Row::paged_kv) {
            Places<Row, rows> places;
            places.find(args, work.grid.page_size, work.seq.index, key + static_cast<int>(threadIdx.x) / 32 * rows, end);
            copy.copy(target, places, zero_of(key));
        } else {
            copy.copy(target, end - key, zero_of(key));
        }
    }

    const catalog_args& args;
    const MmaWork<Row, partial>& work;
    const std::uint32_t stages;
    const int end;
    typename Shape::KCopy k_copy;
    typename Shape::VCopy v_copy;
};

template <class Row, bool partial, bool one_cache>
__global__ void __launch_bounds__(LatentShape<Row>::threads, 1)
    attend_latent(const __grid_constant__ catalog_args args, const __grid_constant__ MmaGrid<Row> grid) {
    using Shape = LatentShape<Row>;
    extern __shared__ __align__(1024) unsigned char memory[];
    const std::uint32_t shared = shared_address(memory), stages = shared + Shape::q_bytes;
    const MmaWork<Row, partial> work(args, grid, 0);
    if constexpr (partial) let_next_kernel_start();
    if (work.rows == 0) return;
    LatentRows<Row, partial> rows(args, work, shared);
    const KeyRange some = rows.seen_by_some(), all = rows.seen_by_all();
    int key = some.begin / Shape::keys * Shape::keys;
    // Of the mask of a split its first key is left out, so a split without keys must not have a tile.
    const int end = some.begin < some.end ? some.end : key;
    asm volatile("" : "+r"(key));  // so that it could be negative: see zero_of
    LatentCopies<Row, partial, one_cache> copies(args, work, stages, key, end);
    if constexpr (one_cache) copies.start(key, 0);
    StagedQueries<Row, Shape::threads, true> queries;
    queries.load(args, work);
    queries.store(args, shared);
    for (int stage = 0; key < end; key += Shape::keys) {
        if constexpr (one_cache) {
            copies.start(key + Shape::keys, 1 - stage);
            copy_wait<1>();
        } else {
            copies.start(key, stage);
            copy_wait<0>();
        }
        fence_proxy_async();
        __syncthreads();
        rows.weigh_keys(stages + stage * Shape::stage_bytes, key, all);
        rows.add_values(stages + (one_cache ? stage : 1 - stage) * Shape::stage_bytes);
        __syncthreads();  // nobody reads this stage any more
        if constexpr (one_cache) stage = 1 - stage;
    }
    rows.store();
}

template <class Row, bool partial>
inline catalog_status launch_attend_latent(const catalog_args& args, cudaStream_t stream) {
    using Shape = LatentShape<Row>;
    return values_begin_keys(args) ? launch_work<Row, partial, Shape>(args, attend_latent<Row, partial, true>, stream)
                                   : launch_work<Row, partial, Shape>(args, attend_latent<Row, partial, false>, stream);
}

template <class Row>
inline constexpr Block block_of{LatentShape<Row>::threads, LatentShape<Row>::shared_bytes};

}  // namespace catalog::cuda
