// The element types of tensors.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace catalog::cuda {

using fp16 = __half;
using bf16 = __nv_bfloat16;

}  // namespace catalog::cuda
