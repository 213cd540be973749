// Register blocks of packed panels, in vectors or in AMX tiles: how A lies in memory, and its product with a panel of B.
// Panels of B are alike for both: the units of all columns at one depth, then those at the next.
#pragma once

#include <algorithm>

#include "gemm.hpp"
#include "panels.hpp"
#include "threads.hpp"
#include "tiles.hpp"

namespace catalog::host {

// Whether neighbours of a type are units as they lie in memory.
template <class Unit, class T>
inline constexpr bool holds_neighbours = sizeof(Unit) == Units<Unit>::depth * sizeof(T);

// Common to both: the units between two visits to the sums, for which tile_m rows of A are packed together.
template <class Row, class Unit>
struct BlockSizes {
    static constexpr int factors = Units<Unit>::depth, step = Row::tile_k / factors, panel = Row::warp_tile_n;
};

template <class Row, class Unit>
struct VectorBlocks : BlockSizes<Row, Unit> {
    using BlockSizes<Row, Unit>::step, BlockSizes<Row, Unit>::panel;
    static constexpr int whole = 1;  // the depth is a multiple of this many units
    static_assert(panel % lanes == 0 && step % lanes == 0, "blocks are whole vectors");

    // A keeps its contiguous axis: rows of units, or the rows of a tile at each k. With powers of two as distances, they
    // would share few sets of the L1 cache.
    static constexpr int a_row = Row::a_along ? step + 16 : 1, a_depth = Row::a_along ? 1 : Row::tile_m + 16;
    static constexpr std::int64_t a_step = Row::a_along ? Row::tile_m * a_row : step * a_depth;

    // The distance of lines along the contiguous axis of a factor at which a copy of its elements is packed already; 0: units
    // are not made of such elements.
    template <class T>
    static constexpr std::int64_t plain_distance() {
        if (!holds_neighbours<Unit, T>) return 0;
        if (Row::a_along) return a_row * Units<Unit>::depth;
        return Units<Unit>::depth == 1 ? a_depth : 0;
    }

    struct State {};  // what a thread holds while it multiplies

    template <class Source>
    static void pack_a(Source from, int rows, std::int64_t depth, Unit* to) {
        if constexpr (Row::a_along)
            pack_rows<Unit>(from, rows, depth, to, a_row);
        else
            pack_depth<Unit, Row::tile_m, a_depth>(from, rows, depth, to);
    }

    // Rows of A: packed ones, or those of a matrix, where there are registers for the addresses of a block's rows.
    static constexpr bool any_distance = Row::a_along && Row::warp_tile_m <= 8;
    struct RowsOfA {
        const Unit* data;
        std::conditional_t<any_distance, std::ptrdiff_t, std::integral_constant<int, a_row>> apart;
    };

    static RowsOfA packed(const Unit* a) {
        if constexpr (any_distance)
            return {a, a_row};
        else
            return {a, {}};
    }

    // put(row, column, sum) consumes each vector of the product of some rows of A and a panel of B. `next` is read after it.
    template <class Put, class Next = NothingBeside>
    static void multiply(const RowsOfA& a, int rows, const Unit* b, int depth, Put put, Next next = {}) {
        for_even_row_blocks<Row::warp_tile_m>(0, rows, [&](auto block, int i) {
            multiply_block<block, panel, a_depth>(a.data + i * a.apart, a.apart, Rows<const Unit>{b, panel}, depth,
                                                  [&](int r, int j, auto sum) { put(i + r, j, sum); },
                                                  ahead<block>(next, i, rows));
        });
    }

    // The product of the rows of A from `first` on and a panel of B becomes the sums, or is added to them.
    template <int row_s, class Sum, class Next = NothingBeside>
    static void multiply(bool adds, const Unit* a, int first, int rows, const Unit* b, int depth, Sum* sums, Next next = {}) {
        for_even_row_blocks<Row::warp_tile_m>(0, rows, [&](auto block, int i) {
            const auto put = [adds, to = sums + i * row_s](int row, int column, auto sum) {
                Sum* const at = to + row * row_s + column;
                store(at, adds ? load(at) + sum : sum);
            };
            multiply_block<block, panel, a_depth>(a + (first + i) * a_row, std::integral_constant<int, a_row>{},
                                                  Rows<const Unit>{b, panel}, depth, put, ahead<block>(next, i, rows));
        });
    }

    // Rows of A from this depth on, in units.
    static const Unit* at_depth(const Unit* a, int depth) { return a + depth * a_depth; }

    // The product is added to the sums, each row i multiplied by factor_of(i).
    template <int row_s, class FactorOf>
    static void multiply_scaled(const Unit* a, int first, int rows, const Unit* b, int depth, float* sums,
                                FactorOf factor_of) {
        for_row_blocks<Row::warp_tile_m>(0, rows, [&](auto block, int i) {
            float factors[block];
            for (int r = 0; r < block; ++r) factors[r] = factor_of(i + r);
            multiply_block<block, panel, a_row, a_depth>(
                a + (first + i) * a_row, Rows<const Unit>{b, panel}, depth,
                add_scaled_to<row_s>(sums + i * row_s, factors));
        });
    }

