// Working memory of one thread in the backward kernel, laid out at compile time from the row's tiles.
#pragma once

#include <algorithm>
#include <numeric>

#include "host/threads.hpp"
#include "host/units.hpp"
#include "pipeline.hpp"

namespace catalog::host {

// One query row of a tile.
struct BackwardRow {
    std::int64_t head, query;
    float lse;    // in the units of `Scores`: base 2, without the shift; infinity if the row sees no key
    float delta;  // sum of dO * O
    float* dq;    // where its part of dQ is written
};

// What does not depend on the form of the products.
template <class Row>
struct BackwardSizes {
    static_assert(Row::warp_n0 % lanes == 0 && Row::warp_n1 % lanes == 0, "a register block is whole vectors wide");
    static_assert(Row::tile_n0 % Row::warp_n0 == 0, "a tile is whole register blocks wide");
    static_assert(Row::tile_n0 % 16 == 0, "a tile starts where the random numbers of a dropout do");
    static_assert(Row::tile_m0 > 0 && Row::warp_m0 > 0 && Row::warp_m1 > 0);

    static constexpr int tile_m0 = Row::tile_m0, tile_n0 = Row::tile_n0;
    // Products skip keys before the first visible one, in whole panels and whole chunks of random numbers.
    static constexpr int key_step = std::lcm(Row::warp_n0, 16);
    static constexpr int drawn_keys = Row::dropout ? tile_n0 : 0;
    // Distance of the rows of floats. Products read columns too, and rows a power of two apart would share few sets of
    // the L1 cache, so each row ends with a spare cache line.
    static constexpr int row_p = tile_n0 + 16;

    BackwardRow row[tile_m0];
    float factors[drawn_keys + 1];  // dropout factors
};

template <class Row, bool = multiplies_pairs<Row>>
struct BackwardScratch : BackwardSizes<Row> {
    using BackwardSizes<Row>::tile_m0, BackwardSizes<Row>::tile_n0, BackwardSizes<Row>::row_p;

    static constexpr int depth_q = round_up(Row::hdim_q, lanes), depth_v = round_up(Row::hdim_v, lanes);
    static constexpr int columns_q = round_up(Row::hdim_q, Row::warp_n1);
    static constexpr int columns_v = round_up(Row::hdim_v, Row::warp_n1);
    static constexpr int columns_dq = round_up(Row::hdim_q, Row::warp_n0);
    static constexpr int row_q = columns_q + 16, row_v = columns_v + 16;
    static constexpr int strip = tile_m0;  // query rows whose P and dS are made at a time

    // A key tile, used with all query tiles. K in panels of keys for Q K^T, and in panels of columns for dS K.
    alignas(64) float k_transposed[tile_n0 * depth_q];
    alignas(64) float v_transposed[tile_n0 * depth_v];
    alignas(64) float k[tile_n0 * columns_dq];
    alignas(64) float dk[tile_n0][columns_q];
    alignas(64) float dv[tile_n0][columns_v];

    // A query tile.
    alignas(64) float q[tile_m0][row_q];
    alignas(64) float grad_o[tile_m0][row_v];
    alignas(64) float p[tile_m0][row_p];   // S, then P for dV
    alignas(64) float ds[tile_m0][row_p];  // dP, then dS
};

#if defined(CATALOG_BRAIN_PAIRS)

// For products of pairs.
template <class Row>
struct BackwardScratch<Row, true> : BackwardSizes<Row> {
    using BackwardSizes<Row>::tile_m0, BackwardSizes<Row>::tile_n0, BackwardSizes<Row>::row_p;

    static constexpr bool in_tiles = Row::pipeline == Pipeline::host_amx;
    static constexpr int step = 2 * lanes;  // products have a depth of whole vectors of pairs
    static constexpr int strip = in_tiles ? Row::warp_m0 : 8 * Row::warp_m0;
    static_assert(tile_m0 % step == 0 && tile_m0 % strip == 0 && strip % 2 == 0 && Row::warp_n0 % step == 0);
    static_assert(!in_tiles || (Row::warp_m0 == step && Row::warp_m1 == step), "a register block is two tiles by two");
    static_assert(!in_tiles || (Row::warp_n0 == step && Row::warp_n1 == step), "a register block is two tiles by two");

    // Depths are in pairs.
    static constexpr int depth_q = round_up(Row::hdim_q, step) / 2, depth_v = round_up(Row::hdim_v, step) / 2;
    static constexpr int columns_q = round_up(Row::hdim_q, lanes), columns_v = round_up(Row::hdim_v, lanes);
    static constexpr int columns_dq = round_up(Row::hdim_q, Row::warp_n1);
    static constexpr int row_q = depth_q + 16, row_v = depth_v + 16, row_dk = tile_n0 + 16;
    static constexpr int row_along = tile_n0 / 2 + 16, row_across = tile_n0 + 16;

    // Pairs across the rows of Q and dO: for tiles, those of a column after each other.
    static constexpr int row_pairs = in_tiles ? tile_m0 / 2 + 16 : std::max(columns_q, columns_v) + 16;
    static constexpr int rows_q = in_tiles ? columns_q : tile_m0 / 2, rows_v = in_tiles ? columns_v : tile_m0 / 2;

    // A key tile. Its gradients are transposed.
    alignas(64) BrainPair k_transposed[tile_n0 * depth_q];
    alignas(64) BrainPair v_transposed[tile_n0 * depth_v];
    alignas(64) BrainPair k[tile_n0 / 2 * columns_dq];
    alignas(64) float dk[columns_q][row_dk];
    alignas(64) float dv[columns_v][row_dk];

    // A query tile.
    alignas(64) BrainPair q[tile_m0][row_q];
    alignas(64) BrainPair grad_o[tile_m0][row_v];
    alignas(64) BrainPair q_pairs[rows_q][row_pairs];
    alignas(64) BrainPair grad_o_pairs[rows_v][row_pairs];
    alignas(64) BrainPair p_across[tile_m0 / 2][row_across];
    alignas(64) BrainPair ds_across[tile_m0 / 2][row_across];
    alignas(64) BrainPair ds_along[tile_m0][row_along];
    alignas(64) float p[strip][row_p];   // S, then P
    alignas(64) float ds[strip][row_p];  // dP, then dS
};

#endif

}  // namespace catalog::host
