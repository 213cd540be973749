// Forward and backward data of narrow groups.
//
// A warp computes 8 channels of all positions of a patch, by matrix instructions of 16 positions and 8 output channels.
// The depth is 8 input channels at one element of the filter, or at each of two neighbours. Usual filters have kernels of
// their own: a row of the patch's images is loaded into registers once, for all rows of the result that it meets. Those of
// large images of groups of at most 8 channels are in narrow_row_images.hpp.
//
// Of groups of fewer than 8, channels of other groups are multiplied by zero. Where one of those is not finite, the sum is
// not a number: such sums are computed again, from the channels of the group alone.
#pragma once

#include "narrow_call.hpp"
#include "narrow_shape.hpp"

namespace catalog::cuda {

inline constexpr int narrow_images_threads = 256, narrow_images_runs = AnyNarrowShape::runs;

// The weights by which channels of a group contribute to an output channel of the launch, from input channel `from` on,
// counted in the group. In backward data, the launch's output channels are the convolution's input channels. `all` are the
// filters.
template <class Row>
__device__ __forceinline__ const std::uint16_t* narrow_weights(const NarrowCall& call, const void* all, int to, int from) {
    constexpr bool forward = Row::direction == Direction::forward;
    const int in = from & (call.of_group - 1), filter = forward ? to : (to & -call.of_group) + in;
    return static_cast<const std::uint16_t*>(all) + filter * call.stride_weight +
           (forward ? in : to & (call.of_group - 1));
}

// What matrix instructions multiply 8 input channels of `count` elements by, for 8 output channels: `place_of` has where the
// elements are in a filter. Loads are not conditional, so that all are on their way together.
template <class Row, int count, class PlaceOf>
__device__ __forceinline__ void narrow_read_weights(std::uint32_t (&b)[count], const NarrowCall& call, const void* all,
                                                    int first_to, int eight, PlaceOf place_of) {
    constexpr bool forward = Row::direction == Direction::forward;
    const int lane = static_cast<int>(threadIdx.x) % 32, in_eight = lane / 4, from = lane % 4 * 2;
    const std::uint16_t* const weights =
        narrow_weights<Row>(call, all, min(first_to + in_eight, call.channels - 1), from + 8 * eight);
    const auto same_group = [&](int channel) { return ((in_eight ^ channel) & 7 & -call.of_group) == 0; };
    const std::uint32_t exist =
        first_to + in_eight >= call.channels
            ? 0
            : (same_group(from) ? 0xffffu : 0u) | (same_group(from + 1) ? 0xffff0000u : 0u);
    if (forward && call.even_weights) {
#pragma unroll
        for (int i = 0; i < count; ++i) b[i] = exist & *reinterpret_cast<const std::uint32_t*>(weights + place_of(i));
    } else {
        const std::uint16_t* const second = weights + (call.of_group == 1 ? 0 : forward ? 1 : call.stride_weight);
#pragma unroll
        for (int i = 0; i < count; ++i)
            b[i] = exist & (weights[place_of(i)] | std::uint32_t{second[place_of(i)]} << 16);
    }
}

// Where the elements of a usual filter are.
template <class Shape>
struct NarrowPlaces {
    int first, down, across;

    __device__ __forceinline__ explicit NarrowPlaces(const NarrowCall& call)
        : first(narrow_element(call, 0, 0) * call.of_group),
          down(call.height.tap_step * call.filter_width * call.of_group),
          across(call.width.tap_step * call.of_group) {
        if (call.height.apart < 0) first += (Shape::down - 1) * down, down = -down;
        if (call.width.apart < 0) first += (Shape::across - 1) * across, across = -across;
    }

