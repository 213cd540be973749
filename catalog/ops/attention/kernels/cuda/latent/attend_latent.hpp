// Forward of multi-head latent attention (MLA) with wgmma, after the projections of K and V are absorbed: keys of 512
// elements and 64 that are rotated, and V usually the first 512 of K. The division of O's columns between two warpgroups
// is FlashMLA's. This kernel copies tiles with cp.async: pages may have any size, and V may be any tensor.
//
// While the values of a tile are summed up, the next tile is weighed. Each warpgroup that sums up then copies, to where its
// own values were, those of the tile after that, half a tile at a time. Fetching tiles into the L2 earlier gains nothing.
#pragma once

#include "latent_loads.hpp"
#include "latent_rows.hpp"

namespace catalog::cuda {

// What warpgroups tell each other: the weights of a tile, with a number for each row, are there; its values are summed up.
template <class Row>
class LatentTurns {
    using Shape = LatentShape<Row>;

   public:
    __device__ __forceinline__ explicit LatentTurns(std::uint32_t shared) : shared(shared) {}

    static __device__ __forceinline__ void init(std::uint32_t shared) {
        for (int stage = 0; stage < 2; ++stage)
            for (int group = 0; group < Shape::summing; ++group) barrier_init(Shape::full(shared, stage, group), 128);
        // Every thread arrives for itself: then nothing rests on the order within a warp.
        barrier_init(Shape::weighed(shared), 128);
        barrier_init(Shape::summed(shared), 128 * Shape::summing);
        barrier_init_fence();
    }

    // By those who weigh: before they write, and behind it.
    __device__ __forceinline__ void await_sums() const { barrier_wait(Shape::summed(shared), tile % 2 ^ 1); }
    __device__ __forceinline__ void tell_weights() {
        barrier_arrive(Shape::weighed(shared));
        ++tile;
    }

    // By those who sum up: before they read, and behind it.
    __device__ __forceinline__ void await_weights() { barrier_wait(Shape::weighed(shared), tile++ % 2); }
    __device__ __forceinline__ void tell_sums() const { barrier_arrive(Shape::summed(shared)); }

   private:
    const std::uint32_t shared;
    int tile = 0;
};

// One warpgroup that sums up the values of tiles, and copies them.
template <class Row, bool partial>
class LatentCopiedSums {
    using Shape = LatentShape<Row>;

   public:
    __device__ __forceinline__ LatentCopiedSums(const catalog_args& args, const MmaWork<Row, partial>& work,
                                                std::uint32_t shared, int group)
        : shared(shared), group(group), loads(args, work, shared, group), sums(group), turns(shared) {}

    // Where V is the beginning of K, tiles take turns at the stages.
    __device__ __forceinline__ void sum_up_one_cache(const LatentRange<Row>& range) {
        const int begin = range.begin, second = range.after(begin), end = range.end;
        if (begin < end) loads.load_keys(loads.find_keys(begin, end), 0);
        if (second < end) loads.load_keys(loads.find_keys(second, end), 1);
        Ring<2> ring;
        for (int key = begin; key < end; key = range.after(key), ring.next()) {
            await_weights();
            start_adding(ring);
            const int loaded = range.after(range.after(key));
            const auto next = loads.find_keys(loaded, end);
            sums.finish_half();
            const bool more = loaded < end;
            if (more) loads.template load_half_of_keys<0>(next, ring.stage);
            finish_adding();
            if (more) loads.template load_half_of_keys<1>(next, ring.stage);
        }
    }

    // Else keys have the first stage, and values the second.
    __device__ __forceinline__ void sum_up_two_caches(const LatentRange<Row>& range) {
        const int begin = range.begin, end = range.end;
        if (begin < end) {
            loads.load_keys(loads.find_keys(begin, end), 0);
            loads.load_values(loads.find_values(begin, end), 1);
        }
        Ring<2> ring{1, 0};
        for (int key = begin; key < end; key = range.after(key), ring.phase ^= 1) {
            await_weights();
            const int loaded = range.after(key);
            const bool more = loaded < end;
            if (more) loads.load_keys(loads.find_keys(loaded, end), 0);
            start_adding(ring);
            const auto next = loads.find_values(loaded, end);
            finish_adding();
            if (more) loads.load_values(next, 1);
        }
    }

