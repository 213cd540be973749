// The part of HIP that a launch uses, over the memory of the CPU: for tests without a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#define __host__
#define __device__

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
struct uint2 {
    unsigned x, y;
};

enum hipError_t { hipSuccess = 0, hipErrorInvalidValue = 1 };
enum hipMemcpyKind { hipMemcpyHostToDevice, hipMemcpyDeviceToHost, hipMemcpyDeviceToDevice };
using hipStream_t = struct Stream*;

inline hipError_t hipMemcpyAsync(void* to, const void* from, std::size_t bytes, hipMemcpyKind, hipStream_t) {
    std::memcpy(to, from, bytes);
    return hipSuccess;
}

inline hipError_t hipMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                                   std::size_t width, std::size_t height, hipMemcpyKind, hipStream_t) {
    for (std::size_t row = 0; row < height; ++row)
        std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
    return hipSuccess;
}

inline hipError_t hipMemsetAsync(void* to, int value, std::size_t bytes, hipStream_t) {
    std::memset(to, value, bytes);
    return hipSuccess;
}

inline hipError_t hipMemset2DAsync(void* to, std::size_t pitch, int value, std::size_t width, std::size_t height,
                                   hipStream_t) {
    for (std::size_t row = 0; row < height; ++row) std::memset(static_cast<char*>(to) + row * pitch, value, width);
    return hipSuccess;
}

template <class Kernel>
hipError_t hipOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, std::size_t) {
    *blocks = 1;
    return hipSuccess;
}

#define hipLaunchKernelGGL(kernel, grid, block, bytes, stream, ...) kernel(__VA_ARGS__)

inline hipError_t hipStreamSynchronize(hipStream_t) { return hipSuccess; }
inline hipError_t hipGetLastError() { return hipSuccess; }
