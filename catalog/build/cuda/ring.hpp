// What warp-specialised kernels have in common: rings of stages in shared memory, and the registers of a block's threads.
#pragma once

#include <algorithm>
#include <cstdint>

namespace catalog::cuda {

inline constexpr unsigned all_lanes = 0xffffffffu;

// A place in a ring of `stages`, and the parity of the phase in which it is filled.
template <int stages>
struct Ring {
    int stage = 0;
    std::uint32_t phase = 0;

    __device__ __forceinline__ void next() {
        if (++stage == stages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// Registers of each thread once the block has shared out anew what its threads start with; 0: they keep that.
struct RegisterBudget {
    int producer, consumer;
};

// Of a warpgroup that loads and `groups` warpgroups that compute; `blocks` run on a multiprocessor at a time.
constexpr RegisterBudget register_budget(int groups, int blocks, int producer) {
    constexpr int most = 240;
    const int warpgroups = groups + 1, at_start = 65536 / (128 * warpgroups * blocks) / 8 * 8;
    if (at_start >= most) return {0, 0};
    return {producer, std::min(most, (at_start * warpgroups - producer) / groups / 8 * 8)};
}

}  // namespace catalog::cuda
