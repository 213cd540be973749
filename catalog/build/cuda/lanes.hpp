// Numbers that lanes of a warp give each other.
#pragma once

#include <cuda_runtime.h>

namespace catalog::cuda {

// Keeps one of two numbers, and gives the other to the lane `distance` away for the one that it does not keep.
template <class T>
__device__ __forceinline__ void trade(T& first, T& second, bool keeps_second, int distance) {
    const T other = __shfl_xor_sync(0xffffffffu, keeps_second ? first : second, distance);
    first = keeps_second ? other : first;
    second = keeps_second ? second : other;
}

}  // namespace catalog::cuda
