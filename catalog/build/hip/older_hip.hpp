// What CK's headers need of HIP's that older ones lack; included before them.
#pragma once

#include <type_traits>

#include <hip/hip_runtime.h>

namespace ck_tile {

// Vectors of HIP 5 assign by a function of their own: they are not trivially copyable, and the builtin behind CK's
// bit_cast refuses them. Being more specialised, this one goes first.
template <class To>
__host__ __device__ inline std::enable_if_t<sizeof(To) == sizeof(uint2) && !std::is_trivially_copyable_v<uint2>, To>
bit_cast(const uint2& from) {
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}

}  // namespace ck_tile
