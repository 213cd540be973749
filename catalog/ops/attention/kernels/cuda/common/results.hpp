// Results on their way into memory, rounded to the type of O.
#pragma once

#include "cuda/hopper.hpp"

namespace catalog::cuda {

// Four neighbours of a row.
template <class O>
__device__ __forceinline__ void store_four(O* target, float4 x) {
    if constexpr (sizeof(O) == 4)
        *reinterpret_cast<float4*>(target) = x;
    else if constexpr (sizeof(O) == 2)
        *reinterpret_cast<uint2*>(target) = make_uint2(pack<O>(x.x, x.y), pack<O>(x.z, x.w));
    else
        *reinterpret_cast<std::uint32_t*>(target) = pack_bytes<O>(x.x, x.y, x.z, x.w);
}

// Two neighbours, to shared memory.
template <class O>
__device__ __forceinline__ void stage_two(std::uint32_t target, float first, float second) {
    if constexpr (sizeof(O) == 2)
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(target), "r"(pack<O>(first, second)) : "memory");
    else
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(target), "h"(pack_bytes<O>(first, second)) : "memory");
}

}  // namespace catalog::cuda