    __device__ __forceinline__ int operator()(int i) const {
        return first + i / Shape::across * down + i % Shape::across * across;
    }
};

// Sums of a warp: of each run, those of 16 positions and 8 channels.
using NarrowImagesSums = float[narrow_images_runs][4];

// Usual filters.
template <class Row, class Shape, class Wait>
__device__ __forceinline__ void narrow_multiply(NarrowImagesSums& sums, const NarrowCall& call, std::uint32_t images,
                                                int first_to, int first_eight, int eight, Wait wait) {
    using T = typename Row::dtype;
    const int lane = static_cast<int>(threadIdx.x) % 32, matrix = lane / 8;
    std::uint32_t b[Shape::down * Shape::across];
    narrow_read_weights<Row>(b, call, call.weight, first_to, eight, NarrowPlaces<Shape>(call));
    wait();
    // Matrices 0 and 1 are of a tap, 2 and 3 of the next.
    const int position = (lane % 8 + 8 * (matrix % 2)) * Shape::step;
    constexpr int pairs = Shape::pairs;
    std::uint32_t address[Shape::steps];
#pragma unroll
    for (int j = 0; j < Shape::steps; ++j)
        address[j] = images + narrow_place(position + 2 * j + (j < pairs ? matrix / 2 : 0), first_eight + eight);
#pragma unroll
    for (int y = 0; y < Shape::rows; ++y) {
        const auto each_run = [&](auto multiply) {
#pragma unroll
            for (int i = 0; i < Shape::down; ++i)
                if (y >= i && (y - i) % Shape::step == 0 && (y - i) / Shape::step < narrow_images_runs)
                    multiply(sums[(y - i) / Shape::step], b + i * Shape::across);
        };
#pragma unroll
        for (int j = 0; j < pairs; ++j) {
            std::uint32_t a[4];
            load_matrices(address[j] + y * call.pitch * 128, a);
            each_run([&](float(&sum)[4], const std::uint32_t* of) { mma_16x8x16<T>(sum, a, of[2 * j], of[2 * j + 1]); });
        }
        if constexpr (Shape::steps > pairs) {
            std::uint32_t a[2];
            load_matrices(address[pairs] + y * call.pitch * 128, a);
            each_run([&](float(&sum)[4], const std::uint32_t* of) { mma_16x8x8<T>(sum, a, of[2 * pairs]); });
        }
    }
}

// All others: one element after the other.
template <class Row>
__device__ __forceinline__ void narrow_multiply_any(NarrowImagesSums& sums, const NarrowCall& call, std::uint32_t images,
                                                    int first_to, int first_eight, int eight) {
    using T = typename Row::dtype;
    const int position = static_cast<int>(threadIdx.x) % 16 * call.width.step, runs = call.rows * call.segments;
    for (int row = 0; row < call.height.taps; ++row)
        for (int column = 0; column < call.width.taps; ++column) {
            std::uint32_t b[1];
            narrow_read_weights<Row>(b, call, call.weight, first_to, eight,
                                     [&](int) { return narrow_element(call, row, column) * call.of_group; });
            const std::uint32_t first =
                images + narrow_place(position + narrow_tap(call, row, column), first_eight + eight);
#pragma unroll
            for (int run = 0; run < narrow_images_runs; ++run) {
                if (run >= runs) break;
                std::uint32_t a[2];
                load_matrices(first + run * call.run_step * 128, a);
                mma_16x8x8<T>(sums[run], a, b[0]);
            }
        }
}

template <class T>
__device__ __forceinline__ float narrow_float(std::uint16_t bits) {
    T value;
    memcpy(&value, &bits, sizeof value);
    return static_cast<float>(value);
}

// The sum of a position of the result and a channel, from the channels of the group alone.
template <class Row>
__device__ __forceinline__ float narrow_sum(const NarrowCall& call, int image, int row, int column, int channel) {
    using T = typename Row::dtype;
    const auto* const images = static_cast<const std::uint16_t*>(call.images) + image * call.stride_images;
    float sum = 0;
#pragma unroll 1
    for (int from = 0; from < call.of_group; ++from) {
        const std::uint16_t* const weights = narrow_weights<Row>(call, call.weight, channel, from);
#pragma unroll 1
        for (int i = 0; i < call.height.taps * call.width.taps; ++i) {
            const int tap_row = i / call.width.taps, tap_column = i - tap_row * call.width.taps;
            const int y = call.height.origin + call.height.step * row + call.height.apart * tap_row;
            const int x = call.width.origin + call.width.step * column + call.width.apart * tap_column;
            if (y < 0 || y >= call.height.extent || x < 0 || x >= call.width.extent) continue;
            const std::int64_t place = (std::int64_t{y} * call.width.extent + x) * call.image_channels;
            sum += narrow_float<T>(images[place + (channel & -call.of_group) + from]) *
                   narrow_float<T>(weights[narrow_element(call, tap_row, tap_column) * call.of_group]);
        }
    }
    return sum;
}

// Computes sums that are not numbers again.
template <class Row>
__device__ __forceinline__ void narrow_repair(NarrowImagesSums& sums, const NarrowCall& call, const NarrowPatch& patch,
                                              int first_channel) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    std::uint32_t wrong = 0;  // a bit for each sum
#pragma unroll
    for (int i = 0; i < 4 * narrow_images_runs; ++i) wrong |= isnan(sums[i / 4][i % 4]) ? 1u << i : 0;
#pragma unroll 1
    for (; wrong != 0; wrong &= wrong - 1) {
        const int which = __ffs(wrong) - 1, run = which / 4, channel = first_channel + lane % 4 * 2 + which % 2;
        const int y = patch.row + (call.rows > 1 ? run : 0);
        const int x = patch.column + (call.rows > 1 ? 0 : run * narrow_run) + lane / 4 + which % 4 / 2 * 8;
        if (run >= call.rows * call.segments || y >= call.height.count || x >= call.width.count) continue;
        if (channel >= call.channels) continue;
        const float sum = narrow_sum<Row>(call, patch.image, y, x, channel);
#pragma unroll
        for (int i = 0; i < 4 * narrow_images_runs; ++i)
            if (i == which) sums[i / 4][i % 4] = sum;
    }
}

