// Functions that are computed with powers of 2.
#pragma once

#include <cmath>

#include "cuda/hopper.hpp"

namespace catalog::cuda {

inline constexpr float log2_e = 0x1.715476p+0f;

// Within a few ulp; the quotient would cancel near zero.
__device__ __forceinline__ float tanh_exact(float x) {
    const float size = fabsf(x), square = x * x;
    const float t = exp2_approximate(size * (-2.0f * log2_e));
    const float far = __fdividef(1.0f - t, 1.0f + t);
    float p = 0x1.664f48p-6f;  // Taylor: 62/2835, -17/315, 2/15, -1/3
    p = fmaf(p, square, -0x1.ba1ba2p-5f);
    p = fmaf(p, square, 0x1.111112p-3f);
    p = fmaf(p, square, -0x1.555556p-2f);
    const float near = fmaf(size * square, p, size);
    return copysignf(size < 0.25f ? near : far, x);
}

}  // namespace catalog::cuda
