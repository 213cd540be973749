// Forward and backward data of usual filters and groups of at most 8 channels, row after row of the images.
//
// A row of the result is complete when the last row of images that it meets was read. It takes that row's place in shared
// memory, from where TMA stores it.
#pragma once

#include "narrow_images.hpp"
#include "narrow_rows.hpp"

namespace catalog::cuda {

// What matrix instructions take of a row of images: 8 channels of 16 positions, at one element of the filter or at each of
// two neighbours.
template <class Shape, int runs>
struct NarrowRowOfImages {
    std::uint32_t two[runs][Shape::pairs + 1][4], last[runs][2];

    // `places` are those of the lane's positions in a row.
    __device__ __forceinline__ void load(std::uint32_t row, const std::uint32_t (&places)[Shape::steps], int step) {
#pragma unroll
        for (int run = 0; run < runs; ++run) {
            const std::uint32_t from = row + run * narrow_run * Shape::step * 128 + places[step];
            if (step < Shape::pairs)
                load_matrices(from, two[run][step]);
            else
                load_matrices(from, last[run]);
        }
    }

    __device__ __forceinline__ void load(std::uint32_t row, const std::uint32_t (&places)[Shape::steps]) {
#pragma unroll
        for (int step = 0; step < Shape::steps; ++step) load(row, places, step);
    }
};

// Rounded sums of a row to shared memory.
template <class T, int runs>
__device__ __forceinline__ void narrow_put(const float (&sums)[runs][4], std::uint32_t place) {
    if constexpr (runs == 2)
        store_matrices(place, pack<T>(sums[0][0], sums[0][1]), pack<T>(sums[0][2], sums[0][3]),
                       pack<T>(sums[1][0], sums[1][1]), pack<T>(sums[1][2], sums[1][3]));
    else
        store_matrices(place, pack<T>(sums[0][0], sums[0][1]), pack<T>(sums[0][2], sums[0][3]));
}

// Computes results of a slot that are not numbers again, of positions before `end`. By each whole warp, for its channels.
template <class Row, class Shape, int runs>
__device__ __forceinline__ void narrow_repair_slot(const NarrowCall& call, const NarrowStrip<Shape>& strip, char* slot,
                                                   int first, int first_to, int warp, int end) {
    using T = typename Row::dtype;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    __syncwarp();  // other lanes have written them
#pragma unroll 1
    for (int i = 0; i < NarrowRows<Shape>::of_slot * runs * 4; ++i) {
        const int row = i / (runs * 4), met = first + row - (Shape::down - 1);
        const int position = i % (runs * 4) / 2 * 8 + lane / 4, in_eight = lane % 4 * 2 + i % 2;
        if (met < 0 || met % Shape::step != 0 || met / Shape::step >= strip.rows) continue;
        if (position >= end || first_to + in_eight >= call.channels) continue;
        T& result = *reinterpret_cast<T*>(slot + row * call.row_bytes + narrow_place(position, warp) + in_eight * 2);
        if (isnan(static_cast<float>(result)))
            result = T(narrow_sum<Row>(call, strip.image, strip.row + met / Shape::step, strip.column + position,
                                       first_to + in_eight));
    }
}

// Stores the results of a slot of a strip from shared memory. By a warp.
template <class Row, class Shape>
__device__ __forceinline__ void narrow_store_slot(const NarrowCall& call, const NarrowRowRing<Shape>& ring,
                                                  const NarrowStrip<Shape>& strip, std::uint32_t slot, int first,
                                                  int channel, const char* memory) {
#pragma unroll 1
    for (int i = 0; i < NarrowRows<Shape>::of_slot; ++i) {
        const int met = first + i - (Shape::down - 1), row = strip.row + met / Shape::step;
        if (met < 0 || met % Shape::step != 0 || met / Shape::step >= strip.rows) continue;
        const std::uint32_t from = ring.row(call, slot, i);
        if (!call.tma_stores)
            narrow_store<Row>(call, memory + (from - ring.memory), strip, row, 1, channel, 0, 1);
        else if (threadIdx.x % 32 == 0)
            tma_store(&call.result_map, from, channel, strip.column, row, strip.image);
    }
    bulk_commit();
}

// Stores results and loads the images for which there was no room. By a warp.
template <class Row, class Shape>
__device__ __forceinline__ void narrow_copy_rows(const NarrowCall& call, const NarrowRowRing<Shape>& ring,
                                                 const NarrowStrip<Shape>& strip, int channel, const char* memory) {
    constexpr int of_slot = NarrowRows<Shape>::of_slot;
    NarrowSlot slot;
    std::uint32_t last = 0;
    for (int i = 0; i < strip.slots; ++i) {
        barrier_wait(ring.done(slot.index), slot.parity);
        narrow_store_slot<Row>(call, ring, strip, slot.index, i * of_slot, channel, memory);
        // There is room in the slot before, once its results were read.
        if (const int next = i - 1 + call.stages; i > 0 && next < strip.slots) {
            bulk_wait_read<1>();
            __syncwarp();
            if (threadIdx.x % 32 == 0) ring.load(call, strip, last, next * of_slot, channel);
        }
        last = slot.index;
        slot.advance(call);
    }
    bulk_wait_read<0>();
}

// Loads the filters of 64 channels. By one thread.
__device__ __forceinline__ void narrow_load_filters(const NarrowCall& call, std::uint32_t target, std::uint32_t barrier,
                                                    int channel) {
    const int bytes = min(narrow_channels, call.channels - channel) * call.filter_elements * 2;
    barrier_arrive_expect(barrier, bytes);
    bulk_load(target, static_cast<const std::uint16_t*>(call.weight) + std::int64_t{channel} * call.filter_elements, bytes,
              barrier);
}

// Blocks of a processor: a thread keeps a weight of each element.
template <class Shape>
inline constexpr int narrow_row_images_blocks = Shape::down * Shape::across <= 25 ? 2 : 1;

// Whether there are registers for the sums of two runs.
template <class Shape>
inline constexpr bool narrow_takes_two_runs =
    narrow_row_images_blocks<Shape> == 1 || NarrowRows<Shape>::kept * 8 + Shape::down * Shape::across <= 60;

// Grid: 64 channels, patches.
template <class Row, class Shape, int runs>
__global__ __launch_bounds__(narrow_rows_threads, narrow_row_images_blocks<Shape>) void narrow_row_images(
    const __grid_constant__ NarrowCall call) {
    using T = typename Row::dtype;
    using Rows = NarrowRows<Shape>;
    extern __shared__ __align__(1024) char memory[];
    __shared__ std::uint64_t barriers[2 * narrow_slots + 1];
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int index = static_cast<int>(blockIdx.x) / call.by_blocks;
    const int first_channel = (static_cast<int>(blockIdx.x) - index * call.blocks) * narrow_channels;
    const NarrowRowRing<Shape> ring(memory, barriers);
    const NarrowStrip<Shape> strip(call, index);
    // Filters first: requests of all blocks queue up, and nothing begins without filters.
    const std::uint32_t filters_loaded = shared_address(barriers + 2 * narrow_slots);
    if (warp == narrow_rows_warps) {
        if (lane == 0) {
            tma_prefetch_map(&call.images_map);
            ring.init(call);
            barrier_init(filters_loaded, 1);
            barrier_init_fence();
        }
        __syncwarp();
        named_barrier_arrive(1, narrow_rows_threads);
        if (lane == 0) {
            if (call.weights_at > 0) narrow_load_filters(call, ring.memory + call.weights_at, filters_loaded, first_channel);
#pragma unroll 1
            for (int i = 0; i < min(call.stages, strip.slots); ++i)
                ring.load(call, strip, i, i * Rows::of_slot, first_channel);
            if (call.tma_stores) tma_prefetch_map(&call.result_map);
        }
        __syncwarp();
        narrow_copy_rows<Row>(call, ring, strip, first_channel, memory);
        return;
    }

    const int first_to = first_channel + warp * 8, matrix = lane / 8;
    // Matrices 0 and 1 are of a tap, 2 and 3 of the next.
    const int position = (lane % 8 + 8 * (matrix % 2)) * Shape::step;
    std::uint32_t places[Shape::steps];
#pragma unroll
    for (int j = 0; j < Shape::steps; ++j)
        places[j] = narrow_place(position + 2 * j + (j < Shape::pairs ? matrix / 2 : 0), warp);
    const std::uint32_t place = narrow_place(lane, warp);
    float sums[Rows::kept][runs][4] = {};
    NarrowSlot slot;
    const bool mixes = call.of_group < 8;
    const int end = min(call.columns, call.width.count - strip.column);
    named_barrier_sync(1, narrow_rows_threads);
    std::uint32_t b[Shape::down * Shape::across];
    const void* filters = call.weight;
    if (call.weights_at > 0) {
        const std::int64_t first = std::int64_t{first_channel} * call.filter_elements;  // the copy begins with it
        filters = memory + call.weights_at - first * std::int64_t{sizeof(T)};
        barrier_wait(filters_loaded, 0);
    }
    narrow_read_weights<Row>(b, call, filters, first_to, 0, NarrowPlaces<Shape>(call));
#pragma unroll 1
    for (int i = 0; i < strip.slots; ++i) {
        barrier_wait(ring.loaded(slot.index), slot.parity);
        float all = 0;  // not a number if a sum is none, or an infinite one
        // If there are registers for it, the next row is read while this one is multiplied.
        constexpr bool ahead = Shape::down * Shape::across <= 9;
        NarrowRowOfImages<Shape, runs> images[2];
        if (ahead) images[0].load(ring.row(call, slot.index, 0), places);
#pragma unroll
        for (int row = 0; row < Rows::of_slot; ++row) {
            const int first = i * Rows::of_slot + row - (Shape::down - 1);
            if (row > 0 && first >= strip.met - (Shape::down - 1)) break;
            if (ahead && row + 1 < Rows::of_slot)
                images[(row + 1) % 2].load(ring.row(call, slot.index, row + 1), places);
            auto& now = images[row % 2];
#pragma unroll
            for (int j = 0; j < Shape::steps; ++j) {
                if (!ahead) now.load(ring.row(call, slot.index, row), places, j);
#pragma unroll
                for (int tap = 0; tap < Shape::down; ++tap) {
                    if (!Rows::meets(row, tap)) continue;
                    const std::uint32_t* const of = b + tap * Shape::across + 2 * j;
#pragma unroll
                    for (int run = 0; run < runs; ++run) {
                        float(&sum)[4] = sums[Rows::which(row, tap)][run];
                        if (j < Shape::pairs)
                            mma_16x8x16<T>(sum, now.two[run][j], of[0], of[1]);
                        else
                            mma_16x8x8<T>(sum, now.last[run], of[0]);
                    }
                }
            }
            if (!Rows::meets(row, Shape::down - 1)) continue;
            float(&complete)[runs][4] = sums[Rows::which(row, Shape::down - 1)];
            if (first >= 0) narrow_put<T>(complete, ring.row(call, slot.index, row) + place);
            if (mixes)
#pragma unroll
                for (int j = 0; j < runs * 4; ++j) all += j / 2 * 8 + lane / 4 < end ? complete[j / 4][j % 4] : 0;
#pragma unroll
            for (int j = 0; j < runs * 4; ++j) complete[j / 4][j % 4] = 0;
        }
        if (mixes && __any_sync(~0u, isnan(all)))
            narrow_repair_slot<Row, Shape, runs>(call, strip, memory + (ring.row(call, slot.index, 0) - ring.memory),
                                                 i * Rows::of_slot, first_to, warp, end);
        fence_proxy_async();
        warp_arrive(ring.done(slot.index));
        slot.advance(call);
    }
}

}  // namespace catalog::cuda
