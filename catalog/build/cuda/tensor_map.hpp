// Tensor maps: they describe to TMA a tensor and the box to copy. Host code; links no library.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "dtype.hpp"

namespace catalog::cuda {

// A function of the driver, of CUDA 12. NULL if the driver is too old.
template <class Function>
inline Function find_in_driver(const char* name) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result);
    const bool found = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return found ? reinterpret_cast<Function>(function) : nullptr;
}

template <class T>
inline constexpr CUtensorMapDataType tensor_map_type = sizeof(T) == 1            ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                                       : std::is_same_v<T, bf16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                       : std::is_same_v<T, fp16> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                                                 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;

// The swizzle of boxes whose rows have that many bytes: 64 or 128.
inline CUtensorMapSwizzle swizzle_of(std::size_t row_bytes) {
    return row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
}

// Whether TMA can address such a tensor. The driver would say so too, but tools that watch its calls report a refusal.
template <int rank>
inline bool addressable(const void* data, const std::uint64_t (&extents)[rank], const std::uint64_t (&strides)[rank - 1],
                        const std::uint32_t (&box)[rank]) {
    bool fits = reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
    for (const std::uint64_t extent : extents) fits &= extent >= 1 && extent <= 1ull << 32;
    for (const std::uint64_t stride : strides) fits &= stride % 16 == 0 && stride < 1ull << 40;
    for (const std::uint32_t elements : box) fits &= elements >= 1 && elements <= 256;
    return fits;
}

// Extents and box in elements, innermost axis first; strides in bytes, of all axes except the innermost. False: TMA
// cannot address such a tensor. By default boxes are swizzled in rows of 128 bytes.
template <class T, int rank>
inline bool make_tensor_map(CUtensorMap& map, const void* data, const std::uint64_t (&extents)[rank],
                            const std::uint64_t (&strides)[rank - 1], const std::uint32_t (&box)[rank],
                            CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
    if (!addressable<rank>(data, extents, strides, box)) return false;
    static const auto encode = find_in_driver<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
    std::uint32_t steps[rank];
    for (std::uint32_t& step : steps) step = 1;
    return encode && encode(&map, tensor_map_type<T>, rank, const_cast<void*>(data), extents, strides, box, steps,
                            CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Rows of one sequence, wherever it starts and however long it is: a map in which only the row stride is fixed. The idea
// is that of Triton's ragged tensor descriptors.
//
// The tensor ends at row `ragged_rows`, and row i of a sequence of n rows has the coordinate ragged_rows - n + i: rows
// from n on lie outside of it. The last axis takes those ragged_rows back out of the address, which is modulo 2^64,
// and two more axes add where the sequence ends, in steps of 16 bytes and of 2^34 bytes.
inline constexpr std::uint64_t ragged_rows = 1ull << 30;

// `row_bytes` is the stride of rows.
template <class T>
inline bool make_ragged_map(CUtensorMap& map, const void* data, std::int64_t row_bytes, std::int64_t width,
                            int box_columns, int box_rows) {
    constexpr std::uint64_t most = 1ull << 31, step = 1ull << 34;
    const std::uint64_t stride = static_cast<std::uint64_t>(row_bytes);
    if (stride >= step) return false;
    const std::uint64_t extents[5] = {static_cast<std::uint64_t>(width), ragged_rows, most, most, most};
    const std::uint64_t strides[4] = {stride, 16, step, step - stride};
    const std::uint32_t columns = box_columns, rows = box_rows;
    return make_tensor_map<T>(map, data, extents, strides, {columns, rows, 1, 1, 1}, swizzle_of(columns * sizeof(T)));
}

// Coordinates of a sequence in a ragged map: row i is at first_row + i.
struct RaggedRows {
    int first_row, low, high;

    // `offset` is that of the sequence's first row, in bytes, a multiple of 16; `row_bytes` is the stride of rows.
    __device__ __forceinline__ RaggedRows(std::int64_t offset, std::int64_t row_bytes, int rows)
        : RaggedRows(end(offset, row_bytes, rows) >> 4, rows) {}

    // `end` is where the sequence ends, in units of 16 bytes.
    __device__ __forceinline__ RaggedRows(std::uint64_t end, int rows)
        : first_row(static_cast<int>(ragged_rows) - rows),
          low(static_cast<int>(end & ((1 << 30) - 1))),
          high(static_cast<int>(end >> 30)) {}

    static constexpr int wrap = static_cast<int>(ragged_rows);

    // Where a sequence ends, in bytes.
    static __device__ __forceinline__ std::uint64_t end(std::int64_t offset, std::int64_t row_bytes, int rows) {
        return static_cast<std::uint64_t>(offset) + static_cast<std::uint64_t>(row_bytes) * static_cast<unsigned>(rows);
    }
};

}  // namespace catalog::cuda
