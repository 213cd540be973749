// Block masks: a bitmap with a byte for each block of queries and keys of a head, 0 where nobody attends to the block.
#pragma once

#include <cstdint>

#include "cuda/ring.hpp"

namespace catalog::cuda {

// Threads that load together: one alone, a warp that looks for named entries, or up to four that have parts of pages.
template <class Row>
inline constexpr int loaders = Row::paged_kv ? 128 : Row::block_mask ? 32 : 1;

// Whether this thread acts for its warp.
template <class Row>
__device__ __forceinline__ bool acts() {
    return loaders<Row> == 1 || threadIdx.x % 32 == 0;
}

// The entries along a row or column of the bitmap that are not 0, found by a warp: each lane reads one, and a register
// holds 32. `Line` says of an entry whether it exists, and whether it is not 0; those behind one that does not exist do
// not either.
class NamedEntries {
   public:
    // The one that was found last.
    __device__ __forceinline__ int found() const { return at; }

    // The first one from `entry` on, or one that does not exist.
    template <class Line>
    __device__ __forceinline__ int next(const Line& line, int entry) {
        for (; line.exists(entry); entry = (entry | 31) + 1) {
            look_at(line, entry);
            const std::uint32_t from = bits >> entry % 32;
            if (from) return at = entry + __ffs(static_cast<int>(from)) - 1;
        }
        return entry;
    }

    // The last one up to `entry` that is not before `first`; first - 1 if there is none.
    template <class Line>
    __device__ __forceinline__ int last(const Line& line, int entry, int first) {
        for (; entry >= first; entry = (entry & ~31) - 1) {
            look_at(line, entry);
            const std::uint32_t up_to = bits << (31 - entry % 32);
            if (up_to) return max(at = entry - __clz(static_cast<int>(up_to)), first - 1);
        }
        return first - 1;
    }

   private:
    // The bits are those of the 32 entries around `at`.
    template <class Line>
    __device__ __forceinline__ void look_at(const Line& line, int entry) {
        if (entry >> 5 == at >> 5) return;
        at = entry;
        const int mine = (entry & ~31) + static_cast<int>(threadIdx.x) % 32;
        bits = __ballot_sync(all_lanes, line.exists(mine) && line.is_named(mine));
    }

    int at = -1;
    std::uint32_t bits;
};

}  // namespace catalog::cuda
