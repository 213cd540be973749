// Convolution for Hopper as an implicit product whose images are read once, specialised for one row of the catalog: pipeline
// sm90_halo. What the filter meets must be neighbours: strides are 1, but those of the gradient of the input.
//
// A block has one warp that loads through TMA, and two warpgroups that compute, tiles of both or of each. For each 64
// channels the former loads a patch of the images with its halo, and the filter element by element; the latter multiply
// all of these with the same patch. Where images have few channels, that is what the time depends on: sm90_wgmma gathers
// them anew for each element.
//
// A translation unit defines a struct Row whose constexpr members are the row's traits, as in conv_wgmma.hpp, and exports
// it; wave_n is 1. It also has
//
//     static constexpr int num_wave_groups = 2;  // that compute a tile each, of wave_m warps
#pragma once

#include <type_traits>

#include "conv_result.hpp"
#include "halo_shape.hpp"

namespace catalog::cuda {

// A patch by its first position, and columns of C.
template <int axes>
struct HaloTile {
    int at[axes], image, column;

    __device__ __forceinline__ HaloTile(const HaloCall<axes>& call, int index, int tile_n) {
        const int place = call.tiles_n.quotient(index);
        column = (index - place * static_cast<int>(call.tiles_n.divisor)) * tile_n;
        image = place;
#pragma unroll
        for (int i = 0; i < axes; ++i) {
            const int next = call.across[i].quotient(image);
            at[i] = (image - next * static_cast<int>(call.across[i].divisor)) * call.patch[i];
            image = next;
        }
    }
};

template <int axes>
__device__ __forceinline__ void load_patch(std::uint32_t target, const CUtensorMap* map, std::uint32_t barrier, int channel,
                                           const int (&at)[axes], int image) {
    if constexpr (axes == 1)
        tma_load(target, map, barrier, channel, at[0], image);
    else if constexpr (axes == 2)
        tma_load(target, map, barrier, channel, at[0], at[1], image);
    else
        tma_load(target, map, barrier, channel, at[0], at[1], at[2], image);
}

template <int axes>
__device__ __forceinline__ void store_patch(const CUtensorMap* map, std::uint32_t source, int column, const int (&at)[axes],
                                            int image) {
    if constexpr (axes == 1)
        tma_store(map, source, column, at[0], image);
    else if constexpr (axes == 2)
        tma_store(map, source, column, at[0], at[1], image);
    else
        tma_store(map, source, column, at[0], at[1], at[2], image);
}

// Loads patches and filters. One thread.
template <class Row>
class HaloProducer {
    using Shape = HaloShape<Row>;
    static constexpr int axes = Row::ndim;
    using Call = HaloCall<axes>;

   public:
    __device__ __forceinline__ HaloProducer(const Call& call, std::uint32_t shared) : call(call), shared(shared) {}

    static __device__ __forceinline__ void prefetch(const Call& call) {
        tma_prefetch_map(&call.phases[0].images);
        tma_prefetch_map(&call.weight);
        if (call.plain) tma_prefetch_map(&call.out);
    }

    __device__ __forceinline__ void run() {
        using Whole = std::integral_constant<int, Shape::along ? Shape::columns : block_channels>;
        if (!Shape::along || call.filter_columns == Whole::value)  // known, so that a step has fewer instructions
            run(Whole{});
        else
            run(call.filter_columns);
    }

   private:
    // With that many columns in a load of the filter.
    template <class Columns>
    __device__ __forceinline__ void run(Columns columns) {
        const ConvPhase<axes>& phase = call.phases[0];
        int team = 0;
        for (int index = static_cast<int>(blockIdx.x); index < call.tiles; index += static_cast<int>(gridDim.x)) {
            const HaloTile<axes> tile(call, index, Row::tile_n);
            const int left = min(Row::tile_n, call.columns - tile.column);
            const int loads = Row::tile_n <= columns ? 1 : (left + columns - 1) / columns;
            const bool loads_filter = !Shape::keeps_filter || index == static_cast<int>(blockIdx.x);
            ConvPiece<axes, false> piece(call, phase, 0);
            for (int block = 0; block < call.blocks; ++block) {
                const int halves = block * call.planes * call.in_plane >= phase.whole_steps;
                for (int plane = 0; plane < call.planes; ++plane) {
                    load_patch_of(tile, team, plane, block * block_channels, halves);
                    if (loads_filter)
                        for (int tap = 0; tap < call.in_plane; ++tap, piece.next(call, phase))
                            load_filter(tile, piece, loads, columns, halves);
                }
            }
            if constexpr (Shape::teams > 1) {
                team ^= 1;
                const auto others = patches;
                patches = of_other_team, of_other_team = others;
            }
        }
    }

