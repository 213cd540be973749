// Working memory of one thread, laid out at compile time from the row's tiles and reused by every call.
#pragma once

#include <algorithm>

#include "kv.hpp"
#include "host/pack.hpp"
#include "host/threads.hpp"
#include "softmax.hpp"

namespace catalog::host {

// One query row of a work item.
struct ItemRow {
    std::int64_t head, query;
    float scale;  // of its scores, where Q is not multiplied by it
    RowState state;
};

template <class Row>
struct Scratch {
    static_assert(Row::warp_n0 % lanes == 0 && Row::warp_n1 % lanes == 0, "a register block is whole vectors wide");
    static_assert(Row::tile_n0 % Row::warp_n0 == 0, "a tile is whole register blocks wide");
    static_assert(Row::tile_n0 % 16 == 0, "a tile starts where the random numbers of a dropout do");
    static_assert(Row::tile_m0 > 0 && Row::warp_m0 > 0 && Row::warp_m1 > 0);

    using Unit = UnitOf<Row>;
    static constexpr int factors = Units<Unit>::depth;

    static constexpr int whole = multiplies_pairs<Row> ? pairs_deep : lanes;
    static constexpr int depth = round_up(Row::hdim_q, whole);
    static constexpr int columns = round_up(Row::hdim_v, Row::warp_n1);
    static constexpr int step = Row::dropout ? std::max(whole, 16) : whole;
    static_assert(Row::tile_n0 % step == 0, "a tile is whole steps wide");

    // A packed K/V tile serves all query rows of a work item: as many as keep Q and O within half of a 512 KiB L2.
    static constexpr int row_bytes = (depth / factors + columns) * static_cast<int>(sizeof(float));
    static constexpr int item_tiles = std::max(1, (256 << 10) / (row_bytes * Row::tile_m0));
    static constexpr int item_rows = item_tiles * Row::tile_m0;

    static constexpr int scaled_keys = has_key_scales<Row> ? Row::tile_n0 : 0;

    // The columns computed when `seen` are needed: whole vectors of units, and whole chunks of random numbers.
    static constexpr Columns whole_vectors(Columns seen) {
        const int begin = seen.begin / step * step;
        return {begin, seen.begin == seen.end ? begin : round_up(seen.end, step)};
    }

    // Distance of rows. With a power of two they would share few sets of the L1 cache.
    static constexpr int row_q = depth / factors + 16, row_o = columns + 16, row_s = Row::tile_n0 + 16;
    // Copies of keys or values of 8 bits: a whole tile as bf16, or few rows as float32.
    static constexpr int copied_rows = !has_bytes<Row> ? 0 : multiplies_pairs<Row> ? Row::tile_n0 : 32;
    static constexpr int row_copy = round_up(std::max(depth, columns), 2 * pairs_deep);
    static constexpr int copy_bytes = multiplies_pairs<Row> ? sizeof(bf16) : sizeof(float);

    static constexpr int row_p = Row::tile_n0 / factors + 16, row_few = depth + 16;

    alignas(64) Unit q[item_rows][row_q];
    alignas(64) float o[item_rows][row_o];
    alignas(64) Unit k[Row::tile_n0 * (depth / factors)];
    alignas(64) Unit v[Row::tile_n0 / factors * columns];
    alignas(64) float s[Row::tile_m0][row_s];
    alignas(64) Unit p[multiplies_pairs<Row> ? Row::tile_m0 : 1][row_p];  // float32 weights replace their scores
    alignas(64) Unit shared_q[multiplies_pairs<Row> ? lanes * (depth / factors) : 1];  // of rows that share vectors
    alignas(64) unsigned char copies[copied_rows * row_copy * copy_bytes + 1];
    alignas(64) float few_q[multiplies_pairs<Row> ? lanes : 1][row_few];  // float32 queries of DirectTile
    ItemRow row[item_rows];
    Columns seen[Row::tile_m0];
    float rescale[Row::tile_m0];
    KvRoom<Row> room[2];  // for the current and the next tile
    float k_scales[scaled_keys + 1];
    float v_scales[scaled_keys + 1];

    // O = rescale * O, of some rows.
    void rescale_sums(std::int64_t first_row, int rows, int hdim_v) {
        for (int row = 0; row < rows; ++row) {
            const float factor = rescale[row];
            if (factor == 1) continue;  // most tiles leave the maximum as it was
            float* const of_row = o[first_row + row];
            for (int d = 0; d < hdim_v; d += lanes) store(of_row + d, load(of_row + d) * factor);
        }
    }
};

}  // namespace catalog::host
