// What warp-specialised kernels have in common: rings of stages in shared memory, and the registers of a block's threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "hopper.hpp"

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

// How the warps of a block wait until one of them has initialised the barriers in shared memory: that warp says so, and the
// warp that loads and the `computing` threads that compute wait where they go on. These are two barriers:
// compute-sanitizer wants all threads to wait for one in the same place.
template <int computing>
struct AwaitInit {
    static __device__ __forceinline__ void announce_init() {
        named_barrier_arrive(9, computing + 32);
        named_barrier_arrive(10, 64);
    }
    static __device__ __forceinline__ void await_init() { named_barrier_sync(9, computing + 32); }
    static __device__ __forceinline__ void await_init_to_load() { named_barrier_sync(10, 64); }
};

}  // namespace catalog::cuda
