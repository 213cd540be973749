// A launch runs the kernel at once.
#pragma once

#include "ck_tile/core.hpp"

namespace ck_tile {
inline void hip_check_error(hipError_t error) {
    if (error != hipSuccess) throw std::runtime_error("hip error");
}
inline index_t get_available_compute_units(const stream_config&) { return 1; }

#ifdef LIKE_2025_11
template <int blocks_per_cu, class Kernel, class... Arguments>
#else
template <int threads, int blocks_per_cu, class Kernel, class... Arguments>
#endif
void kentry(Arguments... arguments) {
    Kernel{}(arguments...);
}

#ifdef LIKE_2025_11
template <int blocks_per_cu, class Kernel, class Arguments>
#else
template <int threads, int blocks_per_cu, class Kernel, class Arguments>
#endif
auto make_kernel(Kernel kernel, dim3, dim3, std::size_t, Arguments arguments) {
    return [=](const stream_config&) { kernel(arguments); };
}
}  // namespace ck_tile