    __device__ __forceinline__ void load_patch_of(const HaloTile<axes>& tile, int team, int plane, int channel,
                                                  int halves) {
        const ConvPhase<axes>& phase = call.phases[0];
        const std::uint32_t full = Shape::full_patch(shared, team, patches.stage);
        claim(full, patches.phase, call.box_rows * panel_row_bytes >> halves);
        int at[axes];
#pragma unroll
        for (int i = 0; i < axes; ++i) at[i] = phase.lower[i] + tile.at[i] + (i == 2 ? plane * phase.apart[i] : 0);
        load_patch<axes>(Shape::patch(shared, team, patches.stage), halves ? &phase.half_images : &phase.images, full,
                         channel, at, tile.image);
        patches.next();
    }

    template <class Columns>
    __device__ __forceinline__ void load_filter(const HaloTile<axes>& tile, const ConvPiece<axes, false>& piece, int loads,
                                                Columns columns, int halves) {
        const std::uint32_t full = Shape::full_filter(shared, filters.stage);
        claim(full, filters.phase, loads * columns * panel_row_bytes >> halves);
        const std::uint32_t target = shared + Shape::filters_at + filters.stage * Shape::filter_bytes;
        const CUtensorMap* const map = halves ? &call.half_weight : &call.weight;
        const int channel = piece.block * block_channels, element = piece.element(call, call.phases[0]);
        for (int load = 0; load < loads; ++load) {
            const int first = load * columns, column = tile.column + first;
            if constexpr (Shape::along)  // panels of half rows, or with half of the rows
                tma_load(target + (first * panel_row_bytes >> halves), map, full, channel, element, column, 0);
            else
                tma_load(target + load * Shape::filter_panel, map, full, column, element, channel, 0);
        }
        filters.next();
    }

    // A stage by its barrier, to be written with that number of bytes, once it is free.
    static __device__ __forceinline__ void claim(std::uint32_t full, std::uint32_t phase, int bytes) {
        barrier_wait(Shape::empty(full), phase ^ 1);
        barrier_arrive_expect(full, bytes);
    }

    const Call& call;
    const std::uint32_t shared;
    Ring<Shape::patches> patches, of_other_team;  // each team has one
    Ring<Shape::filters> filters;
};

// The sums of a tile, of one warpgroup.
template <class Row>
class HaloProduct {
    using Shape = HaloShape<Row>;
    using T = typename Row::dtype;
    static constexpr int axes = Row::ndim;
    using Call = HaloCall<axes>;

   public:
    using Sums = typename Shape::Sums;

    __device__ __forceinline__ HaloProduct(const Call& call, std::uint32_t shared, int team, int group)
        : call(call), shared(shared), team(team), group(group), lane(static_cast<int>(threadIdx.x) % 32) {}

    __device__ __forceinline__ void multiply(Sums& sums) {
        const int blocks = call.blocks * call.planes;
        const int whole = call.phases[0].whole_steps / call.in_plane;
        accumulates = false;
        if constexpr (Shape::keeps_filter) filters = {};
        for (int block = 0; block < whole; ++block) multiply_patch<panel_row_bytes>(sums);
        for (int block = whole; block < blocks; ++block) multiply_patch<panel_row_bytes / 2>(sums);
        wgmma_wait<0>();
#pragma unroll
        for (auto& block : sums) pin(block);
        release_filter();
        release(last_patch);
    }

   private:
    // All elements of the filter that meet one patch. Where the filter stays, nothing has to wait for their products.
    template <int row_bytes>
    __device__ __forceinline__ void multiply_patch(Sums& sums) {
        const ConvPhase<axes>& phase = call.phases[0];
        const std::uint32_t full = Shape::full_patch(shared, team, patches.stage);
        const std::uint32_t rows = Shape::patch(shared, team, patches.stage) + group * Shape::blocks_p * 64 * row_bytes;
        barrier_wait(full, patches.phase);
        const int lines = axes > 1 ? phase.taps[axes > 1] : 1, apart = axes > 1 ? phase.apart[axes > 1] * call.pitch : 0;
        bool first = accumulates;  // the step before was the last one of another patch
        for (int line = 0; line < lines; ++line)
            for (int tap = 0; tap < phase.taps[0]; ++tap) {
                const std::uint32_t filter = Shape::full_filter(shared, filters.stage);
                barrier_wait(filter, filters.phase);
                multiply_slices<row_bytes>(rows + (line * apart + tap * phase.apart[0]) * row_bytes,
                                           shared + Shape::filters_at + filters.stage * Shape::filter_bytes, sums);
                if (accumulates && (first || !Shape::keeps_filter)) {
                    wgmma_wait<1>();
                    release_filter();
                    if (first) release(last_patch);
                }
                accumulates = true, first = false;
                last_filter = filter;
                filters.next();
            }
        last_patch = full;
        patches.next();
    }

