// The product by packed panels: all of A and B become units in the order of the register tiles, then every thread takes
// tiles of C. Of a small product, each thread packs what its tiles need: reading what others have packed takes longer.
#pragma once

#include <algorithm>
#include <atomic>

#include "epilogue.hpp"
#include "host/blocks.hpp"
#include "host/threads.hpp"

namespace catalog::host {

// How C of a small product is divided: a part for each thread, all about equal. The parts are those that take least time.
template <class Row, int factors, bool a_in_place>
struct SmallDivision {
    std::int64_t item_rows, item_columns, down, across;

    SmallDivision(std::int64_t rows, std::int64_t columns, int threads) {
        // Multiplications in the time in which an element is packed.
        constexpr double packing = Row::in_tiles ? 64 : 16 * factors;
        const std::int64_t most = std::min<std::int64_t>((rows + Row::warp_tile_m - 1) / Row::warp_tile_m, threads);
        double least = 0;
        for (std::int64_t parts = 1; parts <= most; ++parts) {
            const std::int64_t high = part(rows, parts, Row::warp_tile_m);
            const std::int64_t wide = part(columns, (threads + parts - 1) / parts, Row::warp_tile_n);
            const std::int64_t all_down = (rows + high - 1) / high, all_across = (columns + wide - 1) / wide;
            const auto turns = static_cast<double>((all_down * all_across + threads - 1) / threads);
            const std::int64_t packed = a_in_place ? wide : high + wide;
            const double time = turns * (static_cast<double>(high * wide) + packing * static_cast<double>(packed));
            if (parts > 1 && time >= least) continue;
            least = time;
            item_rows = high, item_columns = wide, down = all_down, across = all_across;
        }
    }

   private:
    static std::int64_t part(std::int64_t extent, std::int64_t parts, std::int64_t block) {
        return ((extent + parts - 1) / parts + block - 1) / block * block;
    }
};

// How A is packed. With AVX-512, its rows have the depth along them, also if those of the tensor have not: a register block
// of fewer rows than a cache line holds would read more lines of the others.
template <class Row>
struct PackedRow : Row {
#if defined(__AVX512F__)
    static constexpr bool a_along = true;
#endif
};

template <class Row, class Unit>
class PanelProduct {
    using T = typename Row::dtype;
    using Sum = SumOf<Row, Unit>;
    using Block = Blocks<PackedRow<Row>, Unit>;
    static constexpr int factors = Block::factors, panel = Block::panel, step = Block::step;
    static constexpr int tile_m = Row::tile_m, tile_n = Row::tile_n;
    static constexpr std::int64_t a_step = Block::a_step;
    // Rows of A that are packed in a share, so that threads have enough of them where A has few tiles.
    static constexpr int packed_rows = Row::in_tiles || Row::a_along ? tile_m / 4 : tile_m;
    static_assert(tile_n % panel == 0 && tile_m % lanes == 0, "tiles are whole blocks");
    // Whether rows of A are multiplied where they lie. On x86, that takes no longer than to multiply copies, also if rows
    // are a power of two apart.
#if defined(__AVX__)
    static constexpr bool a_in_place = Row::a_along && Block::any_distance && std::is_same_v<Unit, T>;
#else
    static constexpr bool a_in_place = false;
#endif
    // Rows of A that may be tiles as they lie in the tensor: short ones, with which products of 768 and 1,024 cubed take a tenth
    // less time, and those of a product of so few columns that a copy would hardly be read again, which takes down to half of
    // the time. With other rows, 2,048 cubed takes a twelfth more.
    static constexpr bool holds_tiles =
        Row::in_tiles && Row::a_along && holds_neighbours<Unit, T> && scales_of<Row> != Scales::block;
    static constexpr std::int64_t short_bytes = 3 << 10, few_columns = 1024;

    static bool can_have_tiles(const catalog_args& args, std::int64_t units) {
        if (!holds_tiles || args.m % tile_rows != 0 || args.k != units * factors) return false;
        if (args.a.stride_outer < args.k || args.a.stride_outer % factors != 0) return false;
        return args.n <= few_columns || args.a.stride_outer * static_cast<std::int64_t>(sizeof(T)) <= short_bytes;
    }

