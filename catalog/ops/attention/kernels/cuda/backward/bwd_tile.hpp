// The main stage of backward: how a block divides its tile, and what lies where in shared memory.
//
// A block owns tile_n0 keys of one head and visits tile_m0 queries at a time, of all query heads that read the head.
// Two warpgroups multiply, one more loads.
#pragma once

#include "bwd_call.hpp"
#include "cuda/common/exponentials.hpp"
#include "cuda/hopper.hpp"
#include "cuda/tensor_map.hpp"
#include "cuda/wgmma.hpp"

namespace catalog::cuda {

inline constexpr int visit_bytes = 8;  // of a Visit

constexpr int round_up(int length, int step) { return (length + step - 1) / step * step; }

// Of elements of 16 bits; see bwd_tile_mma.hpp for those of 32.
template <class Row, bool wide = sizeof(typename Row::dtype) == 4>
struct BackwardTile {
    using T = typename Row::dtype;

    static constexpr int m = Row::tile_m0, n = Row::tile_n0;

    // Blocks of a cluster, which divide the columns of head dims that are too wide for one: see bwd_slices.hpp.
    static constexpr int slices = Row::hdim_q > 256 || Row::hdim_v > 256 ? 2 : 1;

    // Two warpgroups of consumers divide the keys, 64 to each; wide heads they divide by the head dim.
    static constexpr bool divides_hdim = Row::hdim_q > 128 || Row::hdim_v > 128;
    static constexpr int warpgroups = 2;
    static constexpr int hdim_step = divides_hdim ? 2 * panel_columns : panel_columns;
    static constexpr int hdim_q = round_up(Row::hdim_q / slices, hdim_step);
    static constexpr int hdim_v = round_up(Row::hdim_v / slices, hdim_step);
    static constexpr int stages = Row::num_stages, grad_o_stages = divides_hdim ? 1 : stages;
    static constexpr int consumers = warpgroups * 128, threads = consumers + 128;

    // The warpgroups divide the queries of dQ, or else its head dim, for which narrow heads transpose it. A tile is staged
    // in `dq_rounds` rounds.
    static constexpr bool divides_queries = m % (64 * warpgroups) == 0;
    static constexpr int dq_rows = divides_queries ? 64 : m;  // of a warpgroup
    static constexpr int dq_columns = divides_hdim ? hdim_q / warpgroups : divides_queries ? hdim_q : m;
    static constexpr int dq_rounds = divides_hdim ? 2 : 1;
    static constexpr int dq_panels = hdim_q / 32 / dq_rounds / (divides_queries ? 1 : warpgroups);  // at a time

    // dV takes the weights as soon as they are there, where registers allow to hold them once more.
    static constexpr bool early_dv = (hdim_q + hdim_v) / 2 + m + m / 4 <= 212;

    // Whether a block takes one work after the other, so that it loads the next one's first tiles, and stores the last
    // one's gradients, beside products. Wider heads are 3 to 6 % slower for it; a bias or dropout needs the registers; and
    // sequences of different lengths are left to the hardware, which starts a block wherever one ended.
    static constexpr bool plain = Row::bias != Bias::bias && !Row::dropout;
    static constexpr bool persistent =
        Row::mode == Mode::batch && !Row::block_mask && plain && hdim_q == 64 && hdim_v == 64;
    static constexpr int work_slots = persistent ? 4 : 1;

    // Whether blocks of different keys start at different tiles, so that they do not all add to the same dQ.
    static constexpr bool rotates = persistent && !Row::deterministic;

    // Whether the sections take turns in which keys come first, see bwd_work.hpp. Wide heads are 5 to 9 % slower for it.
    static constexpr bool alternates =
        Row::deterministic && Row::mask == Mask::causal && !Row::block_mask && !divides_hdim;

    // Whether blocks differ in their number of tiles, and the hardware starts them: they come to the next section's heads at
    // different times.
    static constexpr bool uneven = Row::mask != Mask::none && !persistent;

    // Whether a block passes its turn at a tile on when its additions to the next one are on their way, by which time those to
    // the tile have arrived. A block that waits for that at once adds late: with head dim 128 it takes 2 to 3 % longer. Other
    // blocks have to follow each other more closely, and are up to 13 % slower with turns that are passed on late.
    static constexpr bool passes_late = alternates && !persistent && hdim_q + hdim_v > 128;

    // Whether items clear dQ of other sections. Even blocks that take turns to add to dQ are 2 to 20 % slower for it, those of
    // head dim 128 4 % faster.
    static constexpr bool slowed = Row::deterministic && !uneven && (persistent || divides_hdim);
    static constexpr bool clears_ahead = Row::mode == Mode::batch && !Row::block_mask && slices == 1 && !slowed;

