// Shared memory of the forward kernel for Hopper: a tile of Q, rings of blocks of K and V, and their barriers.
//
// Tensor cores take values of 8 bits only with the keys along the rows of a panel. The loaded blocks have a ring of
// their own, from which three warps transpose them into the ring that the consumers read.
#pragma once

#include "fwd_wgmma_work.hpp"
#include "cuda/hopper.hpp"
#include "cuda/wgmma.hpp"

namespace catalog::cuda {

// Offsets in bytes from a base that is aligned to 1024; barriers as addresses.
template <class Row>
struct FwdShared {
    static constexpr int element = sizeof(typename Row::dtype);
    static constexpr int groups = Row::tile_m0 / 64;  // warpgroups that compute
    static constexpr int threads = 128 * (1 + groups);
    static constexpr bool takes_turns = groups > 1 && Row::hdim_v <= 128;
    static constexpr int stages = Row::num_stages;

    static constexpr int q_group_bytes = 64 * Row::hdim_q * element;
    static constexpr int k_bytes = Row::tile_n0 * Row::hdim_q * element, v_bytes = Row::tile_n0 * Row::hdim_v * element;
    static constexpr int q = 0, k = q + groups * q_group_bytes, v = k + stages * k_bytes;
    static constexpr int loaded_v = has_bytes<Row> ? v + stages * v_bytes : v;  // before it is transposed
    static constexpr int barriers = loaded_v + stages * v_bytes;
    static constexpr int rings = has_bytes<Row> ? 3 : 2, transposing_warps = 3;
    // The block's tile, where it looks for it.
    static constexpr int tile = barriers + 8 * (2 * groups + 2 * rings * stages);
    static constexpr int bytes = tile + (Row::mode == Mode::group ? static_cast<int>(sizeof(TileIndex)) : 0);
    static constexpr int alignment = 1024;

    static_assert(Row::tile_m0 % 64 == 0 && groups <= 3 && Row::tile_n0 % 16 == 0 && Row::tile_n0 <= 256);
    static_assert(has_bytes<Row> || std::is_same_v<typename Row::dtype, typename Row::otype>);
    static_assert(!has_bytes<Row> || Row::tile_n0 % 32 == 0);
    static_assert(!has_bytes<Row> || !Row::paged_kv);
    static_assert(Row::hdim_q % 64 == 0 && Row::hdim_v % 64 == 0 && Row::hdim_v <= 256 && !is_vectorized<Row>);

    static __device__ __forceinline__ std::uint32_t barrier(std::uint32_t base, int index) {
        return base + barriers + 8 * index;
    }
    static __device__ __forceinline__ std::uint32_t q_full(std::uint32_t base, int group) {
        return barrier(base, group);
    }
    static __device__ __forceinline__ std::uint32_t q_empty(std::uint32_t base, int group) {
        return barrier(base, groups + group);
    }
    static __device__ __forceinline__ std::uint32_t k_full(std::uint32_t base, int stage) {
        return barrier(base, 2 * groups + stage);
    }
    static __device__ __forceinline__ std::uint32_t k_empty(std::uint32_t base, int stage) {
        return barrier(base, 2 * groups + stages + stage);
    }
    static __device__ __forceinline__ std::uint32_t v_full(std::uint32_t base, int stage) {
        return barrier(base, 2 * groups + 2 * stages + stage);
    }
    static __device__ __forceinline__ std::uint32_t v_empty(std::uint32_t base, int stage) {
        return barrier(base, 2 * groups + 3 * stages + stage);
    }

    // Of the values as they are loaded, which are those that are read unless they are transposed.
    static __device__ __forceinline__ std::uint32_t loaded_v_full(std::uint32_t base, int stage) {
        return has_bytes<Row> ? barrier(base, 2 * groups + 4 * stages + stage) : v_full(base, stage);
    }
    static __device__ __forceinline__ std::uint32_t loaded_v_empty(std::uint32_t base, int stage) {
        return has_bytes<Row> ? barrier(base, 2 * groups + 5 * stages + stage) : v_empty(base, stage);
    }

    static __device__ __forceinline__ TileIndex* found_tile(std::uint32_t base) {
        return static_cast<TileIndex*>(__cvta_shared_to_generic(base + tile));
    }

    // By one thread.
    static __device__ __forceinline__ void init(std::uint32_t base) {
        constexpr int warps = 4;
        for (int i = 0; i < groups; ++i) {
            barrier_init(q_full(base, i), 1);
            barrier_init(q_empty(base, i), warps);
        }
        for (int i = 0; i < stages; ++i) {
            barrier_init(k_full(base, i), 1);
            barrier_init(v_full(base, i), has_bytes<Row> ? transposing_warps : 1);
            barrier_init(k_empty(base, i), warps * groups);
            barrier_init(v_empty(base, i), warps * groups);
            if constexpr (has_bytes<Row>) {
                barrier_init(loaded_v_full(base, i), 1);
                barrier_init(loaded_v_empty(base, i), transposing_warps);
            }
        }
        barrier_init_fence();
    }
};

// The tile that this block works on in its turn `round`.
template <class Row>
__device__ __forceinline__ TileIndex tile_of(const FwdCall& call, std::uint32_t shared, int round) {
    if constexpr (Row::mode == Mode::group)
        if (call.skewed) return *FwdShared<Row>::found_tile(shared);
    return TileIndex(call, round, Work<Row>::masked);
}

}  // namespace catalog::cuda
