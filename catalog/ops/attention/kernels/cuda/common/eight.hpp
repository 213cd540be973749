// 8 elements of 16 bits: what a lane reads or writes at a time.
#pragma once

#include <cuda_runtime.h>

namespace catalog::cuda {

template <class T>
union Eight {
    uint4 bits;
    uint2 half[2];
    T element[8];
};

template <class T>
__device__ __forceinline__ uint4 load_eight(const T* elements) {
    return __ldg(reinterpret_cast<const uint4*>(elements));
}

}  // namespace catalog::cuda