    // With 232 registers, ptxas lets products of head dim 128 wait for each other; with 240, some rows that look for tiles in
    // a bitmap spill.
    static constexpr bool spills_with_240 =
        Row::block_mask && (Row::logits || (Row::bias == Bias::bias && Row::mask == Mask::generic));
    static constexpr int consumer_registers = spills_with_240 ? 232 : 240, loader_registers = spills_with_240 ? 40 : 24;
    static_assert(consumers * consumer_registers + 128 * loader_registers <= threads * (65536 / threads / 8 * 8),
                  "what warpgroups claim must have been released, or they wait forever");

    // Where the next tile's scores are started early its Q must be there, and registers for them. Otherwise each visit
    // multiplies dQ of the tile before, so that no warpgroup waits for the other's dS.
    static constexpr bool lags = m > 64 || stages == 1;

    // dK and dQ contain the factor of the scores if dS does; halves have too small an exponent for that, and dbias is
    // dS without it.
    static constexpr bool scales_ds = std::is_same_v<T, bf16> && !Row::dbias;

    static_assert(m % 16 == 0 && m <= 256 && stages >= 1);
    static_assert(divides_hdim ? m == 64 && n == 64 && stages > 1 : n == 64 * warpgroups);
    static_assert(divides_hdim || divides_queries || hdim_q == 64 * warpgroups);
    static_assert(slices == 1 || !Row::block_mask);

    // Panels of 64 columns (32 of float32), each a whole number of rows of 128 bytes.
    static constexpr int query_panel = m * panel_row_bytes, key_panel = n * panel_row_bytes;
    static constexpr int q_bytes = hdim_q / 64 * query_panel, grad_o_bytes = hdim_v / 64 * query_panel;
    static constexpr int k_bytes = hdim_q / 64 * key_panel, v_bytes = hdim_v / 64 * key_panel;
    static constexpr int ds_bytes = divides_hdim ? 2 * key_panel : warpgroups * query_panel;  // P too, if divides_hdim
    static constexpr int ds_buffers = slices > 1 ? 1 : 2;
    static constexpr int dq_bytes = hdim_q / 32 * query_panel / dq_rounds;
    static constexpr int row_bytes = m * 4;  // a number for each query
    static constexpr int exchange_bytes = slices > 1 ? m / warpgroups * n * 4 : 0;  // of a warpgroup

    static constexpr int k_at = 0, v_at = k_at + k_bytes, q_at = v_at + v_bytes, grad_o_at = q_at + stages * q_bytes;
    static constexpr int ds_at = grad_o_at + grad_o_stages * grad_o_bytes, dq_at = ds_at + ds_buffers * ds_bytes;

    // Where blocks take turns, dQ of narrow heads is staged twice if there is room: a turn may be long in coming.
    static constexpr int most_shared_bytes = 232448, ring_barriers_bytes = (24 + 4 * stages) * 8;
    static constexpr int barriers_bytes = ring_barriers_bytes + (slices > 1 ? warpgroups * 16 : 0);
    // Of WorkInMemory.
    static constexpr int work_bytes = clears_ahead || alternates ? 88 : persistent || Row::block_mask ? 80 : 72;
    static constexpr int loader_bytes = persistent ? 24 : 0;  // what loaders keep there: counts, and rows of Q and dO
    static constexpr int visits_bytes = Row::block_mask ? stages * visit_bytes : 0;
    static constexpr int rest_bytes =
        warpgroups * exchange_bytes + 2 * stages * row_bytes + barriers_bytes + work_slots * work_bytes +
        loader_bytes + visits_bytes;
    static constexpr bool fits_twice = dq_at + 2 * dq_bytes + rest_bytes <= most_shared_bytes;
    static constexpr int dq_stages = Row::deterministic && !divides_hdim && fits_twice ? 2 : 1;

    static constexpr int exchange_at = dq_at + dq_stages * dq_bytes;
    static constexpr int lse_at = exchange_at + warpgroups * exchange_bytes, delta_at = lse_at + stages * row_bytes;
    static constexpr int barriers_at = delta_at + stages * row_bytes, work_at = barriers_at + barriers_bytes;
    static constexpr int exchange_barriers_at = barriers_at + ring_barriers_bytes;
    static constexpr int query_rows_at = work_at + work_slots * work_bytes, counts_at = query_rows_at + 16;
    static constexpr int visits_at = query_rows_at + loader_bytes, shared_bytes = visits_at + visits_bytes;
    static_assert(shared_bytes <= most_shared_bytes, "a block has 227 KiB of shared memory");

