// What follows from a row's traits: which operand is which, and where everything lies in shared memory.
//
// A wgmma multiplies 64 rows of one operand with up to 256 columns of the other. P is the operand with the rows, Q the
// one with the columns: A and B, or B and A. Then C is computed as its transpose, so that a tile may have any multiple of
// 8 rows of C, not of 64. `p` and `q` count rows of C and columns of C, or the other way round.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "hopper.hpp"
#include "ring.hpp"
#include "wgmma.hpp"

namespace catalog::cuda {

// How many parts an extent has, of which the last may be smaller.
inline std::int64_t parts(std::int64_t extent, std::int64_t part) { return (extent + part - 1) / part; }

// Elements in 16 bytes, the unit of TMA's addresses and strides, and in a row of a panel.
template <class T>
inline constexpr int in_vector = 16 / sizeof(T);
template <class T>
inline constexpr int in_panel_row = panel_row_bytes / sizeof(T);

// The scales of A and B: none, a factor for each row of A and column of B, or for blocks.
enum class Scales { no, row, block };

template <class Row>
struct GemmShape : AwaitInit<32 * (Row::wave_n > 1 ? Row::wave_n : Row::wave_m)> {
    using T = typename Row::dtype;
    static constexpr bool swapped = Row::wave_n > 1;
    static constexpr int tile_p = swapped ? Row::tile_n : Row::tile_m, tile_q = swapped ? Row::tile_m : Row::tile_n;
    // Blocks of a cluster whose tiles lie one below the other: each loads a part of Q for all.
    static constexpr int sharers = Row::cluster_m;
    static constexpr int groups = (swapped ? Row::wave_n : Row::wave_m) / 4;  // warpgroups that compute
    static constexpr int blocks_p = tile_p / groups / 64;                     // wgmmas of one along p
    static constexpr int computing = 128 * groups, threads = 128 + computing;
    static constexpr int stages = Row::num_stages, tile_k = Row::tile_k;
    // Operands of 8 bits are multiplied along the depth alone: others are transposed before.
    static constexpr bool a_along = Row::a_along || sizeof(T) == 1, b_along = Row::b_along || sizeof(T) == 1;
    static constexpr Major major_p = (swapped ? b_along : a_along) ? Major::k : Major::mn;
    static constexpr Major major_q = (swapped ? a_along : b_along) ? Major::k : Major::mn;

    // Sums of fp8 have about 14 bits in tensor cores, so those of each 128 of the depth are added in float32; scales of
    // blocks multiply them. The idea is DeepGEMM's.
    static constexpr bool in_blocks = Row::scales == Scales::block;
    static constexpr bool promotes = std::is_same_v<T, fp8> || std::is_same_v<T, bf8> || in_blocks;
    static constexpr int promoted_depth = 128;

    // The sums of a warpgroup: units of 64 x unit_q, each of one wgmma at a time; those of tensor cores, and those in
    // which they are promoted.
    static constexpr int unit_q = swapped ? tile_q : Row::warp_tile_n, units_q = tile_q / unit_q;
    static constexpr int units = blocks_p * units_q;
    using Part = std::conditional_t<std::is_same_v<T, int8>, std::int32_t, float>;
    using Sum = std::conditional_t<promotes, float, Part>;
    using Sums = Sum[blocks_p][tile_q / 2];

    // Sums of a unit are promoted while those of the next are computed, where a stage has several and registers suffice
    // for two. Otherwise warpgroups take turns by themselves.
    static constexpr int depths = promotes ? tile_k / promoted_depth : 1, jobs = units * depths;
    static constexpr bool overlaps = promotes && jobs > 1 && units * unit_q / 2 + unit_q <= 192;

    // Operands are panels of 128 bytes in a row. Their rows are those of P or Q, a panel for each 128 bytes of the
    // depth; or the depth, a panel for each 64 of p or q.
    static constexpr int slice = 32 / sizeof(T);  // depth of a wgmma
    static constexpr int width_q = major_q == Major::k ? tile_q : (tile_q + 63) / 64 * 64;
    static constexpr int p_bytes = tile_p * tile_k * sizeof(T), q_bytes = width_q * tile_k * sizeof(T);
    static constexpr int panel_p = (major_p == Major::k ? tile_p : tile_k) * panel_row_bytes;
    static constexpr int panel_q = (major_q == Major::k ? tile_q : tile_k) * panel_row_bytes;
    static constexpr int load_q = panel_q / sharers;  // a block's rows of a panel

    // C leaves in pieces of 64 of p and 64 of q, or all of q where these are fewer. A warpgroup's piece has 16 KiB: one in
    // float32, or two of C's own type. The last one along q begins earlier, in the one before, where q is no multiple of
    // 64. Pieces of C's own type are whole, and without factors of columns of p.
    static constexpr int piece_rows = swapped ? std::min(tile_q, 64) : 64;
    static constexpr int piece_bytes = piece_rows * 64 * 4, half_piece_bytes = piece_bytes / 2;
    static constexpr int pieces_q = (tile_q + 63) / 64;
    static constexpr bool stores_pieces = tile_q >= 64 && (!swapped || Row::scales != Scales::row);
    static constexpr int pieces = blocks_p * pieces_q;  // of a warpgroup

    // Offsets in bytes from a base that is aligned to 1024.
    static constexpr int stage_bytes = p_bytes + q_bytes;
    static constexpr int out = stages * stage_bytes;
    static constexpr int barriers = out + groups * piece_bytes;
    static constexpr int bytes = barriers + 8 * 2 * stages;
    static constexpr int alignment = 1024;
    // Pieces of the whole tile, in place of the stages, once these are no longer needed.
    static constexpr bool can_split = sharers == 1 && groups * pieces * piece_bytes <= out;

    static_assert(tile_p == groups * blocks_p * 64 && tile_k % in_panel_row<T> == 0 && tile_q % 8 == 0);
    static_assert(unit_q * units_q == tile_q && unit_q <= 256);
    static_assert(tile_q % 16 == 0 || (swapped && tile_q == 8));
    static_assert(swapped || tile_q >= 64);
    static_assert(sharers == 1 || (!swapped && load_q % 1024 == 0));
    static_assert(stage_bytes % 1024 == 0 && p_bytes % 1024 == 0 && bytes + alignment <= 232448);

    // Where a piece begins along q.
    static constexpr int piece_q(int piece) { return std::max(0, std::min(64 * (piece % pieces_q), tile_q - 64)); }

    static __device__ __forceinline__ std::uint32_t full(std::uint32_t base, int stage) {
        return base + barriers + 8 * stage;
    }
    static __device__ __forceinline__ std::uint32_t empty(std::uint32_t base, int stage) {
        return base + barriers + 8 * (stages + stage);
    }

    // By one thread of a warp.
    static __device__ __forceinline__ void init(std::uint32_t base) {
        for (int i = 0; i < stages; ++i) {
            barrier_init(full(base, i), 1);
            barrier_init(empty(base, i), 4 * groups * sharers);
        }
        barrier_init_fence();
    }
};

// Stages of a row where it computes groups of the depth, whose rows in shared memory are those of the depth: as many as
// fit.
template <class Row>
inline constexpr int stages_of_groups = [] {
    using Shape = GemmShape<Row>;
    const int width = Shape::tile_p + (Shape::tile_q + 63) / 64 * 64;
    const int stage = width * Shape::tile_k * static_cast<int>(sizeof(typename Row::dtype));
    return std::min(Row::num_stages, (232448 - Shape::alignment - 512 - Shape::groups * Shape::piece_bytes) / stage);
}();

}  // namespace catalog::cuda
