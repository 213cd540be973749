// Working memory of one thread in the backward kernel, laid out at compile time from the row's tiles.
#pragma once

#include <numeric>

#include "host/vector.hpp"

namespace catalog::host {

// One query row of a tile.
struct BackwardRow {
    std::int64_t head, query;
    float lse;    // in the units of `Scores`: base 2, without the shift; infinity if the row sees no key
    float delta;  // sum of dO * O
    float* dq;    // where its part of dQ is written
};

template <class Row>
struct BackwardScratch {
    static_assert(Row::warp_n0 % lanes == 0 && Row::warp_n1 % lanes == 0, "a register block is whole vectors wide");
    static_assert(Row::tile_n0 % Row::warp_n0 == 0, "a tile is whole register blocks wide");
    static_assert(Row::tile_n0 % 16 == 0, "a tile starts where the random numbers of a dropout do");
    static_assert(Row::tile_m0 > 0 && Row::warp_m0 > 0 && Row::warp_m1 > 0);

    static constexpr int tile_m0 = Row::tile_m0, tile_n0 = Row::tile_n0;
    static constexpr int depth_q = round_up(Row::hdim_q, lanes), depth_v = round_up(Row::hdim_v, lanes);
    static constexpr int columns_q = round_up(Row::hdim_q, Row::warp_n1);
    static constexpr int columns_v = round_up(Row::hdim_v, Row::warp_n1);
    static constexpr int columns_dq = round_up(Row::hdim_q, Row::warp_n0);
    // Products skip keys before the first visible one, in whole panels and whole chunks of random numbers.
    static constexpr int key_step = std::lcm(Row::warp_n0, 16);
    static constexpr int drawn_keys = Row::dropout ? tile_n0 : 0;

    // Distance of the rows of a query tile. Products read columns too, and rows a power of two apart would share few
    // sets of the L1 cache, so each row ends with a spare cache line.
    static constexpr int row_q = columns_q + 16, row_v = columns_v + 16, row_p = tile_n0 + 16;

    // A key tile, used with all query tiles. K in panels of keys for Q K^T, and in panels of columns for dS K.
    alignas(64) float k_transposed[tile_n0 * depth_q];
    alignas(64) float v_transposed[tile_n0 * depth_v];
    alignas(64) float k[tile_n0 * columns_dq];
    alignas(64) float dk[tile_n0][columns_q];
    alignas(64) float dv[tile_n0][columns_v];

    // A query tile.
    BackwardRow row[tile_m0];
    alignas(64) float q[tile_m0][row_q];
    alignas(64) float grad_o[tile_m0][row_v];
    alignas(64) float p[tile_m0][row_p];   // S, then P for dV
    alignas(64) float ds[tile_m0][row_p];  // dP, then dS
    float factors[drawn_keys + 1];         // dropout factors
};

}  // namespace catalog::host