    // The Visit whose tile is in a stage.
    static __device__ __forceinline__ std::uint32_t visit_at(std::uint32_t base, int stage) {
        return base + visits_at + stage * visit_bytes;
    }
};

// Barriers: who reads waits for full, who writes for empty.
template <class Row>
struct BackwardBarriers {
    std::uint32_t first;

    __device__ __forceinline__ std::uint32_t k() const { return first; }
    __device__ __forceinline__ std::uint32_t v() const { return first + 8; }
    __device__ __forceinline__ std::uint32_t full_dq(int warpgroup, int stage) const {
        return first + 16 + stage * 32 + warpgroup * 16;
    }
    __device__ __forceinline__ std::uint32_t empty_dq(int warpgroup, int stage) const {
        return full_dq(warpgroup, stage) + 8;
    }
    __device__ __forceinline__ std::uint32_t full_ds(int buffer) const { return first + 80 + buffer * 16; }
    __device__ __forceinline__ std::uint32_t empty_ds(int buffer) const { return full_ds(buffer) + 8; }
    __device__ __forceinline__ std::uint32_t empty_keys() const { return first + 112; }  // K and V
    __device__ __forceinline__ std::uint32_t full_work(int slot) const { return first + 128 + slot * 16; }
    __device__ __forceinline__ std::uint32_t empty_work(int slot) const { return full_work(slot) + 8; }
    __device__ __forceinline__ std::uint32_t full_q(int stage) const { return first + 192 + stage * 32; }
    __device__ __forceinline__ std::uint32_t full_grad_o(int stage) const { return full_q(stage) + 8; }
    __device__ __forceinline__ std::uint32_t empty_q(int stage) const { return full_q(stage) + 16; }
    __device__ __forceinline__ std::uint32_t empty_grad_o(int stage) const { return full_q(stage) + 24; }

    __device__ __forceinline__ void init() const {
        constexpr int consumer_warps = 4 * BackwardTile<Row>::warpgroups;
        barrier_init(k(), 1);
        barrier_init(v(), 1);
        barrier_init(empty_keys(), consumer_warps);
        for (int slot = 0; slot < BackwardTile<Row>::work_slots; ++slot) {
            barrier_init(full_work(slot), 1);
            // Every thread that reads it: nothing rests on the order within a warp.
            barrier_init(empty_work(slot), BackwardTile<Row>::consumers + 2 * 32 + 2);
        }
        for (int buffer = 0; buffer < 2; ++buffer) {
            for (int warpgroup = 0; warpgroup < BackwardTile<Row>::warpgroups; ++warpgroup) {
                barrier_init(full_dq(warpgroup, buffer), 4);  // its warps
                barrier_init(empty_dq(warpgroup, buffer), 1);
            }
            barrier_init(full_ds(buffer), consumer_warps);
            barrier_init(empty_ds(buffer), consumer_warps);
        }
        for (int stage = 0; stage < BackwardTile<Row>::stages; ++stage) {
            barrier_init(full_q(stage), 1 + 32);  // the copy, and a warp that stores LSE or delta
            barrier_init(full_grad_o(stage), 1 + 32);
            // Every thread that reads LSE and delta, too.
            barrier_init(empty_q(stage), BackwardTile<Row>::consumers);
            barrier_init(empty_grad_o(stage), BackwardTile<Row>::consumers);
        }
        barrier_init_fence();
    }
};

// Stages of a ring, in turn; `phase` is the parity of the barriers of this round.
template <int stages>
struct RingPlace {
    int stage = 0;
    std::uint32_t phase = 0;

    __device__ __forceinline__ RingPlace next() const {
        return stage + 1 < stages ? RingPlace{stage + 1, phase} : RingPlace{0, phase ^ 1u};
    }
};

// The same in one register, of which those who load have few.
template <int stages>
struct RingCount {
    static_assert(stages == 1 || stages == 2 || stages == 4, "stages and phases are bits of the count");

    unsigned count = 0;

    __device__ __forceinline__ int stage() const { return static_cast<int>(count % stages); }
    __device__ __forceinline__ std::uint32_t phase() const { return count / stages % 2; }
    __device__ __forceinline__ RingCount next() const { return {count + 1}; }
};

__device__ __forceinline__ float2 load_pair(std::uint32_t address) {
    float2 pair;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(address) : "memory");
    return pair;
}

__device__ __forceinline__ void store_number(std::uint32_t address, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

__device__ __forceinline__ float slope_of(const catalog_args& args, int sequence, int head) {
    const catalog_tensor& slopes = args.alibi_slopes;
    return static_cast<const float*>(slopes.data)[sequence * slopes.stride_batch + head * slopes.stride_nhead];
}

}  // namespace catalog::cuda