   private:
    template <int block>
    static NothingBeside ahead(NothingBeside nothing, int, int) {
        return nothing;
    }

    // What a block of the rows from `first` on prefetches: the panel of B, which comes from the L2 cache, into the first one, and
    // a share of what is read next, at most a line at a time. On a Xeon, products of 2,048 cubed take a tenth less time for both,
    // but vectors of AVX2, which load more for a product, take up to 7 % more.
    template <int block>
    static auto ahead([[maybe_unused]] ReadNext next, [[maybe_unused]] int first, [[maybe_unused]] int rows) {
#if defined(__AVX512F__)
        constexpr int soon = 8, width = panel * static_cast<int>(sizeof(Unit)), line = 64 / static_cast<int>(sizeof(Unit));
        const int share = std::min(width * block / rows, 64);
        return [at = next.data + next.bytes * first / rows, share](const Unit* row) mutable {
#pragma GCC unroll 4
            for (int i = 0; i < panel; i += line) prefetch(row + soon * panel + i);
            prefetch_later(at);
            at += share;
        };
#else
        return NothingBeside{};
#endif
    }
};

// The same in tiles.
template <class Row, class Unit>
struct TileBlocks : BlockSizes<Row, Unit> {
    using BlockSizes<Row, Unit>::step, BlockSizes<Row, Unit>::panel, BlockSizes<Row, Unit>::factors;
    static constexpr int whole = whole_units<Unit>;
    static_assert(lanes == tile_units && step % whole == 0 && Row::tile_m % tile_rows == 0, "blocks are whole tiles");
    static_assert(Row::warp_tile_m == 2 * tile_rows && panel == 2 * tile_units, "a register block is two tiles by two");

    // Units of a panel of B that are multiplied at a time, 44 KiB at most.
    static constexpr int most_deep = 352;

    // As of VectorBlocks.
    static constexpr int a_row = step + 16;
    static constexpr std::int64_t a_step = Row::tile_m * a_row;

    template <class T>
    static constexpr std::int64_t plain_distance() {
        return Row::a_along && holds_neighbours<Unit, T> ? a_row * factors : 0;
    }

    using State = amx::Tiles;

    // Rows of A: packed ones, or those of a matrix.
    static constexpr bool any_distance = true;
    struct RowsOfA {
        const Unit* data;
        std::ptrdiff_t apart;

        RowsOfA(const Unit* data, std::ptrdiff_t apart = a_row) : data(data), apart(apart) {}
    };

    static RowsOfA packed(const Unit* a) { return a; }

    // Rows of a tile after the last one stay as they are: so do their sums, which nobody reads.
    template <class Source>
    static void pack_a(Source from, int rows, std::int64_t depth, Unit* to) {
        using Read = ReadUnit<Unit>;
        if constexpr (std::is_same_v<Read, Unit>) {
            pack_rows(from, rows, depth, to, a_row);
        } else {
            constexpr int deep = whole * factors;
            for (std::int64_t k = 0; k < depth; k += deep, to += whole) {
                const std::int64_t rest = std::min<std::int64_t>(depth - k, deep);
                pack_rows(from.from(0, k), rows, rest, reinterpret_cast<Read*>(to), a_row);
                for (int row = 0; row < rows; ++row) store_read(to + row * a_row, load(to + row * a_row), tile_units);
            }
        }
    }

    // Calls of beside() for a product of some rows of A and a panel of B.
    static int steps_of(int rows, int depth) { return (rows + Row::warp_tile_m - 1) / Row::warp_tile_m * (depth / whole); }

    // The units of a piece of the depth: what is multiplied at a time stays in the L1 cache.
    static int piece_of(int depth) {
        const int pieces = std::max((depth + most_deep - 1) / most_deep, 1);
        return round_up((depth + pieces - 1) / pieces, whole);
    }

    static int last_piece(int depth) {
        const int piece = piece_of(depth);
        return depth - (depth - 1) / piece * piece;
    }

    // In pieces of the depth for which the panel of B stays in the L1 cache, while rows of A pass.
    template <int row_s, class Sum, class Beside = NothingBeside>
    static void multiply(bool adds, RowsOfA a, int first, int rows, const Unit* b, int depth, Sum* sums, Beside beside = {}) {
        const auto multiply_piece = [&](auto adding, int from, int piece) {
            for_blocks<2, 1>(0, (rows + tile_rows - 1) / tile_rows, [&](auto down, int tile) {
                const int row = tile * tile_rows;
                multiply_tiles<adding, down, 2, Passing::a>(a.data + (first + row) * a.apart + from, tiles_of_rows(a.apart),
                                                            b + from * panel, panel, piece, sums + row * row_s, row_s,
                                                            [&beside] { beside(); });
            });
        };
        const int piece = piece_of(depth);
        for (int from = 0; from < depth; from += piece)
            if (adds || from > 0)
                multiply_piece(std::true_type{}, from, std::min(piece, depth - from));
            else
                multiply_piece(std::false_type{}, from, std::min(piece, depth - from));
    }

