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
    __device__ __forceinline__ void load(std::uint32_t row, const std::uint32_t (&places)[Shape::steps]) {
#pragma unroll
        for (int run = 0; run < runs; ++run) {
            const std::uint32_t from = row + run * narrow_run * Shape::step * 128;
#pragma unroll
            for (int j = 0; j < Shape::pairs; ++j) load_matrices(from + places[j], two[run][j]);
            if constexpr (Shape::steps > Shape::pairs) load_matrices(from + places[Shape::pairs], last[run]);
        }
    }
};

// Computes the sums of a position of the result again, from the channels of the group alone.
template <class Row>
__device__ __forceinline__ float narrow_sum_again(const NarrowCall& call, int image, int row, int column, int channel) {
    using T = typename Row::dtype;
    const auto* const images = static_cast<const std::uint16_t*>(call.images) + image * call.stride_images;
    float sum = 0;
    for (int from = 0; from < call.of_group; ++from) {
        const NarrowWeights<Row> weights(call, channel, from);
        for (int i = 0; i < call.height.taps; ++i)
            for (int j = 0; j < call.width.taps; ++j) {
                const int y = call.height.origin + call.height.step * row + call.height.apart * i;
                const int x = call.width.origin + call.width.step * column + call.width.apart * j;
                if (y < 0 || y >= call.height.extent || x < 0 || x >= call.width.extent) continue;
                const std::int64_t place = (std::int64_t{y} * call.width.extent + x) * call.image_channels;
                sum += narrow_float<T>(images[place + (channel & -call.of_group) + from]) *
                       narrow_float<T>(weights.one(narrow_element(call, i, j)));
            }
    }
    return sum;
}

// Rounds a row of the result and leaves it in shared memory, or writes it where TMA cannot.
template <class Row, int runs>
class NarrowRowOfResult {
    using T = typename Row::dtype;

   public:
    __device__ __forceinline__ NarrowRowOfResult(const NarrowCall& call, const NarrowPatch& patch, int first_to, int warp)
        : call(call), patch(patch), first_to(first_to), lane(static_cast<int>(threadIdx.x) % 32),
          place(narrow_place(lane, warp)) {}

    __device__ __forceinline__ void put(float (&sums)[runs][4], std::uint32_t to, int row) const {
        if (call.of_group < 8) repair(sums, row);
        if (!call.tma_stores) return store(sums, row);
        if constexpr (runs == 2) {
            store_matrices(to + place, pack<T>(sums[0][0], sums[0][1]), pack<T>(sums[0][2], sums[0][3]),
                           pack<T>(sums[1][0], sums[1][1]), pack<T>(sums[1][2], sums[1][3]));
        } else {
            store_matrices(to + place, pack<T>(sums[0][0], sums[0][1]), pack<T>(sums[0][2], sums[0][3]));
        }
    }

   private:
    template <class Body>
    __device__ __forceinline__ void for_each(int row, Body body) const {
#pragma unroll
        for (int i = 0; i < runs * 4; ++i) {
            const int column = patch.column + i / 4 * narrow_run + lane / 4 + i % 4 / 2 * 8;
            const int channel = first_to + lane % 4 * 2 + i % 2;
            const int end = min(call.width.count, patch.column + call.columns);
            const bool exists = column < end && channel < call.channels;
            body(i, patch.row + row, column, channel, exists);
        }
    }

    __device__ __forceinline__ void repair(float (&sums)[runs][4], int row) const {
        float all = 0;
#pragma unroll
        for (int i = 0; i < runs * 4; ++i) all += sums[i / 4][i % 4];
        if (!isnan(all)) return;
        for_each(row, [&](int i, int y, int x, int channel, bool exists) {
            float& sum = sums[i / 4][i % 4];
            if (isnan(sum) && exists) sum = narrow_sum_again<Row>(call, patch.image, y, x, channel);
        });
    }

    __device__ __forceinline__ void store(const float (&sums)[runs][4], int row) const {
        T* const result = static_cast<T*>(call.result) + patch.image * call.stride_result;
        for_each(row, [&](int i, int y, int x, int channel, bool exists) {
            const std::int64_t at = std::int64_t{call.height.first + call.height.spread * y} * call.result_width +
                                    call.width.first + call.width.spread * x;
            if (exists) result[at * call.channels + channel] = T(sums[i / 4][i % 4]);
        });
    }

    const NarrowCall& call;
    const NarrowPatch& patch;
    const int first_to, lane;
    const std::uint32_t place;
};