    __device__ __forceinline__ void store(const catalog_args& args, const MmaWork<Row, partial>& work) {
        await_weights();
        sums.store(args, work);
    }

   private:
    // Of the next tile, or what O is to be multiplied with at the end.
    __device__ __forceinline__ void await_weights() {
        turns.await_weights();
        sums.rescale(shared + Shape::notes);
    }
    __device__ __forceinline__ void start_adding(const Ring<2>& ring) {
        barrier_wait(Shape::full(shared, ring.stage, group), ring.phase);
        sums.start_adding(shared + Shape::weights, shared + Shape::stages + ring.stage * Shape::stage_bytes);
    }
    __device__ __forceinline__ void finish_adding() {
        sums.finish_adding();
        turns.tell_sums();
    }

    const std::uint32_t shared;
    const int group;
    const LatentLoads<Row, partial> loads;
    LatentSums<Row, partial> sums;
    LatentTurns<Row> turns;
};

// The scores of a tile whose copies are on their way.
template <class Row, bool partial>
__device__ __forceinline__ void multiply_copied(typename LatentWeights<Row, partial>::Tile& s, std::uint32_t shared,
                                                const Ring<2>& ring) {
    using Shape = LatentShape<Row>;
    using Weights = LatentWeights<Row, partial>;
    const std::uint64_t q = describe_panel<Major::k>(shared);
    const std::uint64_t k = describe_panel<Major::k>(shared + Shape::stages + ring.stage * Shape::stage_bytes);
    forget(s);
#pragma unroll
    for (int group = 0; group < Shape::summing; ++group) {
        barrier_wait(Shape::full(shared, ring.stage, group), ring.phase);
        fence_proxy_async();
        wgmma_fence();
        Weights::template multiply<Shape::panels_of_group>(s, q, k, group * Shape::panels_of_group);
        if (group == 0)
            Weights::template multiply<Shape::panels - Shape::value_panels>(s, q, k, Shape::value_panels);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(s);
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
    if (threadIdx.x == 0) LatentTurns<Row>::init(shared);
    __syncthreads();

    const Window<Row::mask> window = window_of<Row::mask>(args, work.seq.seqlen_q, work.seq.seqlen_k, work.keys(args));
    const LatentRange<Row> range(args, work, window);

    const int warpgroup = static_cast<int>(threadIdx.x) / 128;
    if (warpgroup > 0) {
        claim_registers<192>();
        LatentCopiedSums<Row, partial> sums(args, work, shared, warpgroup - 1);
        if constexpr (one_cache)
            sums.sum_up_one_cache(range);
        else
            sums.sum_up_two_caches(range);
        sums.store(args, work);
        return;
    }
    release_registers<120>();
    LatentWeights<Row, partial> weights(args, work, window);
    LatentTurns<Row> turns(shared);
    load_latent_queries(args, work, shared);
    Ring<2> ring;
    for (int key = range.begin; key < range.end; key = range.after(key)) {
        typename LatentWeights<Row, partial>::Tile s;
        float rescale[2];
        multiply_copied<Row, partial>(s, shared, ring);
        weights.find_maxima(s, key, range.all, rescale);
        weights.weigh(s);
        turns.await_sums();
        weights.store(s, shared + Shape::weights);
        weights.write(rescale, shared + Shape::notes);
        turns.tell_weights();
        ring.next();
        if constexpr (!one_cache) ring.next();
    }
    float normalize[2];
    weights.finish(normalize);
    turns.await_sums();
    weights.write(normalize, shared + Shape::notes);
    turns.tell_weights();
}

}  // namespace catalog::cuda
