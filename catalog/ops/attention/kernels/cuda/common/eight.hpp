// 8 elements of 16 or 8 bits: what a lane reads or writes at a time.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace catalog::cuda {

template <class T>
using FourBits = std::conditional_t<sizeof(T) == 1, std::uint32_t, uint2>;
template <class T>
using EightBits = std::conditional_t<sizeof(T) == 1, uint2, uint4>;

template <class T>
union Eight {
    EightBits<T> bits;
    FourBits<T> half[2];
    T element[8];
};

template <class T>
__device__ __forceinline__ EightBits<T> load_eight(const T* elements) {
    return __ldg(reinterpret_cast<const EightBits<T>*>(elements));
}

}  // namespace catalog::cuda
