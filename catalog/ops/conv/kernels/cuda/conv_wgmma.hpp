// Convolution for Hopper as an implicit matrix product, specialised for one row of the catalog: pipeline sm90_wgmma.
//
// A block has one warp that loads through TMA, and warpgroups that compute, each of 64 or 128 rows of a tile. Blocks
// work on tile after tile, so that the loads of the next tile hide behind the products and the stores of this one. What
// the filter meets is gathered by TMA's im2col mode, an element of the filter and 64 channels in each step; of the last
// channels, 32 where that is enough.
//
// A translation unit defines a struct Row whose constexpr members are the row's traits, and exports it:
//
//     struct Row {
//         using dtype = catalog::cuda::bf16;
//         static constexpr auto direction = catalog::conv::Direction::forward;
//         static constexpr int ndim = 2;
//         static constexpr int tile_m = 128, tile_n = 256;  // of C
//         static constexpr int wave_m = 8, wave_n = 1;      // warps that compute; wave_n > 1: C's transpose
//     };
#pragma once

#include <type_traits>

#include "conv_result.hpp"
#include "cuda/gemm_product.hpp"

namespace catalog::cuda {

// Loads the stages of A and B. One thread.
template <class Row>
class ConvProducer {
    using Shape = ConvShape<Row>;
    static constexpr int axes = Row::ndim;
    using Call = ConvCall<axes>;
    using Piece = ConvPiece<axes, Row::direction == Direction::bwd_weight>;
    static constexpr int panel_bytes = 64 * panel_row_bytes;

   public:
    // The first part is found at once: the compiler would do it where it is needed.
    __device__ __forceinline__ ConvProducer(const Call& call, std::uint32_t shared)
        : call(call), shared(shared), items(call), tile(items.tile()) {
        asm volatile("" ::"r"(tile.row), "r"(tile.column), "r"(tile.first_step), "r"(tile.end_step));
    }

    static __device__ __forceinline__ void prefetch(const Call& call) {
        tma_prefetch_map(&call.phases[0].images);
        if constexpr (Row::direction == Direction::bwd_weight)
            tma_prefetch_map(&call.gradient);
        else
            tma_prefetch_map(&call.weight);
        if (call.plain) tma_prefetch_map(&call.out);
    }

    __device__ __forceinline__ void run() {
        while (items.exist()) {
            if constexpr (Row::direction == Direction::bwd_weight)
                load_gradients(tile);
            else
                load_images(tile);
            items.next();
            tile = items.tile();
        }
    }

   private:
    // The stage to be written, once it is free, with that number of bytes.
    __device__ __forceinline__ std::uint32_t claim(int bytes) {
        barrier_wait(Shape::empty(shared, ring.stage), ring.phase ^ 1);
        full = Shape::full(shared, ring.stage);
        barrier_arrive_expect(full, bytes);
        const std::uint32_t target = shared + ring.stage * Shape::stage_bytes;
        ring.next();
        return target;
    }

    // Of `most` rows or columns, the loads of `each` that exist. The others are left out: TMA fills rows outside of a
    // tensor slowly, and what is in their place only reaches elements that are not stored.
    static __device__ __forceinline__ int loads_of(int extent, int first, int most, int each = 64) {
        return min(most / each, (extent - first + each - 1) / each);
    }

    // The coordinates of a position in the images.
    static __device__ __forceinline__ void place(const ConvPhase<axes>& phase, const ConvPosition<axes>& position,
                                                 int (&at)[axes]) {
#pragma unroll
        for (int i = 0; i < axes; ++i) at[i] = phase.lower[i] + phase.step[i] * position.at[i];
    }

    static __device__ __forceinline__ void offsets(const ConvPhase<axes>& phase, const Piece& piece,
                                                   int (&offset)[axes]) {
#pragma unroll
        for (int i = 0; i < axes; ++i) offset[i] = phase.apart[i] * piece.tap[i];
    }

    // Forward and backward data: a piece of the filter in each step.
    __device__ __forceinline__ void load_images(const ConvTile& tile) {
        if (tile.first_step == tile.end_step) return;
        using Whole = std::integral_constant<int, block_channels>;  // known, so that a step has fewer instructions
        if (Row::direction == Direction::bwd_data || call.filter_columns == block_channels)
            load_images(tile, Whole{});
        else
            load_images(tile, call.filter_columns);
    }

    template <class Columns>
    __device__ __forceinline__ void load_images(const ConvTile& tile, Columns columns) {
        const ConvPhase<axes>& phase = call.phases[tile.phase];
        const ConvPosition<axes> position(phase, tile.row);
        int at[axes], offset[axes];
        place(phase, position, at);
        Piece piece(call, phase, tile.first_step);
        const int loads = loads_of(call.columns, tile.column, Row::tile_n, columns);
        constexpr std::uint32_t images = Shape::swapped ? Shape::p_bytes : 0, weights = Shape::p_bytes - images;
        for (int step = tile.first_step; step < tile.end_step; ++step, piece.next(call, phase)) {
            const int halves = step >= tile.end_whole;
            const std::uint32_t target = claim((Row::tile_m + loads * columns) * panel_row_bytes >> halves);
            const int channel = piece.block * block_channels, element = piece.element(call, phase);
            const CUtensorMap* const filter = halves ? &call.half_weight : &call.weight;
            offsets(phase, piece, offset);
            tma_load_im2col(target + images, halves ? &phase.half_images : &phase.images, full,
                            tile.group * call.channels + channel, at, position.image, offset);
            for (int load = 0; load < loads; ++load) {
                const int first = load * columns, column = tile.column + first;
                if constexpr (Row::direction == Direction::forward)  // panels of half rows, or with half of the rows
                    tma_load(target + weights + (first * panel_row_bytes >> halves), filter, full, channel, element, column,
                             tile.group);
                else
                    tma_load(target + weights + load * panel_bytes, filter, full, column, element, channel, tile.group);
            }
        }
    }

