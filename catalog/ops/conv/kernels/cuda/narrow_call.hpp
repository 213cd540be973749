// Convolutions of narrow groups, pipeline sm90_narrow: what one launch computes, and the images in shared memory.
//
// Groups have as many output as input channels, at most 32 and a power of two, so that 64 channels are whole groups. A
// block computes such channels of a patch of positions, in runs of 16 along the width. TMA first loads all that the
// filter meets there: memory is read about once, whatever the extent of the filter.
#pragma once

#include <algorithm>
#include <cstdint>

#include "conv_shape.hpp"
#include "cuda/block.hpp"
#include "cuda/divisor.hpp"
#include "cuda/mma.hpp"

namespace catalog::cuda {

inline constexpr int narrow_channels = 64, narrow_run = 16;
inline constexpr int narrow_bytes = 224 * 1024;  // of shared memory, at most

// What each of some blocks of a processor may have. It has 228 KiB, and a block needs two for barriers and what CUDA keeps.
constexpr int narrow_bytes_of_block(int blocks) { return blocks == 1 ? narrow_bytes : (228 / blocks - 2) * 1024; }

// One of height and width.
struct NarrowAxis {
    int count, first, spread;  // position i is at first + spread * i in the result
    int taps, tap, tap_step;   // tap j is element tap + tap_step * j of the filter
    int extent, origin, step, apart;  // and is at origin + step * i + apart * j in the images

    // Of apart * j.
    __device__ __forceinline__ int lowest() const { return apart < 0 ? apart * (taps - 1) : 0; }
};

// The tensors of a launch.
struct NarrowTensors {
    const void *images, *weight, *gradient;
    void* result;
    float* sums;
    std::int64_t stride_images, stride_gradient, stride_result, stride_weight;
    NarrowAxis height, width;
    int channels, of_group;  // of the result, and of a group of it
    int image_channels, gradient_channels;  // with zeros behind them
    int filter_width, result_width;
    int images_count;
    int blocks;  // of channels
    int parts;   // bwd_weight: blocks that share channels
    int filter_elements;  // of an output channel
    bool even_weights;    // pairs of them are aligned
};

struct NarrowCall : NarrowTensors {
    CUtensorMap images_map, gradient_map, result_map;  // boxes of 64 channels
    int rows, segments;          // of a patch: runs of 16 positions; one of them is 1
    int columns;                 // from a patch to the next one across
    int run_step;                // from run to run, in positions of shared memory
    int patches_down, patches_across;
    // A block that starts waits for each line of its code, and a division has many instructions. Kernels whose registers are
    // all in use divide as usual.
    Divisor by_blocks, by_patches_down, by_patches_across, by_pairs, by_item_columns;
    int loaded_height, pitch;    // of a patch's images; positions from row to row in shared memory
    int box_height, box_width;   // of a load of images
    int stages, images_bytes, stage_bytes;   // bwd_weight: patches in shared memory, and bytes of one
    int row_bytes;               // rows that stream: of one of images
    int weights_at;              // bytes before the copy of 64 filters in shared memory; 0: there is none
    int item_columns;            // bwd_weight: of a row of the filter, with what its sums have behind them
    bool tma_stores;             // TMA can write the result
};

// The patch of a block.
struct NarrowPatch {
    int image, row, column;  // of its first position

    __device__ __forceinline__ NarrowPatch(const NarrowCall& call, int index)
        : NarrowPatch(call, index, call.patches_across, call.patches_down) {}

    // `across` and `down` are those of the call, or divide by them.
    template <class Number>
    __device__ __forceinline__ NarrowPatch(const NarrowCall& call, int index, const Number& across, const Number& down) {
        const int next = index / across;
        column = (index - next * call.patches_across) * call.columns;
        image = next / down;
        row = (next - image * call.patches_down) * call.rows;
    }
};

// Where 8 channels of a position lie, as TMA's 128-byte swizzle puts them: memory is aligned to 1024. Eight neighbours have
// them in different banks.
__device__ __forceinline__ std::uint32_t narrow_place(int position, int eight) {
    return swizzled(position, eight << 4);
}

// Loads what the filter meets of a patch. By one thread.
__device__ __forceinline__ void narrow_load_images(std::uint32_t target, std::uint32_t barrier, const NarrowCall& call,
                                                   const NarrowPatch& patch, int first_channel) {
    const int top = call.height.origin + call.height.step * patch.row + call.height.lowest();
    const int left = call.width.origin + call.width.step * patch.column + call.width.lowest();
    for (int y = 0; y < call.loaded_height; y += call.box_height)
        for (int x = 0; x < call.pitch; x += call.box_width)
            tma_load(target + (y * call.pitch + x) * 128, &call.images_map, barrier, first_channel, left + x, top + y,
                     patch.image);
}

// Where a tap is in the patch's images, from a position on.
__device__ __forceinline__ int narrow_tap(const NarrowCall& call, int tap_row, int tap_column) {
    const auto at = [](const NarrowAxis& axis, int tap) {
        return axis.apart < 0 ? -axis.apart * (axis.taps - 1 - tap) : axis.apart * tap;
    };
    return at(call.height, tap_row) * call.pitch + at(call.width, tap_column);
}

// The element of the filter.
__device__ __forceinline__ int narrow_element(const NarrowTensors& call, int tap_row, int tap_column) {
    return (call.height.tap + call.height.tap_step * tap_row) * call.filter_width + call.width.tap +
           call.width.tap_step * tap_column;
}

// What a matrix instruction multiplies at once: 8 channels of an element of the filter, or a group of fewer.
__host__ __device__ __forceinline__ int narrow_eights(int of_group) { return of_group < 8 ? 1 : of_group / 8; }

}  // namespace catalog::cuda