    // Each factor is packed in chunks of about this many units, more only if the depth of one tile has more: together
    // they should fit in a large L3 cache.
    static constexpr std::int64_t chunk_units = 8 << 20;

    struct Scratch {
        static constexpr int row_s = tile_n + 16;
        alignas(64) Sum sums[tile_m * row_s];
    };

   public:
    PanelProduct(const catalog_args& args, std::int64_t batch, int threads)
        : args(args),
          batch(batch),
          threads(threads),
          units((args.k + factors * Block::whole - 1) / (factors * Block::whole) * Block::whole),
          has_tiles(can_have_tiles(args, units)) {}

    // Tiles of C that can be computed at once.
    static std::int64_t tiles(const catalog_args& args) {
        return (args.m + tile_m - 1) / tile_m * ((args.n + tile_n - 1) / tile_n);
    }

    catalog_status run() {
        // Steps are of about the same depth: a short one at the end would visit all sums for little.
        steps = (units + step - 1) / step;
        constexpr int grain = std::max<int>(lanes, Block::whole);
        if (!in_blocks && steps > 1) deep_step = ((units + steps - 1) / steps + grain - 1) / grain * grain;
        if (is_small()) {
            multiply_small(SmallDivision<Row, factors, a_in_place>(args.m, args.n, threads));
            return out_of_memory ? CATALOG_NO_MEMORY : CATALOG_OK;
        }
        const std::int64_t deep = std::max<std::int64_t>(units, 1);
        // A packed tile of A has the room of whole steps, however short the depth is.
        const std::int64_t of_tile = a_in_place ? deep * tile_m : std::max<std::int64_t>(steps, 1) * a_step;
        const std::int64_t tiles_of_a = (args.m + tile_m - 1) / tile_m;
        const std::int64_t chunks = (tiles_of_a + most_tiles(of_tile) - 1) / most_tiles(of_tile);
        rows_of_chunk = (tiles_of_a + chunks - 1) / chunks * tile_m;
        columns_of_chunk = most_tiles(deep * tile_n) * tile_n;
        const std::int64_t rows = std::min(rows_of_chunk, tiles_of_a * tile_m);
        const std::int64_t columns = std::min(columns_of_chunk, (args.n + panel - 1) / panel * panel);
        Room<Unit>& of_a = thread_room<struct PackedA, Unit>();
        Room<Unit>& of_b = thread_room<struct PackedB, Unit>();
        packed_a = of_a.reserve(packs_a() ? rows / tile_m * steps * a_step : 0);
        packed_b = of_b.reserve(columns * deep);
        if (!packed_a || !packed_b) return CATALOG_NO_MEMORY;
        for (std::int64_t column = 0; column < args.n; column += columns_of_chunk)
            for (std::int64_t row = 0; row < args.m; row += rows_of_chunk) multiply_chunk(row, column);
        of_a.release_above(2 * chunk_units);
        of_b.release_above(2 * chunk_units);
        return out_of_memory ? CATALOG_NO_MEMORY : CATALOG_OK;
    }

   private:
    // How many tiles, of as many units each, a chunk has at most.
    static std::int64_t most_tiles(std::int64_t units) { return std::max<std::int64_t>(chunk_units / units, 1); }

    // Whether it takes less time to pack the same rows and columns in several threads than to read them from the caches of
    // other cores. Two threads pack the fewest of them twice; many threads that multiply in tiles read most from others.
    bool is_small() const {
        constexpr std::int64_t most_packed = 1 << 22;  // elements
        constexpr int many = 16;                       // threads
        const int larger = Row::in_tiles ? (threads >= many ? 4 : 1) : threads == 2 ? 8 : 1;
        return threads > 1 && work_of(args) <= larger * small_product && (args.m + args.n) * args.k <= most_packed;
    }

