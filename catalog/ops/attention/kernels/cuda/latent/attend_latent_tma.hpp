// Forward of multi-head latent attention with wgmma where V is the beginning of K, and TMA can load the tiles.
//
// A tile is 72 KB, so there is room for two. Each has a warpgroup that weighs it, and both are summed up by two others, half
// of the columns each: while a tile is between the products of its keys and those of its values, or is being loaded, tensor
// cores work for the other one. That two warpgroups take turns at tiles is FlashMLA's idea as well.
//
// On an H200 a tile takes 3,200 cycles, of which tensor cores work for 2,200. Slower were: one warpgroup that weighs two
// tiles at a time (as its products wait for both), or one by one; and fetching tiles into the L2 before they are loaded.
#pragma once

#include "cuda/common/ragged_rows.hpp"
#include "latent_loads.hpp"
#include "latent_rows.hpp"

namespace catalog::cuda {

// What the host computes of the loads. A tile consists of parts of `part_rows`, each within a page, or is one part.
struct LatentKeys {
    CUtensorMap map;
    ByteStrides strides;
    PageSteps steps;
    int part_rows;
};

// Loads of one warp: a lane has a part of a tile. Keys from number `end` on read as zeros.
template <class Row, bool partial>
class LatentTiles {
    using Shape = LatentTmaShape<Row>;

   public:
    __device__ __forceinline__ LatentTiles(const catalog_args& args, const MmaWork<Row, partial>& work,
                                           const LatentKeys& keys, std::uint32_t shared, int end)
        : args(args), work(work), keys(keys), shared(shared), end(end), lane(static_cast<int>(threadIdx.x) % 32) {}

    struct Part {
        RaggedRows rows{0, 0};
        int first = 0;
    };

    // Of the tile that begins at `key`, which may lie behind the end.
    __device__ __forceinline__ Part find(int key) const {
        if constexpr (Row::paged_kv) {
            const int at = key + lane * keys.part_rows, index = work.grid.page_size.quotient(at);
            const int page = has_part() && at < end ? PageTable<Row>(args, work.seq.index)[index] : -1;
            const bool exists = 0 <= page && page < args.num_pages;
            const int slot = at - index * static_cast<int>(work.grid.page_size.divisor);
            return {rows_in_page(keys.steps, exists ? page : 0, work.head_k, slot,
                                 exists ? min(keys.part_rows, end - at) : 0),
                    0};
        } else {
            return {rows_of(keys.strides, work.seq.batch, work.head_k, work.seq.first_k, end), key};
        }
    }

    __device__ __forceinline__ void load(const Part& part, int stage, int panel) const {
        const std::uint32_t full = Shape::full(shared, stage, panel);
        if (lane == 0) barrier_arrive_expect(full, Shape::kv_panel);
        if (has_part())
            tma_load(Shape::panel(shared, stage, panel) + lane * keys.part_rows * panel_row_bytes, &keys.map, full,
                     panel * panel_columns, part.rows.first_row + part.first, part.rows.low, part.rows.high,
                     RaggedRows::wrap);
    }

   private:
    __device__ __forceinline__ bool has_part() const {
        return Row::paged_kv ? lane * keys.part_rows < Shape::keys : lane == 0;
    }

    const catalog_args& args;
    const MmaWork<Row, partial>& work;
    const LatentKeys& keys;
    const std::uint32_t shared;
    const int end, lane;
};

// The warpgroup that weighs the tiles of one stage. Its first warp loads their last panel.
template <class Row, bool partial>
class LatentTmaWeights {
    using Shape = LatentTmaShape<Row>;
    using Weights = LatentWeights<Row, partial>;
    using Tiles = LatentTiles<Row, partial>;

   public:
    __device__ __forceinline__ LatentTmaWeights(const Tiles& tiles, Weights& weights, std::uint32_t shared, int stage)
        : tiles(tiles), weights(weights), shared(shared), stage(stage) {}

    __device__ __forceinline__ void load_first(const LatentRange<Row>& range) const {
        const int key = first_of(range);
        if (loads() && key < range.end) tiles.load(tiles.find(key), stage, Shape::last_panel);
    }

    __device__ __forceinline__ void weigh(const LatentRange<Row>& range) {
        const int first = first_of(range);
        for (int key = first; key < range.end; key = range.after(range.after(key)), phase ^= 1) {
            if (key > first) await_sums(key);
            __syncwarp();
            typename Weights::Tile s;
            multiply(s);
            if (key > range.begin) {
                barrier_wait(Shape::compared(shared, stage ^ 1), stage ? phase : phase ^ 1);
                weights.read_maxima(Shape::note(shared, Shape::max_first + (stage ^ 1)));
            }
            float rescale[2];
            weights.find_maxima(s, key, range.all, rescale);
            weights.write_maxima(Shape::note(shared, Shape::max_first + stage));
            barrier_arrive(Shape::compared(shared, stage));
            weights.weigh(s);
            named_barrier_sync(1 + stage, 128);  // nobody reads the last panel any more
            weights.store(s, Shape::weights(shared, stage));
            weights.write(rescale, Shape::note(shared, Shape::rescale_first + stage));
            barrier_arrive(Shape::weighed(shared, stage));
        }
    }

    __device__ __forceinline__ void finish() {
        const std::uint32_t of_maxima = Shape::note(shared, Shape::second_max);
        const std::uint32_t of_sums = Shape::note(shared, Shape::second_sum);
        if (stage == 1) {
            weights.write_sums(of_maxima, of_sums);
            barrier_arrive(Shape::second_ended(shared));
            return;
        }
        barrier_wait(Shape::second_ended(shared), 0);
        weights.add_sums(of_maxima, of_sums);
        float normalize[2];
        weights.finish(normalize);
        weights.write(normalize, Shape::note(shared, Shape::normalize));
        barrier_arrive(Shape::ended(shared));
    }