// Rounded results from shared memory to a result that TMA cannot write: rows from `row` on, of call.columns positions. A
// warp writes a position at a time.
template <class Row>
__device__ __forceinline__ void narrow_store(const NarrowCall& call, const char* from, const NarrowPatch& patch, int row,
                                             int rows, int first_channel, int warp, int warps) {
    using T = typename Row::dtype;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    T* const result = static_cast<T*>(call.result) + patch.image * call.stride_result;
    for (int i = warp; i < rows * call.columns; i += warps) {
        const int y = row + i / call.columns, x = patch.column + i % call.columns;
        if (y >= call.height.count || x >= call.width.count) continue;
        const std::int64_t place = std::int64_t{call.height.first + call.height.spread * y} * call.result_width +
                                   call.width.first + call.width.spread * x;
        for (int in = lane; in < narrow_channels; in += 32)
            if (first_channel + in < call.channels)
                result[place * call.channels + first_channel + in] =
                    *reinterpret_cast<const T*>(from + narrow_place(i, in / 8) + in % 8 * 2);
    }
}

// Blocks of a processor, at least: a thread keeps a weight of each element. With a step, patches are large.
template <class Shape, bool deep>
inline constexpr int narrow_images_blocks = Shape::down * Shape::across <= 9 && Shape::step < 2 && !deep ? 3
                                            : Shape::down * Shape::across * (deep ? Shape::step : 1) <= 25 ? 2
                                                                                                           : 1;

// Grid: 64 channels, patches. `deep`: groups may have more than 8 channels.
template <class Row, class Shape, bool deep>
__global__ __launch_bounds__(narrow_images_threads, narrow_images_blocks<Shape, deep>) void narrow_images(
    const __grid_constant__ NarrowCall call) {
    using T = typename Row::dtype;
    extern __shared__ __align__(1024) char memory[];
    __shared__ std::uint64_t loaded;
    const std::uint32_t images = shared_address(memory), barrier = shared_address(&loaded);
    const int index = static_cast<int>(blockIdx.x) / call.by_blocks;
    const int first_channel = (static_cast<int>(blockIdx.x) - index * call.blocks) * narrow_channels;
    const bool leads = threadIdx.x == 0;
    if (leads) {
        barrier_init(barrier, 1);
        barrier_init_fence();
        barrier_arrive_expect(barrier, call.loaded_height * call.pitch * 128);
        narrow_load_images(images, barrier, call, NarrowPatch(call, index), first_channel);
    }
    __syncthreads();

    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int first_to = first_channel + warp * 8;
    const auto wait = [&] { barrier_wait(barrier, 0); };
    float sums[narrow_images_runs][4] = {};
    const int eights = deep ? narrow_eights(call.of_group) : 1, first_eight = warp / eights * eights;
#pragma unroll 1
    for (int eight = 0; eight < eights; ++eight)
        if constexpr (Shape::down > 0) {
            narrow_multiply<Row, Shape>(sums, call, images, first_to, first_eight, eight, wait);
        } else {
            wait();
            narrow_multiply_any<Row>(sums, call, images, first_to, first_eight, eight);
        }
    if ((!deep || Shape::down == 0) && call.of_group < 8)
        narrow_repair<Row>(sums, call, NarrowPatch(call, index), first_to);

    __syncthreads();  // the images were read: results take their place
#pragma unroll
    for (int run = 0; run < narrow_images_runs; ++run) {
        if (run >= call.rows * call.segments) break;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            *reinterpret_cast<std::uint32_t*>(memory + narrow_place(run * narrow_run + lane / 4 + 8 * half, warp) +
                                              lane % 4 * 4) = pack<T>(sums[run][2 * half], sums[run][2 * half + 1]);
    }
    fence_proxy_async();
    __syncthreads();
    const NarrowPatch patch(call, index);  // computed again: its registers were needed
    if (!call.tma_stores) {
        narrow_store<Row>(call, memory, patch, patch.row, call.rows, first_channel, warp, narrow_images_threads / 32);
    } else if (leads) {
        tma_store(&call.result_map, images, first_channel, patch.column, patch.row, patch.image);
        bulk_commit();
        bulk_wait_read<0>();
    }
}

}  // namespace catalog::cuda
