// 8 elements: what a lane reads or writes at a time. Those of 32 bits are two vectors, and a row may end with the first.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace catalog::cuda {

struct EightWords {
    uint4 half[2];
};

template <class T>
using FourBits = std::conditional_t<sizeof(T) == 1, std::uint32_t, std::conditional_t<sizeof(T) == 2, uint2, uint4>>;
template <class T>
using EightBits = std::conditional_t<sizeof(T) == 1, uint2, std::conditional_t<sizeof(T) == 2, uint4, EightWords>>;

template <class T>
union Eight {
    EightBits<T> bits;
    FourBits<T> half[2];
    T element[8];
};

// Of memory that does not change. `left`, here and below: elements of the row from the first of these on.
template <class T>
__device__ __forceinline__ EightBits<T> load_eight(const T* elements, std::int64_t left = 8) {
    if constexpr (sizeof(T) < 4) {
        return __ldg(reinterpret_cast<const EightBits<T>*>(elements));
    } else {
        EightBits<T> bits{};
        bits.half[0] = __ldg(reinterpret_cast<const uint4*>(elements));
        if (left > 4) bits.half[1] = __ldg(reinterpret_cast<const uint4*>(elements) + 1);
        return bits;
    }
}

// Of memory that may change later.
template <class T>
__device__ __forceinline__ EightBits<T> read_eight(const T* elements, std::int64_t left) {
    const auto* const bits = reinterpret_cast<const EightBits<T>*>(elements);
    if constexpr (sizeof(T) == 4)
        if (left <= 4) return {bits->half[0]};
    return *bits;
}

template <class T>
__device__ __forceinline__ void store_eight(T* elements, EightBits<T> bits, std::int64_t left) {
    auto* const target = reinterpret_cast<EightBits<T>*>(elements);
    if constexpr (sizeof(T) == 4)
        if (left <= 4) {
            target->half[0] = bits.half[0];
            return;
        }
    *target = bits;
}

}  // namespace catalog::cuda