    template <int row_bytes>
    __device__ __forceinline__ void multiply_slices(std::uint32_t rows, std::uint32_t filter, Sums& sums) {
        constexpr int row_bytes_q = Shape::along ? row_bytes : panel_row_bytes;
        const std::uint64_t p = describe_panel<Major::k, row_bytes>(rows);
        const std::uint64_t q = describe_panel<Shape::major_q, row_bytes_q>(filter, Shape::filter_panel);
        wgmma_fence();
#pragma unroll
        for (int slice = 0; slice < row_bytes / 32; ++slice)
#pragma unroll
            for (int block = 0; block < Shape::blocks_p; ++block)
                wgmma<T, Shape::major_q, Major::k>(sums[block], advance(p, block * 64 * row_bytes + slice * 32),
                                                   advance(q, Shape::along ? slice * 32 : slice * 2048),
                                                   accumulates || slice > 0);
        wgmma_commit();
    }

    __device__ __forceinline__ void release_filter() const {
        if constexpr (!Shape::keeps_filter) release(last_filter);
    }

    // A stage by its barrier.
    __device__ __forceinline__ void release(std::uint32_t full) const {
        if (lane == 0) barrier_arrive(Shape::empty(full));
    }

    const Call& call;
    const std::uint32_t shared;
    const int team, group, lane;
    Ring<Shape::patches> patches;
    Ring<Shape::filters> filters;
    bool accumulates = false;
    std::uint32_t last_filter = 0, last_patch = 0;  // what wgmma may still read
};

// Writes a tile: by TMA, up to 64 columns of the whole patch at a time, or element by element. All warpgroups of a team.
template <class Row>
class HaloEpilogue {
    using Shape = HaloShape<Row>;
    using T = typename Row::dtype;
    static constexpr int axes = Row::ndim;
    using Call = HaloCall<axes>;
    using Sums = typename Shape::Sums;

   public:
    __device__ __forceinline__ HaloEpilogue(const Call& call, std::uint32_t shared, int team, int group)
        : call(call), out(shared + Shape::out + team * Shape::out_bytes), barrier(1 + team), group(group),
          thread(static_cast<int>(threadIdx.x) % 128) {
        const int warp = thread / 32, in_matrix = thread % 8, below = thread / 8 % 2;
#pragma unroll
        for (int block = 0; block < Shape::blocks_p; ++block)
            rows[block] = packed((group * Shape::blocks_p + block) * 64 + 16 * warp + 8 * below + in_matrix);
    }

    __device__ __forceinline__ void store(int index, const Sums& sums) const {
        if (call.plain)
            store_plain(index, sums);
        else
            store_elements(HaloTile<axes>(call, index, Row::tile_n), sums);
    }

   private:
    // A row of the product as a position of the patch.
    struct Place {
        int line, at;

        __device__ __forceinline__ Place(const Call& call, int row) : line(row / call.pitch), at(row - line * call.pitch) {}
    };

    __device__ __forceinline__ int lines() const { return axes > 1 ? call.patch[axes > 1] : 1; }

    // Where a row lies in the patch as TMA stores it, without what was computed in vain: that lies behind.
    __device__ __forceinline__ int packed(int row) const {
        const Place place(call, row);
        const int width = call.patch[0], before = min(place.line, lines()) * width;
        const bool in_line = place.line < lines();
        if (in_line && place.at < width) return before + place.at;
        return lines() * width + row - before - (in_line ? width : 0);
    }