    // Backward weight: 64 positions of the output in each step.
    __device__ __forceinline__ void load_gradients(const ConvTile& tile) {
        const ConvPhase<axes>& phase = call.phases[tile.phase];
        constexpr int most = Shape::tile_q / 64;
        int channel[most], offset[most][axes], pieces = call.blocks;
#pragma unroll
        for (int i = 0; i < axes; ++i) pieces *= phase.taps[i];
        const int panels_p = loads_of(call.rows, tile.row, Shape::tile_p);
        const int panels_q = loads_of(pieces * 64, tile.column, Shape::tile_q);
        Piece piece(call, phase, tile.column / block_channels);
#pragma unroll
        for (int panel = 0; panel < most; ++panel) {
            channel[panel] = tile.group * call.channels + piece.block * block_channels;
            offsets(phase, piece, offset[panel]);
            piece.next(call, phase);
        }
        for (int step = tile.first_step; step < tile.end_step; ++step) {
            const ConvPosition<axes> position(phase, step * Shape::tile_k);
            int at[axes];
            place(phase, position, at);
            const std::uint32_t target = claim((panels_p + panels_q) * panel_bytes);
            constexpr int none[axes]{};
#pragma unroll
            for (int panel = 0; panel < Shape::tile_p / 64; ++panel)
                if (panel < panels_p)
                    tma_load_im2col(target + panel * panel_bytes, &call.gradient, full,
                                    tile.group * call.gradient_channels + tile.row + 64 * panel, position.at,
                                    position.image, none);
#pragma unroll
            for (int panel = 0; panel < most; ++panel)
                if (panel < panels_q)
                    tma_load_im2col(target + Shape::p_bytes + panel * panel_bytes, &phase.images, full, channel[panel],
                                    at, position.image, offset[panel]);
        }
    }

    const Call& call;
    const std::uint32_t shared;
    ConvItems<Row> items;
    ConvTile tile;
    std::uint32_t full = 0;
    Ring<Shape::stages> ring;
};

template <class Row>
__global__ __launch_bounds__(ConvShape<Row>::threads, 1) void conv_wgmma(
    const __grid_constant__ ConvCall<Row::ndim> call) {
    using Shape = ConvShape<Row>;
    constexpr RegisterBudget budget = register_budget(Shape::groups, 1, 56);
    extern __shared__ char memory[];
    const std::uint32_t shared = (shared_address(memory) + Shape::alignment - 1) & ~(Shape::alignment - 1u);
    // Code that a block has not run yet comes from memory, as its parameters do. So each warp goes to its own code before
    // it waits for the barriers, and the warp that loads leaves them to another.
    const int warp = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x) / 32, 0), warpgroup = warp / 4;
    if (warp == 1) {
        if (threadIdx.x == 32) Shape::init(shared);
        __syncwarp();
        Shape::announce_init();
    }
    let_next_kernel_start();
    if (warpgroup > 0) {
        if constexpr (budget.consumer > 0) claim_registers<budget.consumer>();
        wait_for_last_kernel();
        Shape::await_init();
        const int group = warpgroup - 1;
        float sums[Shape::blocks_p][Shape::tile_q / 2];
        GemmProduct<ConvTraits<Row>> product(shared, group);
        ConvEpilogue<Row> epilogue(call, shared, group);
        for (ConvItems<Row> items(call); items.exist(); items.next()) {
            const ConvTile tile = items.tile();
            if constexpr (Row::direction == Direction::bwd_weight)
                product.multiply(tile.end_step - tile.first_step, sums);
            else
                product.multiply(tile.end_whole - tile.first_step, tile.end_step - tile.end_whole, sums);
            epilogue.store(tile, items.index, sums);
        }
        if (threadIdx.x % 128 == 0) bulk_wait_read<0>();
        if (call.in_cluster) cluster_pass();  // others may still use this block's shared memory
    } else {
        if constexpr (budget.producer > 0) release_registers<budget.producer>();
        if (warp > 0) return;
        if (threadIdx.x == 0) ConvProducer<Row>::prefetch(call);
        ConvProducer<Row> producer(call, shared);
        wait_for_last_kernel();
        Shape::await_init_to_load();
        if (threadIdx.x == 0) producer.run();
    }
}

template <class Row>
inline constexpr Block block_of{ConvShape<Row>::threads, ConvShape<Row>::bytes + ConvShape<Row>::alignment};

}  // namespace catalog::cuda