    void multiply_small(const SmallDivision<Row, factors, a_in_place>& division) {
        parallel_for(args, threads, division.down * division.across, [&](std::int64_t item) {
            const std::int64_t first_row = item % division.down * division.item_rows;
            const std::int64_t first_column = item / division.down * division.item_columns;
            const std::int64_t end_row = std::min(first_row + division.item_rows, args.m);
            const std::int64_t end_column = std::min(first_column + division.item_columns, args.n);
            Scratch* const scratch = thread_scratch<Scratch>();
            Unit* const a = thread_room<struct RowsOfThread, Unit>().reserve((packs_a() ? steps * a_step : 0) + 1);
            Unit* const b = thread_room<struct ColumnsOfThread, Unit>().reserve(division.item_columns * units + 1);
            if (!scratch || !a || !b) return void(out_of_memory = true);
            for (std::int64_t column = first_column; column < end_column; column += panel)
                for (std::int64_t k = 0; k < steps; ++k)
                    pack_b(column, std::min<std::int64_t>(end_column - column, panel), k,
                           b + (column - first_column) * units);
            [[maybe_unused]] const typename Block::State state;
            for (std::int64_t row = first_row; row < end_row; row += tile_m) {
                const int rows = static_cast<int>(std::min<std::int64_t>(end_row - row, tile_m));
                for (std::int64_t k = 0; k < steps && packs_a(); ++k) pack_a(row, rows, k, a + k * a_step);
                for (std::int64_t column = first_column; column < end_column; column += tile_n)
                    multiply_tile(*scratch, a, 0, b + (column - first_column) * units, row, column, rows,
                                  static_cast<int>(std::min<std::int64_t>(end_column - column, tile_n)));
            }
        });
    }

    bool packs_a() const { return !a_in_place && !has_tiles; }

    void multiply_chunk(std::int64_t first_row, std::int64_t first_column) {
        const std::int64_t rows = std::min(rows_of_chunk, args.m - first_row);
        const std::int64_t columns = std::min(columns_of_chunk, args.n - first_column);
        // What is packed stays until it changes.
        const bool new_rows = first_column == 0 || rows_of_chunk < args.m, packs_b = first_row == 0;
        const std::int64_t tasks_a = packs_a() && new_rows ? (rows + packed_rows - 1) / packed_rows * steps : 0;
        const std::int64_t tasks_b = packs_b ? (columns + panel - 1) / panel * steps : 0;

        Division<Row> division(1, rows, columns, threads);
        division.even_columns(columns);
        parallel_for(args, threads, tasks_a + tasks_b, [&](std::int64_t task) {
            if (task < tasks_a) {
                const std::int64_t row = task / steps * packed_rows, k = task % steps;
                pack_a(first_row + row, std::min<std::int64_t>(packed_rows, rows - row), k,
                       packed_a + (row / tile_m * steps + k) * a_step + row % tile_m * Block::a_row);
            } else {
                const std::int64_t column = (task - tasks_a) / steps * panel, k = (task - tasks_a) % steps;
                pack_b(first_column + column, std::min<std::int64_t>(panel, columns - column), k,
                       packed_b + column * units);
            }
        });
        parallel_for(args, threads, division.items(), [&](std::int64_t item) {
            Scratch* const scratch = thread_scratch<Scratch>();
            if (!scratch) {
                out_of_memory = true;
                return;
            }
            [[maybe_unused]] const typename Block::State state;
            const std::int64_t row = item % division.down * division.item_rows;
            const std::int64_t column = item / division.down * division.item_columns;
            const Unit* const a = a_in_place ? nullptr : packed_a + row / tile_m * steps * a_step;
            multiply_tile(*scratch, a, static_cast<int>(row % tile_m),
                          packed_b + column * units, first_row + row, first_column + column,
                          static_cast<int>(std::min<std::int64_t>(division.item_rows, rows - row)),
                          static_cast<int>(std::min<std::int64_t>(division.item_columns, columns - column)));
        });
    }

    std::int64_t depth_of(std::int64_t index) const {
        return std::min(deep_step * factors, args.k - index * deep_step * factors);
    }

    // The same in units, with those that make it whole.
    int units_of(std::int64_t index) const { return static_cast<int>(std::min(deep_step, units - index * deep_step)); }

    // A step of some rows of a tile of A.
    void pack_a(std::int64_t row, std::int64_t count, std::int64_t index, Unit* to) const {
        const auto from = factor_of<Row::a_along, T>(args.a, batch).from(row, index * deep_step * factors);
        Block::pack_a(from, static_cast<int>(count), depth_of(index), to);
    }