    __device__ __forceinline__ void store_plain(int index, const Sums& sums) const {
        const bool leads = group == 0 && thread == 0;
        const int right = thread / 16 % 2;
#pragma unroll
        for (int piece = 0; piece < Row::tile_n / Shape::columns; ++piece) {
            if (leads) bulk_wait_read<0>();
            named_barrier_sync(barrier, Shape::team);
#pragma unroll
            for (int block = 0; block < Shape::blocks_p; ++block)
#pragma unroll
                for (int j = 0; j < Shape::columns / 16; ++j) {
                    const float* const x = &sums[block][32 * piece + 8 * j];
                    store_matrices(out + swizzled<Shape::out_row>(rows[block], 32 * j + 16 * right), pack<T>(x[0], x[1]),
                                   pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7]));
                }
            fence_proxy_async();
            named_barrier_sync(barrier, Shape::team);
            if (leads) {
                const HaloTile<axes> tile(call, index, Row::tile_n);
                const int column = tile.column + Shape::columns * piece;
                if (column < call.columns) store_patch<axes>(&call.out, out, column, tile.at, tile.image);
                bulk_commit();
            }
        }
    }

    // Where a row of the result begins, NULL if it is no position of the result.
    __device__ __forceinline__ T* row_of(const HaloTile<axes>& tile, int row) const {
        const Place place(call, row);
        if (place.at >= call.patch[0] || place.line >= lines()) return nullptr;
        const ConvPhase<axes>& phase = call.phases[0];
        std::int64_t index = 0;
        bool exists = true;
#pragma unroll
        for (int i = axes - 1; i >= 0; --i) {
            const int at = tile.at[i] + (i == 0 ? place.at : i == 1 ? place.line : 0);
            exists = exists && at < static_cast<int>(phase.count[i].divisor);
            index = index * call.extents[i] + phase.origin[i] + phase.spread[i] * at;
        }
        return exists ? static_cast<T*>(call.result) + tile.image * call.stride_result + index * call.columns : nullptr;
    }

    __device__ __forceinline__ void store_elements(const HaloTile<axes>& tile, const Sums& sums) const {
        const int lane = thread % 32;
#pragma unroll
        for (int block = 0; block < Shape::blocks_p; ++block)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                T* const to = row_of(tile, (group * Shape::blocks_p + block) * 64 + thread / 32 * 16 + 8 * half + lane / 4);
#pragma unroll
                for (int j = 0; j < Row::tile_n / 8; ++j) {
                    const int column = tile.column + 8 * j + lane % 4 * 2;
                    const float* const x = &sums[block][4 * j + 2 * half];
                    if (to && column < call.columns) to[column] = T(x[0]);
                    if (to && column + 1 < call.columns) to[column + 1] = T(x[1]);
                }
            }
    }

    const Call& call;
    const std::uint32_t out;
    const int barrier, group, thread;
    int rows[Shape::blocks_p];  // of store_matrices()
};

template <class Row>
__global__ __launch_bounds__(HaloShape<Row>::threads, 1) void conv_halo(const __grid_constant__ HaloCall<Row::ndim> call) {
    using Shape = HaloShape<Row>;
    constexpr RegisterBudget budget = register_budget(Shape::computing / 128, 1, 56);
    extern __shared__ char memory[];
    const std::uint32_t shared = (shared_address(memory) + Shape::alignment - 1) & ~(Shape::alignment - 1u);
    const int warp = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x) / 32, 0), warpgroup = warp / 4;
    if (warp == 1) {
        if (threadIdx.x == 32) Shape::init(shared);
        __syncwarp();
        Shape::announce_init();
    }
    let_next_kernel_start();
    if (warpgroup > 0) {
        claim_registers<budget.consumer>();
        wait_for_last_kernel();
        Shape::await_init();
        typename Shape::Sums sums;
        const int team = (warpgroup - 1) / Shape::groups, group = (warpgroup - 1) % Shape::groups;
        HaloProduct<Row> product(call, shared, team, group);
        const HaloEpilogue<Row> epilogue(call, shared, team, group);
        const int blocks = static_cast<int>(gridDim.x), first = static_cast<int>(blockIdx.x) + team * blocks;
        for (int index = first; index < call.tiles; index += Shape::teams * blocks) {
            product.multiply(sums);
            epilogue.store(index, sums);
        }
        if (threadIdx.x % 128 == 0) bulk_wait_read<0>();
    } else {
        release_registers<budget.producer>();
        if (warp > 0) return;
        if (threadIdx.x == 0) HaloProducer<Row>::prefetch(call);
        wait_for_last_kernel();
        Shape::await_init_to_load();
        if (threadIdx.x == 0) HaloProducer<Row>(call, shared).run();
    }
}

}  // namespace catalog::cuda
