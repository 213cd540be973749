// The main stage of backward for head dims over 256: the two blocks of a cluster own the same keys, and a half of the
// columns each, of Q, K, V and dO, and so of dQ, dK and dV. What each has of the scores and of dP are sums over its
// half of the head dim: the blocks exchange them through each other's shared memory.
#pragma once

#include "bwd_tile.hpp"
#include "cuda/cluster.hpp"

namespace catalog::cuda {

// The block's number in its cluster: that of its columns.
template <class Row>
__device__ __forceinline__ int slice_of() {
    return BackwardTile<Row>::slices > 1 ? static_cast<int>(cluster_rank()) : 0;
}

// Of a warpgroup, with the same one of the other block. Sums of scores and of dP take turns at its place in memory, so
// that all their phases have the parity of their turn.
template <class Row>
class SliceExchange {
    using Tile = BackwardTile<Row>;

   public:
    static constexpr int scores = 0, grad_weights = 1;  // turns

    // By one thread, before the cluster comes together.
    static __device__ __forceinline__ void init(std::uint32_t base) {
        for (int warpgroup = 0; warpgroup < Tile::warpgroups; ++warpgroup) {
            const SliceExchange exchange(base, warpgroup);
            barrier_init(exchange.full, 1);
            barrier_init(exchange.empty, 4);  // the other block's warps
            barrier_arrive_expect(exchange.full, Tile::exchange_bytes);
        }
    }

    __device__ __forceinline__ SliceExchange(std::uint32_t base, int warpgroup)
        : full(base + Tile::exchange_barriers_at + warpgroup * 16),
          empty(full + 8),
          place(base + Tile::exchange_at + warpgroup * Tile::exchange_bytes + threadIdx.x % 128 * 16) {}

    template <int turn, int count>
    __device__ __forceinline__ void send(const float (&sums)[count]) const {
        static_assert(count * 128 * sizeof(float) == Tile::exchange_bytes);
        const std::uint32_t other = cluster_rank() ^ 1;
        const std::uint32_t there = shared_address_of(place, other), full_there = shared_address_of(full, other);
        barrier_wait(empty, turn ^ 1);
#pragma unroll
        for (int i = 0; i < count; i += 4)
            store_remote(there + i * step, full_there, sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
    }

    // Sums become those over the whole head dim: the same bits in both blocks.
    template <int turn, int count>
    __device__ __forceinline__ void add(float (&sums)[count]) const {
        barrier_wait(full, turn);
#pragma unroll
        for (int i = 0; i < count; i += 4) {
            const float4 others = load_shared(place + i * step);
            sums[i] += others.x;
            sums[i + 1] += others.y;
            sums[i + 2] += others.z;
            sums[i + 3] += others.w;
        }
        pin(sums);
        __syncwarp();
        if (threadIdx.x % 128 == 0) barrier_arrive_expect(full, Tile::exchange_bytes);  // for the next turn
        if (threadIdx.x % 32 == 0) barrier_arrive_remote(shared_address_of(empty, cluster_rank() ^ 1));
    }

   private:
    static constexpr int step = 128 * sizeof(float);  // bytes of one of every thread's sums

    const std::uint32_t full, empty, place;
};

}  // namespace catalog::cuda
