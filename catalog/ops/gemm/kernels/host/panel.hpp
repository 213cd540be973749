// The product by packed panels: all of A and B become units in the order of the register tiles, then every thread takes
// tiles of C.
#pragma once

#include <algorithm>
#include <atomic>

#include "epilogue.hpp"
#include "host/blocks.hpp"
#include "host/threads.hpp"

namespace catalog::host {

template <class Row, class Unit>
class PanelProduct {
    using T = typename Row::dtype;
    using Sum = SumOf<Row, Unit>;
    using Block = Blocks<Row, Unit>;
    static constexpr int factors = Block::factors, panel = Block::panel, step = Block::step;
    static constexpr int tile_m = Row::tile_m, tile_n = Row::tile_n;
    static constexpr std::int64_t a_step = Block::a_step;
    static_assert(tile_n % panel == 0 && tile_m % lanes == 0, "tiles are whole blocks");

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
          units((args.k + factors * Block::whole - 1) / (factors * Block::whole) * Block::whole) {}

    // Tiles of C that can be computed at once.
    static std::int64_t tiles(const catalog_args& args) {
        return (args.m + tile_m - 1) / tile_m * ((args.n + tile_n - 1) / tile_n);
    }

    catalog_status run() {
        const std::int64_t deep = std::max<std::int64_t>(units, 1);
        rows_of_chunk = std::max<std::int64_t>(chunk_units / deep / tile_m, 1) * tile_m;
        columns_of_chunk = std::max<std::int64_t>(chunk_units / deep / tile_n, 1) * tile_n;
        steps = (units + step - 1) / step;
        const std::int64_t rows = std::min(rows_of_chunk, (args.m + tile_m - 1) / tile_m * tile_m);
        const std::int64_t columns = std::min(columns_of_chunk, (args.n + panel - 1) / panel * panel);
        Room<Unit>& of_a = thread_room<struct PackedA, Unit>();
        Room<Unit>& of_b = thread_room<struct PackedB, Unit>();
        packed_a = of_a.reserve(rows / tile_m * steps * a_step);
        packed_b = of_b.reserve(columns * deep);
        if (!packed_a || !packed_b) return CATALOG_NO_MEMORY;
        for (std::int64_t column = 0; column < args.n; column += columns_of_chunk)
            for (std::int64_t row = 0; row < args.m; row += rows_of_chunk) multiply_chunk(row, column);
        of_a.release_above(2 * chunk_units);
        of_b.release_above(2 * chunk_units);
        return out_of_memory ? CATALOG_NO_MEMORY : CATALOG_OK;
    }

   private:
    void multiply_chunk(std::int64_t first_row, std::int64_t first_column) {
        const std::int64_t rows = std::min(rows_of_chunk, args.m - first_row);
        const std::int64_t columns = std::min(columns_of_chunk, args.n - first_column);
        // What is packed stays until it changes.
        const bool packs_a = first_column == 0 || rows_of_chunk < args.m, packs_b = first_row == 0;
        const std::int64_t tasks_a = packs_a ? (rows + tile_m - 1) / tile_m * steps : 0;
        const std::int64_t tasks_b = packs_b ? (columns + panel - 1) / panel : 0;

        const Division<Row> division(1, rows, columns, threads);
        parallel_for(args, threads, tasks_a + tasks_b, [&](std::int64_t task) {
            if (task < tasks_a)
                pack_a(first_row, rows, task / steps, task % steps);
            else
                pack_b(first_column, columns, task - tasks_a);
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
            multiply_tile(*scratch, first_row, first_column, row, column,
                          static_cast<int>(std::min<std::int64_t>(division.item_rows, rows - row)),
                          static_cast<int>(std::min<std::int64_t>(division.item_columns, columns - column)));
        });
    }

    void pack_a(std::int64_t first_row, std::int64_t rows, std::int64_t tile, std::int64_t step_index) const {
        const std::int64_t k = step_index * Row::tile_k, depth = std::min<std::int64_t>(Row::tile_k, args.k - k);
        const int count = static_cast<int>(std::min<std::int64_t>(tile_m, rows - tile * tile_m));
        const auto from = factor_of<Row::a_along, T>(args.a, batch).from(first_row + tile * tile_m, k);
        Block::pack_a(from, count, depth, packed_a + (tile * steps + step_index) * a_step);
    }

    void pack_b(std::int64_t first_column, std::int64_t columns, std::int64_t index) const {
        const int count = static_cast<int>(std::min<std::int64_t>(panel, columns - index * panel));
        const auto from = factor_of<Row::b_along, T>(args.b, batch).from(first_column + index * panel, 0);
        pack_panel<Unit, panel>(from, count, args.k, units, packed_b + index * panel * units);
    }

    // Rows and columns count from the first ones of the chunk.
    void multiply_tile(Scratch& scratch, std::int64_t first_row, std::int64_t first_column, std::int64_t row,
                       std::int64_t column, int rows, int columns) const {
        constexpr int row_s = Scratch::row_s;
        const int width = round_up(columns, panel), skipped = static_cast<int>(row % tile_m);
        if (steps == 0 || in_blocks)
            for (int i = 0; i < rows; ++i) std::fill_n(scratch.sums + i * row_s, width, Sum{});
        for (std::int64_t k = 0; k < steps; ++k) {
            const Unit* const a = packed_a + (row / tile_m * steps + k) * a_step;
            const int depth = static_cast<int>(std::min<std::int64_t>(step, units - k * step));
            for (int j = 0; j < width; j += panel) {
                const Unit* const b = packed_b + (column + j) * units + k * step * panel;
                if constexpr (in_blocks)
                    multiply_blocks(a, skipped, rows, b, depth, first_row + row, first_column + column + j,
                                    k * Row::tile_k, scratch.sums + j);
                else
                    Block::template multiply<row_s>(k > 0, a, skipped, rows, b, depth, scratch.sums + j);
            }
        }
        finish<Row>(args, batch, scratch.sums, row_s, first_row + row, first_column + column, rows, columns);
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
    std::int64_t steps, rows_of_chunk, columns_of_chunk;
    Unit *packed_a, *packed_b;
    std::atomic<bool> out_of_memory = false;
};

}  // namespace catalog::host
