// The element types of tensors.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace catalog::cuda {

using fp16 = __half;
using bf16 = __nv_bfloat16;
using int8 = std::int8_t;

// E4M3, finite numbers and NaN. Tensor cores read it; other instructions only convert it.
struct fp8 {
    std::uint8_t bits;
};

// E5M2, with infinities.
struct bf8 {
    std::uint8_t bits;
};

}  // namespace catalog::cuda
