// A launch runs the kernel at once.
#pragma once

#include "ck_tile/core.hpp"

namespace ck_tile {
#ifdef LIKE_2025_11
template <int blocks_per_cu, class Kernel, class Arguments>
#else
template <int threads, int blocks_per_cu, class Kernel, class Arguments>
#endif
auto make_kernel(Kernel kernel, dim3, dim3, std::size_t, Arguments arguments) {
    return [=](const stream_config&) { kernel(arguments); };
}
}  // namespace ck_tile
