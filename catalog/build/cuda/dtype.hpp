// The element types of tensors, and how one becomes float and back (round to nearest even).
//
// Own types, not those of <cuda_fp16.h>, <cuda_bf16.h> and <cuda_fp8.h>: reading these headers would take a quarter to
// a half of a row's compile time.
#pragma once

#include <cstdint>

namespace catalog::cuda {

using int8 = std::int8_t;

struct fp16 {
    std::uint16_t bits;

    fp16() = default;
    __device__ explicit fp16(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
    __device__ explicit operator float() const {
        float x;
        asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
        return x;
    }
};

struct bf16 {
    std::uint16_t bits;

    bf16() = default;
    __device__ explicit bf16(float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
    __device__ explicit operator float() const {
        float x;
        asm("cvt.f32.bf16 %0, %1;" : "=f"(x) : "h"(bits));
        return x;
    }
};

// The first of a pair of fp16.
__device__ inline float first_as_float(std::uint32_t pair) {
    fp16 first;
    first.bits = static_cast<std::uint16_t>(pair);
    return static_cast<float>(first);
}

// E4M3, finite numbers and NaN. Tensor cores read it; other instructions only convert it, two at a time, to fp16.
struct fp8 {
    std::uint8_t bits;

    fp8() = default;
    __device__ explicit fp8(float x) {
        std::uint16_t pair;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
        bits = static_cast<std::uint8_t>(pair);
    }
    __device__ explicit operator float() const {
        std::uint32_t pair;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(std::uint16_t{bits}));
        return first_as_float(pair);
    }
};

// E5M2, with infinities.
struct bf8 {
    std::uint8_t bits;

    bf8() = default;
    __device__ explicit bf8(float x) {
        std::uint16_t pair;
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
        bits = static_cast<std::uint8_t>(pair);
    }
    __device__ explicit operator float() const {
        std::uint32_t pair;
        asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(pair) : "h"(std::uint16_t{bits}));
        return first_as_float(pair);
    }
};

}  // namespace catalog::cuda
