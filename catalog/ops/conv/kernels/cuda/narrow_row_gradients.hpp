// Backward weight of usual filters and groups of at most 8 channels, row after row of the images.
//
// Sums stay in registers, and so do rows of the gradient until all rows of images that they meet were read.
#pragma once

#include "cuda/cluster.hpp"
#include "narrow_gradients.hpp"
#include "narrow_rows.hpp"

namespace catalog::cuda {

#ifndef NARROW_CLUSTER
#define NARROW_CLUSTER 4
#endif
inline constexpr int narrow_cluster = NARROW_CLUSTER;  // blocks that add their sums

// Loads rows of the block's patches. By one thread.
template <class Shape>
class NarrowRowsOfPatches {
    static constexpr int of_slot = NarrowRows<Shape>::of_slot;

   public:
    __device__ __forceinline__ NarrowRowsOfPatches(const NarrowCall& call, const NarrowRing<Shape>& ring, int part,
                                                   int channel)
        : call(call), ring(ring), channel(channel), index(part), strip(call, part) {}

    __device__ __forceinline__ bool more() const {
        return index < call.images_count * call.patches_down * call.patches_across;
    }

    __device__ __forceinline__ void load(std::uint32_t slot) {
        ring.template load<true>(call, strip, slot, first, channel);
        first += of_slot;
        if (first < strip.met) return;
        first = 0;
        index += call.parts * narrow_cluster;
        strip = NarrowStrip<Shape>(call, index);
    }

   private:
    const NarrowCall& call;
    const NarrowRing<Shape>& ring;
    const int channel;
    int index, first = 0;
    NarrowStrip<Shape> strip;
};

// Where matrix instructions' operands are in a row of a slot.
template <class Shape, int runs>
class NarrowRowPlaces {
   public:
    __device__ __forceinline__ NarrowRowPlaces(int warp, int lane) : gradient(narrow_place(lane, warp)) {
        // Of two elements, matrices 0 and 2 are of the first.
        const int position = lane % 8 + 8 * (lane / 16);
#pragma unroll
        for (int j = 0; j < Shape::pairs; ++j)
            images[j] = narrow_place(position * Shape::step + lane / 8 % 2 + 2 * j, warp);
        if constexpr (Shape::steps > Shape::pairs)
            images[Shape::pairs] = narrow_place(lane % 16 * Shape::step + Shape::across - 1, warp);
    }

    // Of a row of images, what two elements of the filter meet.
    __device__ __forceinline__ void read_images(std::uint32_t (&a)[runs][4], std::uint32_t row, int step) const {
#pragma unroll
        for (int run = 0; run < runs; ++run) {
            const std::uint32_t from = row + run * narrow_run * Shape::step * 128 + images[step];
            if (step < Shape::pairs) {
                load_matrices_transposed(from, a[run]);
            } else {
                std::uint32_t r[2];
                load_matrices_transposed(from, r);
                a[run][0] = r[0], a[run][1] = 0, a[run][2] = r[1], a[run][3] = 0;
            }
        }
    }

    __device__ __forceinline__ void read_gradient(std::uint32_t (&b)[runs][2], std::uint32_t row) const {
        if constexpr (runs == 2) {
            std::uint32_t r[4];
            load_matrices_transposed(row + gradient, r);
            b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
        } else {
            load_matrices_transposed(row + gradient, b[0]);
        }
    }

   private:
    std::uint32_t images[Shape::steps], gradient;
};

// Makes what lies behind the `exist` positions of a row zero, also in the gradient: memory there has any contents.
template <int runs>
class NarrowRunsOfPositions {
   public:
    __device__ __forceinline__ NarrowRunsOfPositions(int exist, int lane)
        : first(exist, lane), last(exist - (runs - 1) * narrow_run, lane) {}

    __device__ __forceinline__ void keep(std::uint32_t (&a)[runs][4]) const {
#pragma unroll
        for (int run = 0; run < runs; ++run) of(run).keep(a[run]);
    }

    __device__ __forceinline__ void keep(std::uint32_t (&b)[runs][2]) const {
#pragma unroll
        for (int run = 0; run < runs; ++run) b[run][0] &= of(run).low, b[run][1] &= of(run).high;
    }

   private:
    __device__ __forceinline__ const NarrowPositions& of(int run) const { return run == 0 ? first : last; }

