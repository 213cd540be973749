// Three warps of the forward kernel that turn blocks of 8-bit values from (keys, columns) into (columns, keys).
//
// What they write is a panel of 32-byte rows for every 32 keys. Keys and columns are in the order in which nothing needs
// to move between lanes. A thread of the consumers has the weights of the keys 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t of every
// 16, where t = lane % 4: of every 16 keys these lie side by side, as A's registers want them. Of every 16 columns the
// even ones come first, as pairs of bytes leave the load that transposes. FlashAttention-3 transposes values so, too.
#pragma once

#include "fwd_wgmma_shared.hpp"

namespace catalog::cuda {

template <class Row>
class FwdTransposer {
    using Shared = FwdShared<Row>;

    static constexpr int keys = Row::tile_n0, panel = Row::hdim_v * 32;
    static constexpr int row_bytes = loaded_row_bytes<Row, Row::hdim_v>, loaded_panel = keys * row_bytes;

   public:
    __device__ __forceinline__ FwdTransposer(const FwdCall& call, std::uint32_t shared)
        : call(call), shared(shared), warp(static_cast<int>(threadIdx.x) / 32 - 1), lane(threadIdx.x % 32) {}

    __device__ __forceinline__ void run() {
        for (int round = 0; round < call.rounds; ++round) {
            const TileIndex tile = tile_of<Row>(call, shared, round);
            if (!tile.exists()) continue;
            const Work<Row> work(call, tile);
            if (!work.has_queries() || !work.has_keys()) continue;
            for (int left = work.visited_blocks(); left > 0; --left) transpose_block();
        }
    }

   private:
    __device__ __forceinline__ void transpose_block() {
        const std::uint32_t source = shared + Shared::loaded_v + ring.stage * Shared::v_bytes;
        const std::uint32_t target = shared + Shared::v + ring.stage * Shared::v_bytes;
        barrier_wait(Shared::loaded_v_full(shared, ring.stage), ring.phase);
        barrier_wait(Shared::v_empty(shared, ring.stage), ring.phase ^ 1);
        for (int row = warp; row < keys / 32; row += Shared::transposing_warps)
            transpose_row(source + row * 32 * row_bytes, target + row * panel);
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) {
            barrier_arrive(Shared::v_full(shared, ring.stage));
            barrier_arrive(Shared::loaded_v_empty(shared, ring.stage));
        }
        ring.next();
    }

    // 32 keys, 16 columns at a time, and several of these side by side.
    __device__ __forceinline__ void transpose_row(std::uint32_t source, std::uint32_t target) const {
        constexpr int in_panel = row_bytes / 16, squares = 2;
        const std::uint32_t first = source + swizzled<row_bytes>(lane, 0);
        const std::uint32_t to = target + swizzled<32>(lane % 16, lane / 16 * 16);
#pragma unroll 1
        for (int column = 0; column < Row::hdim_v / 16; column += squares) {
            std::uint32_t r[squares][4];
            const std::uint32_t from = first + column / in_panel * loaded_panel;
#pragma unroll
            for (int i = 0; i < squares; ++i)
                load_matrices_transposed(from ^ static_cast<std::uint32_t>((column + i) % in_panel * 16), r[i]);
            // The bytes of a register: two columns of one key, then of the next.
#pragma unroll
            for (int i = 0; i < squares; ++i)
                store_matrices(to + (column + i) * 512, __byte_perm(r[i][0], r[i][1], 0x6420),
                               __byte_perm(r[i][0], r[i][1], 0x7531), __byte_perm(r[i][2], r[i][3], 0x6420),
                               __byte_perm(r[i][2], r[i][3], 0x7531));
        }
    }

    const FwdCall& call;
    const std::uint32_t shared;
    const int warp, lane;
    Ring<Row::num_stages> ring;
};

}  // namespace catalog::cuda
