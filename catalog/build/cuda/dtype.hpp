// The element types of tensors.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace catalog::cuda {

using fp16 = __half;
using bf16 = __nv_bfloat16;
using int8 = std::int8_t;

// E4M3, finite numbers and NaN. Tensor cores read it; other instructions only convert it.
struct fp8 {
    std::uint8_t bits;

    fp8() = default;
    __device__ explicit fp8(float x) : bits(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3)) {}
    __device__ explicit operator float() const { return __half2float(__nv_cvt_fp8_to_halfraw(bits, __NV_E4M3)); }
};

// E5M2, with infinities.
struct bf8 {
    std::uint8_t bits;

    bf8() = default;
    __device__ explicit bf8(float x) : bits(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2)) {}
    __device__ explicit operator float() const { return __half2float(__nv_cvt_fp8_to_halfraw(bits, __NV_E5M2)); }
};

}  // namespace catalog::cuda