    // A step of the columns of a panel of B, whose first step is at `to`.
    void pack_b(std::int64_t column, std::int64_t count, std::int64_t index, Unit* to) const {
        const auto from = factor_of<Row::b_along, T>(args.b, batch).from(column, index * deep_step * factors);
        pack_panel<Unit, panel>(from, static_cast<int>(count), depth_of(index), units_of(index),
                                to + index * deep_step * panel);
    }

    // Rows of A in tiles, at a step of the depth.
    auto tiles_of_a([[maybe_unused]] std::int64_t row, std::int64_t index, const Unit* packed_a, int skipped) const {
        using Rows = typename Block::RowsOfA;
        if constexpr (holds_tiles) {
            const auto a = factor_of<true, T>(args.a, batch).from(row, index * deep_step * factors);
            if (has_tiles) return Rows{reinterpret_cast<const Unit*>(a.data), a.stride / factors};
        }
        return Rows{packed_a + index * a_step + skipped * Block::a_row};
    }

    // Of A, `skipped` rows come before in the packed tile. Not inlined: it is compiled once for both ways.
    __attribute__((noinline)) void multiply_tile(Scratch& scratch, const Unit* packed_a, int skipped, const Unit* packed_b,
                                                 std::int64_t row, std::int64_t column, int rows, int columns) const {
        constexpr int row_s = Scratch::row_s;
        const int width = round_up(columns, panel);
        if (steps == 0 || in_blocks)
            for (int i = 0; i < rows; ++i) std::fill_n(scratch.sums + i * row_s, width, Sum{});
        if constexpr (a_in_place) return multiply_in_place(scratch.sums, packed_b, row, column, rows, columns);
        for (std::int64_t k = 0; k < steps; ++k) {
            const Unit* const a = packed_a + k * a_step;
            int depth = units_of(k);
            if constexpr (Row::in_tiles) {
                if (completes()) depth -= Block::last_piece(depth);
                if (depth == 0) break;
            }
            for (int j = 0; j < width; j += panel) {
                const Unit* const b = packed_b + j * units + k * deep_step * panel;
                Sum* const sums = scratch.sums + j;
                if constexpr (in_blocks)
                    multiply_blocks(a, skipped, rows, b, depth, row, column + j, k * deep_step * factors, sums);
                else if constexpr (Row::in_tiles)
                    Block::template multiply<row_s>(k > 0, tiles_of_a(row, k, packed_a, skipped), 0, rows, b, depth, sums,
                                                    BothAhead(next_rows(packed_a, k, j, width),
                                                              next_panel(packed_b, k, j, width),
                                                              Block::steps_of(rows, depth)));
                else
                    Block::template multiply<row_s>(k > 0, a, skipped, rows, b, depth, sums,
                                                    next_panel(packed_b, k, j, width));
            }
        }
        if constexpr (Row::in_tiles)
            if (completes()) return complete(scratch.sums, packed_a, skipped, packed_b, row, column, rows, columns);
        finish<Row>(args, batch, scratch.sums, row_s, row, column, rows, columns);
    }

    // In tiles, a block of C is stored while its sums are in the L1 cache, if there is one step. After several, whole rows of a
    // tile are stored, which takes a twentieth less time then.
    bool completes() const { return !in_blocks && steps == 1; }

    // The last piece of that step; pieces before it are in the sums.
    void complete(const Sum* sums, const Unit* packed_a, int skipped, const Unit* packed_b, std::int64_t row,
                  std::int64_t column, int rows, int columns) const {
        const int depth = Block::last_piece(units_of(0)), before = units_of(0) - depth;
        auto a = tiles_of_a(row, 0, packed_a, skipped);
        a.data += before;
        const Unit* const b = packed_b + before * panel;
        const auto put = [&](const Sum* block, int lds, int i, int count, int j, int width) {
            finish<Row>(args, batch, block, lds, row + i, column + j, count, width);
        };
        const int panels = (columns + panel - 1) / panel;
        const SharesAhead beside(next_rows(packed_a, 0, 0, panel), Block::steps_of(rows, depth) * panels);
        if (before > 0)
            Block::template complete<Scratch::row_s, true>(a, rows, b, units * panel, columns, depth, sums, put, beside);
        else
            Block::template complete<Scratch::row_s, false>(a, rows, b, units * panel, columns, depth, sums, put, beside);
    }