    static_assert(runs <= 2);
    const NarrowPositions first, last;
};

#ifndef NARROW_GRADIENT_BLOCKS
#define NARROW_GRADIENT_BLOCKS 2
#endif
// Blocks of a processor: a thread keeps four sums of each two elements.
template <class Shape>
inline constexpr int narrow_row_gradients_blocks = Shape::down * Shape::steps <= 6 ? NARROW_GRADIENT_BLOCKS : 1;

// Grid: 64 channels, parts of the patches.
template <class Row, class Shape, int runs>
__global__ __launch_bounds__(narrow_rows_threads, narrow_row_gradients_blocks<Shape>) void narrow_row_gradients(
    const __grid_constant__ NarrowCall call) {
    using T = typename Row::dtype;
    using Rows = NarrowRows<Shape>;
    let_next_kernel_start();
    extern __shared__ __align__(1024) char memory[];
    __shared__ std::uint64_t barriers[2 * narrow_slots];
    const int parts = call.parts * narrow_cluster, block = call.by_parts.quotient(static_cast<int>(blockIdx.x));
    const int part = static_cast<int>(blockIdx.x) - block * parts;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const NarrowRing<Shape> ring(memory, barriers);
    if (warp == narrow_rows_warps) {
        NarrowRowsOfPatches<Shape> patches(call, ring, part, block * narrow_channels);
        if (lane == 0) {
            tma_prefetch_map(&call.images_map);
            tma_prefetch_map(&call.gradient_map);
            ring.init(call);
        }
        __syncwarp();
        named_barrier_arrive(1, narrow_rows_threads);
#pragma unroll 1
        for (int i = 0; lane == 0 && i < call.stages && patches.more(); ++i) patches.load(i);
#pragma unroll 1
        for (NarrowSlot slot; lane == 0 && patches.more(); slot.advance(call)) {
            barrier_wait(ring.done(slot.index), slot.parity);
            patches.load(slot.index);
        }
        return;
    }
    named_barrier_sync(1, narrow_rows_threads);

    NarrowSlot slot;
    float sums[Shape::down][Shape::steps][4] = {};
    const NarrowRowPlaces<Shape, runs> places(warp, lane);
    for (int index = part; index < call.images_count * call.patches_down * call.patches_across; index += parts) {
        const NarrowStrip<Shape> strip(call, index);
        const NarrowRunsOfPositions<runs> existing(min(call.columns, call.width.count - strip.column), lane);
        // The last element of a row of the filter has no neighbour: it is multiplied together with that of the next row of
        // the filter, which met the row of images before.
        std::uint32_t b[Rows::kept][runs][2], before[runs][2];
#pragma unroll 1
        for (int i = 0; i < strip.slots; ++i) {
            barrier_wait(ring.loaded(slot.index), slot.parity);
#pragma unroll
            for (int row = 0; row < Rows::of_slot; ++row) {
                const int y = i * Rows::of_slot + row;
                if (row > 0 && y >= strip.met) break;
                const std::uint32_t images = ring.row(call, slot.index, row);
                if (Rows::meets(row, 0)) {
                    auto& read = b[Rows::which(row, 0)];
                    places.read_gradient(read, images + call.images_bytes);
                    existing.keep(read);
                }
                // As much at once as there are registers for.
                constexpr int at_once = Shape::steps <= 2 ? Shape::steps : 1;
#pragma unroll
                for (int first = 0; first < Shape::steps; first += at_once) {
                    std::uint32_t a[at_once][runs][4];
#pragma unroll
                    for (int j = 0; j < at_once; ++j) places.read_images(a[j], images, first + j);
#pragma unroll
                    for (int j = 0; j < at_once; ++j) existing.keep(a[j]);
#pragma unroll
                    for (int tap = 0; tap < Shape::down; ++tap) {
                        if (!Rows::meets(row, tap) || y < tap || y - tap > (strip.rows - 1) * Shape::step) continue;
                        const auto& of = b[Rows::which(row, tap)];
#pragma unroll
                        for (int j = 0; j < at_once; ++j)
#pragma unroll
                            for (int run = 0; run < runs; ++run) {
                                const std::uint32_t(&now)[4] = a[j][run], (&last)[2] = before[run];
                                const std::uint32_t both[4] = {last[0], now[0], last[1], now[2]};
                                if (first + j < Shape::pairs || (tap % 2 == 0 && tap == Shape::down - 1))
                                    mma_16x8x16<T>(sums[tap][first + j], now, of[run][0], of[run][1]);
                                else if (tap % 2 == 1)
                                    mma_16x8x16<T>(sums[tap - 1][first + j], both, of[run][0], of[run][1]);
                            }
                    }
                    if (Shape::steps > Shape::pairs && first + at_once == Shape::steps)
#pragma unroll
                        for (int run = 0; run < runs; ++run)
                            before[run][0] = a[at_once - 1][run][0], before[run][1] = a[at_once - 1][run][2];
                }
            }
            warp_arrive(ring.done(slot.index));
            slot.advance(call);
        }
    }
#pragma unroll
    for (int tap = 1; Shape::steps > Shape::pairs && tap < Shape::down; tap += 2)
#pragma unroll
        for (int i = 0; i < 2; ++i) sums[tap][Shape::pairs][i] = sums[tap - 1][Shape::pairs][2 + i];
    // The ring is not needed any more: all that it loads was read.
    constexpr int pairs = Shape::down * Shape::steps;
    const std::uint32_t all = ring.memory;
    named_barrier_sync(2, narrow_rows_warps * 32);
#pragma unroll
    for (int pair = 0; pair < pairs; ++pair) {
        const float(&sum)[4] = sums[pair / Shape::steps][pair % Shape::steps];
        store_shared(all + ((warp * pairs + pair) * 32 + lane) * 16, make_float4(sum[0], sum[1], sum[2], sum[3]));
    }
    cluster_sync();
    auto* const out = reinterpret_cast<float4*>(call.sums) +
                      std::int64_t{part / narrow_cluster * call.blocks + block} * narrow_rows_warps * pairs * 32;
    for (int i = part % narrow_cluster * narrow_rows_warps * 32 + static_cast<int>(threadIdx.x);
         i < narrow_rows_warps * 32 * pairs; i += narrow_cluster * narrow_rows_warps * 32) {
        float4 of_block[narrow_cluster], sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int j = 0; j < narrow_cluster; ++j) of_block[j] = load_remote(shared_address_of(all + i * 16, j));
#pragma unroll
        for (const float4& x : of_block) sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
        out[i] = sum;
    }
    cluster_pass();
}

}  // namespace catalog::cuda
