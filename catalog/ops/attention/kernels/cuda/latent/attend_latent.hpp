// Forward of multi-head latent attention (MLA) with wgmma, after the projections of K and V are absorbed: keys of 512
// elements and 64 that are rotated, and V usually the first 512 of K. Then each tile is copied once. The division of O's
// columns between two warpgroups is FlashMLA's.
//
// While the values of a tile are summed up, the next tile is weighed, and the one after it is on its way: each warpgroup
// that sums up copies to where its own values were.
#pragma once

#include "latent_loads.hpp"
#include "latent_rows.hpp"

namespace catalog::cuda {

// Whether V is the beginning of K, element by element.
inline bool values_begin_keys(const catalog_args& args) {
    const catalog_tensor &k = args.k, &v = args.v;
    return k.data == v.data && k.stride_batch == v.stride_batch && k.stride_nhead == v.stride_nhead &&
           k.stride_seqlen == v.stride_seqlen;
}

// The tiles from `key` to `end` for one warpgroup that sums up. With one cache, tiles take turns at the stages; else keys
// have the first one, and values the second.
template <bool one_cache, class Row, bool partial>
__device__ __forceinline__ void sum_up(LatentSums<Row, partial>& sums, LatentLoads<Row, partial>& loads, int key,
                                       int end) {
    constexpr int keys = LatentShape<Row>::keys;
    Ring<2> ring;
    const auto load_keys = [&](int from, int stage) {
        if (from >= end) return;
        loads.find_keys(from, end);
        loads.load_keys(stage);
    };
    load_keys(key, 0);
    if constexpr (one_cache) {
        load_keys(key + keys, 1);
    } else if (key < end) {
        loads.find_values(key, end);
        loads.load_values(1);
        ring.next();
    }
    for (; key < end; key += keys) {
        sums.await_weights();
        if constexpr (!one_cache) load_keys(key + keys, 0);
        sums.start_adding(ring);
        const int next = key + (one_cache ? 2 : 1) * keys;
        if constexpr (one_cache)
            loads.find_keys(next, end);
        else
            loads.find_values(next, end);
        sums.finish_adding();
        if (next < end) {
            if constexpr (one_cache)
                loads.load_keys(ring.stage);
            else
                loads.load_values(ring.stage);
        }
        ring.next();
        if constexpr (!one_cache) ring.next();
    }
    sums.await_weights();
}

template <class Row, bool partial, bool one_cache>
__global__ void __launch_bounds__(LatentShape<Row>::threads, 1)
    attend_latent(const __grid_constant__ catalog_args args, const __grid_constant__ MmaGrid<Row> grid) {
    using Shape = LatentShape<Row>;
    extern __shared__ __align__(1024) unsigned char memory[];
    const std::uint32_t shared = shared_address(memory);
    const MmaWork<Row, partial> work(args, grid, 0);
    if constexpr (partial) let_next_kernel_start();
    if (work.rows == 0) return;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < 2; ++stage)
            for (int group = 0; group < Shape::summing; ++group) barrier_init(Shape::full(shared, stage, group), 128);
        barrier_init(Shape::weighed(shared), 128);
        barrier_init(Shape::summed(shared), 4 * Shape::summing);
        barrier_init_fence();
    }
    __syncthreads();

    const Window<Row::mask> window = window_of<Row::mask>(args, work.seq.seqlen_q, work.seq.seqlen_k, work.keys(args));
    const KeyRange first_row = window.visible(work.row_at(0).query);
    const KeyRange last_row = window.visible(work.row_at(work.rows - 1).query);
    const KeyRange some = seen_by_some(first_row, last_row), all = seen_by_all(first_row, last_row);
    int key = some.begin / Shape::keys * Shape::keys;
    // Of the mask of a split its first key is left out, so a split without keys must not have a tile.
    const int end = some.begin < some.end ? some.end : key;

    const int warpgroup = static_cast<int>(threadIdx.x) / 128;
    if (warpgroup > 0) {
        claim_registers<192>();
        LatentLoads<Row, partial> loads(args, work, shared, warpgroup - 1);
        LatentSums<Row, partial> sums(shared, warpgroup - 1);
        sum_up<one_cache>(sums, loads, key, end);
        sums.store(args, work);
        return;
    }
    release_registers<120>();
    LatentWeights<Row, partial> weights(args, work, window, shared);
    LatentLoads<Row, partial>(args, work, shared, 0).load_queries();
    copy_wait<0>();
    named_barrier_sync(1, 128);
    if (!(args.scale > 0.0f)) {
        rescale_queries(args, shared, Shape::q_bytes, static_cast<int>(threadIdx.x), 128);
        named_barrier_sync(1, 128);
    }
    Ring<2> ring;
    for (; key < end; key += Shape::keys) {
        weights.weigh_keys(ring, key, all);
        ring.next();
        if constexpr (!one_cache) ring.next();
    }
    weights.finish();
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