// Loads images and stores results. By one thread.
template <class Shape>
__device__ __forceinline__ void narrow_copy_rows(const NarrowCall& call, const NarrowRing<Shape>& ring,
                                                 const NarrowStrip<Shape>& strip, int channel) {
    constexpr int of_slot = NarrowRows<Shape>::of_slot;
    NarrowSlot slot;
    std::uint32_t last = 0;
    for (int i = 0; i < strip.slots; ++i) {
        barrier_wait(ring.done(slot.index), slot.parity);
#pragma unroll 1
        for (int row = 0; call.tma_stores && row < of_slot; ++row) {
            const int met = i * of_slot + row - (Shape::down - 1);
            if (met < 0 || met % Shape::step != 0 || met / Shape::step >= strip.rows) continue;
            tma_store(&call.result_map, ring.row(call, slot.index, row), channel, strip.column,
                      strip.row + met / Shape::step, strip.image);
        }
        bulk_commit();
        // There is room where the slot before was, once its results were read.
        if (const int next = i - 1 + call.stages; i > 0 && next < strip.slots) {
            bulk_wait_read<1>();
            ring.template load<false>(call, strip, last, next * of_slot, channel);
        }
        last = slot.index;
        slot.advance(call);
    }
    bulk_wait_read<0>();
}

#ifndef NARROW_BLOCKS
#define NARROW_BLOCKS 2
#endif
// Blocks of a processor.
template <class Shape, int runs>
inline constexpr int narrow_row_images_blocks = Shape::down * Shape::across <= 9 ? NARROW_BLOCKS : 2;

// Grid: 64 channels, patches.
template <class Row, class Shape, int runs>
__global__ __launch_bounds__(narrow_rows_threads, narrow_row_images_blocks<Shape, runs>) void narrow_row_images(
    const __grid_constant__ NarrowCall call) {
    using T = typename Row::dtype;
    using Rows = NarrowRows<Shape>;
    extern __shared__ __align__(1024) char memory[];
    __shared__ std::uint64_t barriers[2 * narrow_slots];
    const int index = static_cast<int>(blockIdx.x) / call.blocks;
    const int first_channel = (static_cast<int>(blockIdx.x) - index * call.blocks) * narrow_channels;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const NarrowRing<Shape> ring(memory, barriers);
    const NarrowStrip<Shape> strip(call, index);
    const bool copies = threadIdx.x == narrow_rows_warps * 32;
    if (copies) {
        ring.init(call);
        for (int i = 0; i < min(call.stages, strip.slots); ++i)
            ring.template load<false>(call, strip, i, i * Rows::of_slot, first_channel);
    }
    __syncthreads();
    if (warp == narrow_rows_warps) {
        if (copies) narrow_copy_rows(call, ring, strip, first_channel);
        return;
    }

    const int first_to = first_channel + warp * 8, matrix = lane / 8;
    std::uint32_t b[Shape::down * Shape::across];
    narrow_read_weights<Row>(b, call, first_to, 0, [&](int i) {
        const int row = i / Shape::across, column = i % Shape::across;
        return narrow_element(call, call.height.apart < 0 ? Shape::down - 1 - row : row,
                              call.width.apart < 0 ? Shape::across - 1 - column : column);
    });
    // Matrices 0 and 1 are of a tap, 2 and 3 of the next.
    const int position = (lane % 8 + 8 * (matrix % 2)) * Shape::step;
    std::uint32_t places[Shape::steps];
#pragma unroll
    for (int j = 0; j < Shape::steps; ++j)
        places[j] = narrow_place(position + 2 * j + (j < Shape::pairs ? matrix / 2 : 0), warp);
    const NarrowRowOfResult<Row, runs> result(call, strip, first_to, warp);
    float sums[Rows::kept][runs][4] = {};
    NarrowSlot slot;
#pragma unroll 1
    for (int i = 0; i < strip.slots; ++i) {
        barrier_wait(ring.loaded(slot.index), slot.parity);
        NarrowRowOfImages<Shape, runs> images[2];
        images[0].load(ring.row(call, slot.index, 0), places);
#pragma unroll
        for (int row = 0; row < Rows::of_slot; ++row) {
            const int first = i * Rows::of_slot + row - (Shape::down - 1);
            if (row > 0 && first >= strip.met - (Shape::down - 1)) break;
            if (row + 1 < Rows::of_slot) images[(row + 1) % 2].load(ring.row(call, slot.index, row + 1), places);
            const auto& now = images[row % 2];
#pragma unroll
            for (int j = 0; j < Shape::steps; ++j)
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
            if (!Rows::meets(row, Shape::down - 1)) continue;
            float(&complete)[runs][4] = sums[Rows::which(row, Shape::down - 1)];
            if (first >= 0) result.put(complete, ring.row(call, slot.index, row), first / Shape::step);
#pragma unroll
            for (int j = 0; j < runs * 4; ++j) complete[j / 4][j % 4] = 0;
        }
        fence_proxy_async();
        warp_arrive(ring.done(slot.index));
        slot.advance(call);
    }
}

}  // namespace catalog::cuda
