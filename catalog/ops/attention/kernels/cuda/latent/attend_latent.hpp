// Forward of multi-head latent attention (MLA) with wgmma, after the projections of K and V are absorbed: keys of 512
// elements and 64 that are rotated, and V usually the first 512 of K. Then each tile is copied once. The division of O's
// columns between two warpgroups is FlashMLA's.
//
// While the values of a tile are summed up, the next tile is weighed. Each warpgroup that sums up then copies, to where its
// own values were, those of the tile after that, half a tile at a time. Fetching tiles into the L2 earlier gains nothing.
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

// The tiles from `key` to `end` for one warpgroup that sums up. Where V is the beginning of K, tiles take turns at the
// stages.
template <class Row, bool partial>
__device__ __forceinline__ void sum_up_one_cache(LatentSums<Row, partial>& sums,
                                                 const LatentLoads<Row, partial>& loads, int key, int end) {
    constexpr int keys = LatentShape<Row>::keys;
    if (key < end) loads.load_keys(loads.find_keys(key, end), 0);
    if (key + keys < end) loads.load_keys(loads.find_keys(key + keys, end), 1);
    for (Ring<2> ring; key < end; key += keys, ring.next()) {
        sums.await_weights();
        sums.start_adding(ring);
        const auto next = loads.find_keys(key + 2 * keys, end);
        sums.finish_half();
        const bool more = key + 2 * keys < end;
        if (more) loads.template load_half_of_keys<0>(next, ring.stage);
        sums.finish_adding();
        if (more) loads.template load_half_of_keys<1>(next, ring.stage);
    }
}

// Else keys have the first stage, and values the second.
template <class Row, bool partial>
__device__ __forceinline__ void sum_up_two_caches(LatentSums<Row, partial>& sums,
                                                  const LatentLoads<Row, partial>& loads, int key, int end) {
    constexpr int keys = LatentShape<Row>::keys;
    if (key < end) {
        loads.load_keys(loads.find_keys(key, end), 0);
        loads.load_values(loads.find_values(key, end), 1);
    }
    for (Ring<2> ring{1, 0}; key < end; key += keys, ring.phase ^= 1) {
        sums.await_weights();
        const bool more = key + keys < end;
        if (more) loads.load_keys(loads.find_keys(key + keys, end), 0);
        sums.start_adding(ring);
        const auto next = loads.find_values(key + keys, end);
        sums.finish_adding();
        if (more) loads.load_values(next, 1);
    }
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
        barrier_init(Shape::summed(shared), 128 * Shape::summing);
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
        const LatentLoads<Row, partial> loads(args, work, shared, warpgroup - 1);
        LatentSums<Row, partial> sums(shared, warpgroup - 1);
        if constexpr (one_cache)
            sum_up_one_cache(sums, loads, key, end);
        else
            sum_up_two_caches(sums, loads, key, end);
        sums.await_weights();
        sums.store(args, work);
        return;
    }
    release_registers<120>();
    LatentWeights<Row, partial> weights(args, work, window, shared);
    LatentLoads<Row, partial>(args, work, shared, 0).load_queries();
    copy_wait<0>();
    named_barrier_sync(1, 128);
    if (!(args.scale > 0.0f)) {
        rescale_queries<typename Row::dtype>(args, shared, Shape::q_bytes, static_cast<int>(threadIdx.x), 128);
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