   private:
    static __device__ __forceinline__ bool loads() { return threadIdx.x % 128 < 32; }
    __device__ __forceinline__ int first_of(const LatentRange<Row>& range) const {
        return stage ? range.after(range.begin) : range.begin;
    }

    // Of the tile before in this stage; then the last panel of the tile that begins at `key` is loaded.
    __device__ __forceinline__ void await_sums(int key) const {
        typename Tiles::Part part;
        if (loads()) part = tiles.find(key);
        barrier_wait(Shape::summed(shared, stage), phase ^ 1);
        if (!loads()) return;
        fence_proxy_async();  // the weights that lie there were written by threads
        tiles.load(part, stage, Shape::last_panel);
    }

    __device__ __forceinline__ void multiply(typename Weights::Tile& s) const {
        // Found anew for each tile, since there are no registers to keep what describes 36 pairs of operands.
        const std::uint32_t base = __shfl_sync(all_lanes, shared, 0);
        const std::uint64_t q = describe_panel<Major::k>(base);
        const std::uint64_t k = describe_panel<Major::k>(Shape::panel(base, stage, 0));
        forget(s);
        wgmma_fence();
        bool is_there = false;  // the next panel
#pragma unroll
        for (int i = 0; i < Shape::panels; ++i) {
            if (!is_there) barrier_wait(Shape::full(shared, stage, Shape::panel_in_turn(i)), phase);
            if (i + 1 < Shape::panels)
                is_there = barrier_test(Shape::full(shared, stage, Shape::panel_in_turn(i + 1)), phase);
            Weights::template multiply<1>(s, q, k, Shape::panel_in_turn(i));
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin(s);
    }

    const Tiles& tiles;
    Weights& weights;
    const std::uint32_t shared;
    const int stage;
    std::uint32_t phase = 0;
};

// A warpgroup that sums up, each warp of which loads one of the panels that it reads.
template <class Row, bool partial>
__device__ __forceinline__ void sum_up_tiles(const LatentTiles<Row, partial>& tiles, LatentSums<Row, partial>& sums,
                                             const LatentRange<Row>& range, std::uint32_t shared, int group) {
    using Shape = LatentTmaShape<Row>;
    const int first_panel = group * Shape::panels_of_group, of_group = static_cast<int>(threadIdx.x) / 32 % 4;
    const int panel = first_panel + of_group;
    const bool in_first_half = of_group < Shape::panels_of_half;
    for (int stage = 0, key = range.begin; stage < 2; ++stage, key = range.after(key))
        if (key < range.end) tiles.load(tiles.find(key), stage, panel);
    Ring<2> ring;
    for (int key = range.begin; key < range.end; key = range.after(key), ring.next()) {
        const int loaded = range.after(range.after(key));
        const auto next = tiles.find(loaded);
#pragma unroll
        for (int i = 0; i < Shape::panels_of_group; ++i)
            barrier_wait(Shape::full(shared, ring.stage, first_panel + i), ring.phase);
        barrier_wait(Shape::weighed(shared, ring.stage), ring.phase);
        sums.rescale(Shape::note(shared, Shape::rescale_first + ring.stage));
        sums.start_adding(Shape::weights(shared, ring.stage), Shape::panel(shared, ring.stage, 0));
        const bool more = loaded < range.end;
        sums.finish_half();
        if (more && in_first_half) tiles.load(next, ring.stage, panel);
        sums.finish_adding();
        barrier_arrive(Shape::summed(shared, ring.stage));
        if (more && !in_first_half) tiles.load(next, ring.stage, panel);
    }
    barrier_wait(Shape::ended(shared), 0);
    sums.rescale(Shape::note(shared, Shape::normalize));
}

template <class Row, bool partial>
__global__ void __launch_bounds__(LatentTmaShape<Row>::threads, 1)
    attend_latent_tma(const __grid_constant__ catalog_args args, const __grid_constant__ MmaGrid<Row> grid,
                      const __grid_constant__ LatentKeys keys) {
    using Shape = LatentTmaShape<Row>;
    extern __shared__ __align__(1024) unsigned char memory[];
    const std::uint32_t shared = shared_address(memory);
    const MmaWork<Row, partial> work(args, grid, 0);
    if constexpr (partial) let_next_kernel_start();
    if (work.rows == 0) return;
    if (threadIdx.x == 0) Shape::init(shared);
    __syncthreads();

    const Window<Row::mask> window = window_of<Row::mask>(args, work.seq.seqlen_q, work.seq.seqlen_k, work.keys(args));
    const LatentRange<Row> range(args, work, window);
    const LatentTiles<Row, partial> tiles(args, work, keys, shared, range.end);
    // The same for all lanes, and known to be.
    const int warpgroup = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x) / 128, 0);
    if (warpgroup >= Shape::weighing) {
        claim_registers<168>();
        const int group = warpgroup - Shape::weighing;
        LatentSums<Row, partial> sums(group);
        sum_up_tiles(tiles, sums, range, shared, group);
        sums.store(args, work);
    } else {
        release_registers<88>();
        LatentWeights<Row, partial> weights(args, work, window);
        LatentTmaWeights<Row, partial> weighing(tiles, weights, shared, warpgroup);
        weighing.load_first(range);
        if (warpgroup == 0) load_latent_queries(args, work, shared);
        named_barrier_sync(5, 128 * Shape::weighing);
        weighing.weigh(range);
        weighing.finish();
    }
}

}  // namespace catalog::cuda
