// Convolutions of narrow groups, pipeline sm90_narrow: what one launch computes, and the images in shared memory.
//
// Groups have as many output as input channels, at most 32 and a power of two, so that 64 channels are whole groups. A
// block computes such channels of a patch of positions, in runs of 16 along the width. It first loads all that the
// filter meets there: memory is read about once, whatever the extent of the filter. Two warps have 8 of the channels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "conv_shape.hpp"
#include "cuda/block.hpp"
#include "cuda/mma.hpp"

namespace catalog::cuda {

inline constexpr int narrow_threads = 512, narrow_channels = 64, narrow_run = 16, narrow_runs = 16;
inline constexpr int narrow_bytes = 200 * 1024;  // of shared memory, at most

// One of height and width.
struct NarrowAxis {
    int count, first, spread;  // position i is at first + spread * i in the result
    int taps, tap, tap_step;   // tap j is element tap + tap_step * j of the filter
    int extent, origin, step, apart;  // and is at origin + step * i + apart * j in the images
};

struct NarrowCall {
    const void *images, *weight, *gradient;
    void* result;
    float* sums;
    std::int64_t stride_images, stride_gradient, stride_result, stride_weight;
    NarrowAxis height, width;
    int channels, of_group;  // of the result, and of a group of it
    int image_channels, gradient_channels;  // with zeros behind them
    int elements, filter_width;  // of the filter
    int result_width, gradient_height, gradient_width;
    int images_count, blocks;    // of 64 channels
    int rows, segments;          // of a patch: runs of 16 positions; one of them is 1
    int run_step;                // from run to run, in positions of shared memory
    int patches_down, patches_across;
    int loaded_height, loaded_width, pitch;  // of a patch's images; positions from row to row in shared memory
    int parts, stages;           // bwd_weight: blocks that share 64 channels; patches in shared memory, 1 or 2
    bool vectors;                // the result is aligned to 16 bytes
};

// The patch of a block.
struct NarrowPatch {
    int image, row, column;  // of its first position

    __device__ __forceinline__ NarrowPatch(const NarrowCall& call, int index) {
        const int next = index / call.patches_across;
        column = (index - next * call.patches_across) * call.segments * narrow_run;
        image = next / call.patches_down;
        row = (next - image * call.patches_down) * call.rows;
    }
};

// Where 8 channels of a position lie. Eight neighbours have them in different banks.
__device__ __forceinline__ std::uint32_t narrow_place(int position, int eight) {
    return position * 128 + ((eight ^ (position & 7)) << 4);
}

// Positions of an area in turn, from `first` on and each `step` after the one before: a division for the first only.
struct NarrowWalk {
    int width, down, right, row, column;

    __device__ __forceinline__ NarrowWalk(int width, int first, int step)
        : width(width), down(step / width), right(step - down * width), row(first / width), column(first - row * width) {}

    __device__ __forceinline__ void next() {
        row += down;
        column += right;
        if (column >= width) column -= width, ++row;
    }
};

// Queues the copies of a patch of `height` x `width` positions from (top, left) on; zeros outside of the image.
__device__ __forceinline__ void narrow_load(std::uint32_t target, const void* images, std::int64_t offset, int channels,
                                            int first_channel, int top, int left, int height, int width, int pitch,
                                            int image_height, int image_width) {
    const int eight = static_cast<int>(threadIdx.x) % 8, channel = first_channel + 8 * eight;
    const bool inside = channel < channels;
    const auto* const from = static_cast<const std::uint16_t*>(images) + offset + (inside ? channel : 0);
    for (NarrowWalk walk(width, static_cast<int>(threadIdx.x) / 8, narrow_threads / 8); walk.row < height; walk.next()) {
        const int y = top + walk.row, x = left + walk.column;
        const bool exists = inside && static_cast<unsigned>(y) < static_cast<unsigned>(image_height) &&
                            static_cast<unsigned>(x) < static_cast<unsigned>(image_width);
        const int place = exists ? y * image_width + x : 0;  // a launch counts at most 2^30
        copy_async(target + narrow_place(walk.row * pitch + walk.column, eight),
                   from + static_cast<std::int64_t>(place) * channels, exists);
    }
}

// Of the patch's images.
__device__ __forceinline__ void narrow_load_images(std::uint32_t target, const NarrowCall& call,
                                                   const NarrowPatch& patch, int first_channel) {
    const auto lowest = [](const NarrowAxis& axis) { return axis.apart < 0 ? axis.apart * (axis.taps - 1) : 0; };
    narrow_load(target, call.images, patch.image * call.stride_images, call.image_channels, first_channel,
                call.height.origin + call.height.step * patch.row + lowest(call.height),
                call.width.origin + call.width.step * patch.column + lowest(call.width), call.loaded_height,
                call.loaded_width, call.pitch, call.height.extent, call.width.extent);
}

// Where a tap is in the patch's images, from a position on.
__device__ __forceinline__ int narrow_tap(const NarrowCall& call, int tap_row, int tap_column) {
    const auto at = [](const NarrowAxis& axis, int tap) {
        return axis.apart < 0 ? -axis.apart * (axis.taps - 1 - tap) : axis.apart * tap;
    };
    return at(call.height, tap_row) * call.pitch + at(call.width, tap_column);
}

// The element of the filter.
__device__ __forceinline__ int narrow_element(const NarrowCall& call, int tap_row, int tap_column) {
    return (call.height.tap + call.height.tap_step * tap_row) * call.filter_width + call.width.tap +
           call.width.tap_step * tap_column;
}

// What a matrix instruction multiplies at once: 8 channels of an element of the filter, or a group of fewer.
__host__ __device__ __forceinline__ int narrow_eights(int of_group) { return of_group < 8 ? 1 : of_group / 8; }

struct NarrowItem {
    int place;   // in the patch's images, from a position on, times 4; which 8 channels of a group
    int weight;  // bytes, in the filters

    __device__ __forceinline__ int position() const { return place >> 2; }
    __device__ __forceinline__ int eight() const { return place & 3; }
};

// The table of all, made once by the whole block: it takes divisions. `weight_of` has an element and its 8 channels.
template <class WeightOf>
__device__ __forceinline__ void narrow_items(NarrowItem* table, const NarrowCall& call, WeightOf&& weight_of) {
    const int eights = narrow_eights(call.of_group), items = call.height.taps * call.width.taps * eights;
#pragma unroll 1  // few threads have an item, so its code should be short
    for (int i = static_cast<int>(threadIdx.x); i < items; i += narrow_threads) {
        const int tap = i / eights, eight = i - tap * eights, row = tap / call.width.taps, column = tap - row * call.width.taps;
        table[i] = {narrow_tap(call, row, column) * 4 + eight, weight_of(narrow_element(call, row, column), eight)};
    }
}

}  // namespace catalog::cuda