    // The sums to which a last piece of the depth is added are complete: put(block, lds, row, count, column, width) gets each
    // block of them while it is in the L1 cache. There rows of A stay, while panels of B, `apart` from each other, pass.
    template <int row_s, bool adds, class Sum, class Put, class Beside>
    static void complete(RowsOfA a, int rows, const Unit* b, std::ptrdiff_t apart, int columns, int depth, const Sum* sums,
                         Put put, Beside beside) {
        constexpr int wide = 2 * panel;
        alignas(64) Sum block[Row::warp_tile_m * wide];
        for_blocks<2, 1>(0, (rows + tile_rows - 1) / tile_rows, [&](auto down, int tile) {
            const int row = tile * tile_rows, count = std::min(down * tile_rows, rows - row);
            for (int j = 0; j < columns; j += panel) {
                add_tiles<adds, down, 2, Passing::b>(a.data + row * a.apart, tiles_of_rows(a.apart), b + j / panel * apart,
                                                     panel, depth, sums + row * row_s + j, row_s, block + j % wide, wide,
                                                     [&beside] { beside(); });
                const int first = j / wide * wide;
                if (j + panel == first + wide || j + panel >= columns)
                    put(block, wide, row, count, first, std::min(columns - first, wide));
            }
        });
    }

    static const Unit* at_depth(const Unit* a, int depth) { return a + depth; }

    template <int row_s, class FactorOf>
    static void multiply_scaled(const Unit* a, int first, int rows, const Unit* b, int depth, float* sums,
                                FactorOf factor_of) {
        using Sum = std::conditional_t<std::is_same_v<typename Units<Unit>::Sum, Float>, float, std::int32_t>;
        for_blocks<2, 1>(0, (rows + tile_rows - 1) / tile_rows, [&](auto down, int tile) {
            alignas(64) Sum product[down * tile_rows * panel];
            multiply_tiles<false, down, 2>(a + (first + tile * tile_rows) * a_row, tiles_of_rows(a_row), b, panel, depth,
                                           product, panel);
            for (int i = tile * tile_rows; i < std::min(rows, (tile + down) * tile_rows); ++i) {
                const float factor = factor_of(i);
                const Sum* const from = product + (i - tile * tile_rows) * panel;
                for (int j = 0; j < panel; j += lanes) {
                    float* const to = sums + i * row_s + j;
                    store(to, load(to) + as_float(load(from + j)) * factor);
                }
            }
        });
    }
};

template <class Row, class Unit>
using Blocks = std::conditional_t<Row::in_tiles, TileBlocks<Row, Unit>, VectorBlocks<Row, Unit>>;

// A panel of B: `count` columns, then zeros, of `depth` factors, and zeros up to `units`.
template <class Unit, int panel, bool along, class T>
inline void pack_panel(Factor<along, T> from, int count, std::int64_t depth, std::int64_t units, Unit* to) {
    using Read = ReadUnit<Unit>;
    if constexpr (std::is_same_v<Read, Unit>) {
        constexpr int factors = Units<Unit>::depth;
        pack_depth<Unit, panel, panel>(from, count, depth, to);
        std::fill(to + (depth + factors - 1) / factors * panel, to + units * panel, Unit{});
    } else {
        constexpr int apart = tile_units * panel;
        for (std::int64_t k = 0; k < units; k += whole_units<Unit>, to += 2 * apart) {
            const std::int64_t rest = std::min<std::int64_t>(depth - k, whole_units<Unit>);
            pack_panel<Read, panel>(from.from(0, k), count, rest, tile_units, reinterpret_cast<Read*>(to));
            for (int i = 0; i < apart; i += lanes) store_read(to + i, load(to + i), apart);
        }
    }
}

// How C of some products, each of `rows` x `columns`, is divided among threads: whole tiles, or parts of them, so that each
// thread has several and all finish together. Parts consist of whole register blocks.
template <class Row>
struct Division {
    static constexpr int items_per_thread = 4;

    int item_rows = Row::tile_m, item_columns = Row::tile_n;
    std::int64_t down, across;

    Division(std::int64_t products, std::int64_t rows, std::int64_t columns, int threads) {
        constexpr int panel = Row::warp_tile_n;
        const auto count = [&] {
            down = (rows + item_rows - 1) / item_rows;
            across = (columns + item_columns - 1) / item_columns;
            return products * items();
        };
        while (count() < items_per_thread * threads && threads > 1) {
            if (item_rows % (2 * Row::warp_tile_m) == 0 && (item_rows >= item_columns || item_columns % (2 * panel)))
                item_rows /= 2;
            else if (item_columns % (2 * panel) == 0)
                item_columns /= 2;
            else
                break;
        }
    }

    // As many items, all of about the same number of columns.
    void even_columns(std::int64_t columns) {
        item_columns = round_up(static_cast<int>((columns + across - 1) / across), Row::warp_tile_n);
        across = (columns + item_columns - 1) / item_columns;
    }

    std::int64_t items() const { return down * across; }
};

}  // namespace catalog::host