    // The panel of B that follows the one at `column` in step `index`: that of the next columns or of the next step, at the end
    // the first one, with which the next rows begin.
    ReadNext next_panel(const Unit* packed_b, std::int64_t index, int column, int columns) const {
        const bool ends_step = column + panel >= columns;
        const std::int64_t next = ends_step ? (index + 1) % steps : index;
        const Unit* const to = packed_b + (ends_step ? 0 : column + panel) * units + next * deep_step * panel;
        return {reinterpret_cast<const char*>(to), units_of(next) * panel * static_cast<std::int64_t>(sizeof(Unit))};
    }

    // Of the rows of A that follow step `index`, if they are packed, what is prefetched beside the panel at `column`.
    ReadNext next_rows(const Unit* packed_a, std::int64_t index, int column, int columns) const {
        const std::int64_t share = packs_a() ? a_step * static_cast<std::int64_t>(sizeof(Unit)) * panel / columns : 0;
        return {reinterpret_cast<const char*>(packed_a + (index + 1) * a_step) + share * (column / panel), share};
    }

    // The same without a copy of A. Panels of C that consist of sums alone are stored with the last step.
    void multiply_in_place(Sum* sums, const Unit* packed_b, std::int64_t row, std::int64_t column, int rows,
                           int columns) const {
        constexpr int row_s = Scratch::row_s;
        constexpr bool can_store = std::is_same_v<typename Row::otype, Sum> && Row::num_d == 0;
        const bool stores = can_store && steps > 0 && args.num_splits <= 1 && is_as_summed(args);
        const int stored = stores ? columns / panel * panel : 0;
        const auto a = factor_of<true, T>(args.a, batch).from(row, 0);
        Sum* const c = data_of<Sum>(args.c, batch) + row * args.c.stride_outer + column;
        for (std::int64_t k = 0; k < steps; ++k) {
            const int depth = units_of(k);
            for (int j = 0; j < columns; j += panel) {
                const bool to_c = k + 1 == steps && j < stored;
                const std::ptrdiff_t to_s = to_c ? args.c.stride_outer : row_s;
                Sum* const to = (to_c ? c : sums) + j;
                const Sum* const added = k > 0 ? sums + j : nullptr;
                const auto put = [=](int i, int at, auto sum) {
                    store(to + i * to_s + at, added ? load(added + i * row_s + at) + sum : sum);
                };
                const Unit* const b = packed_b + j * units + k * deep_step * panel;
                Block::multiply({a.data + k * deep_step, a.stride}, rows, b, depth, put, next_panel(packed_b, k, j, columns));
            }
        }
        if (stored < columns)
            finish<Row>(args, batch, sums + stored, row_s, row, column + stored, rows, columns - stored);
    }

    // A step of the depth for one panel, block after block; the row, the column and k are those of the product.
    void multiply_blocks(const Unit* a, int skipped, int rows, const Unit* b, int depth, std::int64_t row,
                         std::int64_t column, std::int64_t k, float* sums) const {
        constexpr int block = block_extent / factors;
        static_assert(!in_blocks || (step % block == 0 && block_extent % panel == 0),
                      "a panel has one scale in a block");
        const BlockScales scales(args, batch);
        for (int at = 0; at < depth; at += block, k += block_extent) {
            const float of_b = scales.b(column, k);
            Block::template multiply_scaled<Scratch::row_s>(
                Block::at_depth(a, at), skipped, rows, b + at * panel, std::min(block, depth - at), sums,
                [&](int i) { return scales.a(row + i, k) * of_b; });
        }
    }

    static constexpr bool in_blocks = scales_of<Row> == Scales::block;

    const catalog_args& args;
    const std::int64_t batch;
    const int threads;
    const std::int64_t units;  // along the whole depth, with those that make it whole
    const bool has_tiles;      // as A lies in the tensor
    std::int64_t steps, deep_step = step;  // units of all but the last step
    std::int64_t rows_of_chunk, columns_of_chunk;
    Unit *packed_a, *packed_b;
    std::atomic<bool> out_of_memory = false;
};

}  // namespace catalog::host
