// Products of float32 in tensor cores: a number is the sum of two of TF32, which have 11 significant bits.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace catalog::cuda {

// The bits of float32 numbers in two parts, of which tensor cores ignore the last 13 bits: the number rounded to TF32, and
// the rest, at most 2^-11 of it, which loses at most 2^-22. An infinity has a NaN for its rest.
template <int count>
struct TwoTf32 {
    std::uint32_t high[count], low[count];

    TwoTf32() = default;

    __device__ __forceinline__ explicit TwoTf32(const std::uint32_t (&bits)[count]) {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            high[i] = bits[i] + 0x1000;
            low[i] = __float_as_uint(__uint_as_float(bits[i]) - __uint_as_float(high[i] & 0xffffe000u));
        }
    }
};

// c (16 x 8) += a (16 x 8) * b (8 x 8).
__device__ __forceinline__ void mma_tf32(float (&c)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same of float32 and `count` matrices b, without the products of two rests. Tensor cores cut off what their sums lose,
// always toward zero, so no more than these products are added there: long sums would shrink. Small products come first.
template <int count>
__device__ __forceinline__ void add_products(float (*c)[4], const TwoTf32<4>& a, const TwoTf32<2> (&b)[count]) {
    float product[count][4] = {};
#pragma unroll
    for (int n = 0; n < count; ++n) mma_tf32(product[n], a.low, b[n].high);
#pragma unroll
    for (int n = 0; n < count; ++n) mma_tf32(product[n], a.high, b[n].low);
#pragma unroll
    for (int n = 0; n < count; ++n) mma_tf32(product[n], a.high, b[n].high);
#pragma unroll
    for (int n = 0; n < count; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) c[n][i] += product[n][i];
}

}  // namespace catalog::cuda
