// Block masks: a bitmap with a byte for each block of queries and keys of a head, 0 where nobody attends to the block.
#pragma once

#include <cstdint>

#include "cuda/ring.hpp"

namespace catalog::cuda {

// The entries along a row or column of the bitmap that are not 0, found by a warp. `Named` says it of one entry; entries
// from `end` on are never looked at. Each lane reads one, and a register holds 32.
template <class Named>
class NamedEntries {
   public:
    __device__ __forceinline__ NamedEntries(const Named& named, int end) : named(named), end(end), at(-1) {}

    // The one that was found last.
    __device__ __forceinline__ int found() const { return at; }

    // The first one from `entry` on; `end` if there is none.
    __device__ __forceinline__ int next(int entry) {
        for (; entry < end; entry = (entry | 31) + 1) {
            look_at(entry);
            const std::uint32_t from = bits >> entry % 32;
            if (from) return at = entry + __ffs(static_cast<int>(from)) - 1;
        }
        return end;
    }

    // The last one up to `entry` that is not before `first`; first - 1 if there is none.
    __device__ __forceinline__ int last(int entry, int first) {
        for (; entry >= first; entry = (entry & ~31) - 1) {
            look_at(entry);
            const std::uint32_t up_to = bits << (31 - entry % 32);
            if (up_to) return max(at = entry - __clz(static_cast<int>(up_to)), first - 1);
        }
        return first - 1;
    }

   private:
    // The bits are those of the 32 entries around `at`.
    __device__ __forceinline__ void look_at(int entry) {
        if (entry >> 5 == at >> 5) return;
        at = entry;
        const int mine = (entry & ~31) + static_cast<int>(threadIdx.x) % 32;
        bits = __ballot_sync(all_lanes, mine < end && named(mine));
    }

    const Named named;
    const int end;
    int at;
    std::uint32_t bits;
};

}  // namespace catalog::cuda
