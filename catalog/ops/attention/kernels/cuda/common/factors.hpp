// Factors of quantised tensors.
#pragma once

#include <cuda_runtime.h>

namespace catalog::cuda {

// What Q K^T is multiplied with, of a softmax's `scale` and the factors of Q and K: above zero, lest an unseen key's
// -infinity become a NaN. A NaN for negative ones, which would make the smallest product the largest score.
__device__ __forceinline__ float scale_with(float scale, float factors) {
    return factors >= 0.0f ? fmaxf(scale * factors, 1e-30f) : __int_as_float(0x7fffffff);
}

}  // namespace catalog::cuda
