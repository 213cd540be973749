// TMA's im2col mode: boxes of positions, each with a piece of its channels, that a filter meets at one of its elements.
//
// Images are tensors with the axes channel, width, height, depth, image, the innermost first, and one to three spatial
// axes. Positions run over a box of each image, from `lower` corners to the extents plus `upper`, in steps; a load takes
// a number of them in order, from one image to the next, all moved by an offset. What lies outside reads as zeros.
#pragma once

#include "tensor_map.hpp"

namespace catalog::cuda {

// The corners and offsets that a map of `axes` spatial axes can have.
template <int axes>
struct Im2colLimits {
    static constexpr int corner = axes == 1 ? 1 << 15 : axes == 2 ? 1 << 7 : 1 << 4;  // -corner to corner - 1
    static constexpr int offset = 2 * corner - 1, step = 8, positions = 256;
};

// Strides in bytes, of all axes but the innermost; `channels` x `positions` is the box, of rows of 64 or 128 bytes. False:
// TMA cannot address it so.
template <class T, int axes>
inline bool make_im2col_map(CUtensorMap& map, const void* data, const std::uint64_t (&extents)[axes + 2],
                            const std::uint64_t (&strides)[axes + 1], const int (&lower)[axes],
                            const int (&upper)[axes], const int (&steps)[axes], int channels, int positions) {
    using Limits = Im2colLimits<axes>;
    static const auto encode = find_in_driver<decltype(&cuTensorMapEncodeIm2col)>("cuTensorMapEncodeIm2col");
    std::uint32_t all_steps[axes + 2];
    for (std::uint32_t& step : all_steps) step = 1;
    for (int i = 0; i < axes; ++i) {
        const auto fits = [](int corner) { return -Limits::corner <= corner && corner < Limits::corner; };
        if (!fits(lower[i]) || !fits(upper[i]) || steps[i] > Limits::step) return false;
        all_steps[i + 1] = static_cast<std::uint32_t>(steps[i]);
    }
    return encode && encode(&map, tensor_map_type<T>, axes + 2, const_cast<void*>(data), extents, strides, lower, upper,
                            static_cast<std::uint32_t>(channels), static_cast<std::uint32_t>(positions), all_steps,
                            CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(channels * sizeof(T)),
                            CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// From channel `c` of the position `at` (width first) of image `n` on. By one thread.
__device__ __forceinline__ void tma_load_im2col(std::uint32_t target, const CUtensorMap* map, std::uint32_t barrier,
                                                int c, const int (&at)[1], int n, const int (&offset)[1]) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5}], [%2], {%6};" ::"r"(target),
        "l"(map), "r"(barrier), "r"(c), "r"(at[0]), "r"(n), "h"(static_cast<std::uint16_t>(offset[0]))
        : "memory");
}

__device__ __forceinline__ void tma_load_im2col(std::uint32_t target, const CUtensorMap* map, std::uint32_t barrier,
                                                int c, const int (&at)[2], int n, const int (&offset)[2]) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(target),
        "l"(map), "r"(barrier), "r"(c), "r"(at[0]), "r"(at[1]), "r"(n), "h"(static_cast<std::uint16_t>(offset[0])),
        "h"(static_cast<std::uint16_t>(offset[1]))
        : "memory");
}

__device__ __forceinline__ void tma_load_im2col(std::uint32_t target, const CUtensorMap* map, std::uint32_t barrier,
                                                int c, const int (&at)[3], int n, const int (&offset)[3]) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], {%8, %9, %10};" ::"r"(target),
        "l"(map), "r"(barrier), "r"(c), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(n),
        "h"(static_cast<std::uint16_t>(offset[0])), "h"(static_cast<std::uint16_t>(offset[1])),
        "h"(static_cast<std::uint16_t>(offset[2]))
        : "memory");
}

}  // namespace catalog::cuda
