// The product of few rows in AMX tiles, where the rows of B are contiguous: a few of them at a time are read side by side,
// in long pieces. They become panels in L2, which are multiplied before the next rows are read. For up to eight rows of A they
// are multiplied where they lie (spread.hpp).
#pragma once

#include <algorithm>
#include <atomic>

#include "epilogue.hpp"
#include "host/blocks.hpp"
#include "host/spread.hpp"
#include "host/threads.hpp"

namespace catalog::host {

template <class Row, class Unit>
class PanelStream {
    using T = typename Row::dtype;
    using Sum = SumOf<Row, Unit>;
    using Block = TileBlocks<Row, Unit>;
    static constexpr int factors = Block::factors, panel = Block::panel;
    static constexpr int most_columns = 2048;      // that a thread multiplies at a time, whose sums stay in L2
    static constexpr int depth = 2 * tile_units;   // units of a panel
    static constexpr std::int64_t most_rows = 64;  // with more, it takes less time to pack B once
    // Rows of B that are read side by side, and the units they become. With 16 instead of 8, it takes a sixth longer.
    static constexpr int piece = std::is_same_v<ReadUnit<Unit>, Unit> ? std::max(8 / factors, 1) : Block::whole;
    static constexpr std::int64_t reads = piece * factors;
    static constexpr std::int64_t deep = depth * factors;  // rows of B that a panel has
    static_assert(depth % Block::whole == 0 && Block::step % depth == 0 && depth % piece == 0);
    static_assert(most_rows <= Row::tile_m, "rows of A are packed as one tile of C");

    static constexpr bool can_spread = is_spreadable<Unit> && holds_neighbours<Unit, T>;
    static constexpr std::int64_t spread_step = Row::tile_k / spread_depth * of_spread_tile;
    static_assert(!can_spread || panel == spread_columns);

    struct Scratch {
        static constexpr int row_s = most_columns + 16;
        alignas(64) Sum sums[most_rows * row_s];
        alignas(64) Unit panels[depth * most_columns];
        alignas(64) float of_spread[can_spread ? most_columns / panel * of_spread_tile : 1];
    };

   public:
    static constexpr bool exists = scales_of<Row> != Scales::block;

    static bool takes(const catalog_args& args) { return args.m <= most_rows && args.n >= panel; }

    static std::int64_t tiles(const catalog_args& args) { return (args.n + most_columns - 1) / most_columns; }

    PanelStream(const catalog_args& args, std::int64_t batch, int threads) : args(args), batch(batch), threads(threads) {}

    catalog_status run() {
        const std::int64_t steps = (args.k + Row::tile_k - 1) / Row::tile_k;
        const auto rows = static_cast<int>(args.m);
        const bool spreads = can_spread && rows <= most_spread_rows;
        Room<Unit>& room = thread_room<struct PackedA, Unit>();
        packed_a = room.reserve(steps * (Block::a_step + (spreads ? spread_step : 0)) + 1);
        if (!packed_a) return CATALOG_NO_MEMORY;
        spread_a = packed_a + steps * Block::a_step;
        parallel_for(args, threads, steps, [&](std::int64_t index) {
            const std::int64_t k = index * Row::tile_k, depth = std::min<std::int64_t>(args.k - k, Row::tile_k);
            Unit* const packed = packed_a + index * Block::a_step;
            Block::pack_a(factor_of<Row::a_along, T>(args.a, batch).from(0, k), rows, depth, packed);
            if constexpr (can_spread)
                for (int row = 0; spreads && row < rows; ++row)
                    spread_row(packed + row * Block::a_row, spread_steps(depth), row, spread_a + index * spread_step);
        });
        std::atomic<bool> out_of_memory = false;
        const std::int64_t width = width_of_shares(args.n, most_columns, threads);
        parallel_for(args, threads, (args.n + width - 1) / width, [&](std::int64_t share) {
            Scratch* const scratch = thread_scratch<Scratch>();
            if (!scratch) return void(out_of_memory = true);
            [[maybe_unused]] const amx::Tiles state;
            const std::int64_t column = share * width;
            const int columns = static_cast<int>(std::min(width, args.n - column));
            const auto b = factor_of<false, T>(args.b, batch).from(column, 0);
            bool multiplied = false;
            if constexpr (can_spread) multiplied = spreads && multiply_in_place(*scratch, b, columns);
            if (!multiplied) multiply(*scratch, b, columns);
            finish<Row>(args, batch, scratch->sums, Scratch::row_s, 0, column, rows, columns);
        });
        room.release_above(kept_units);
        return out_of_memory ? CATALOG_NO_MEMORY : CATALOG_OK;
    }

   private:
    // `b` begins with the first of the columns.
    void multiply(Scratch& scratch, Factor<false, T> b, int columns) const {
        const int rows = static_cast<int>(args.m);
        if (args.k == 0)
            for (int i = 0; i < rows; ++i) std::fill_n(scratch.sums + i * Scratch::row_s, columns, Sum{});
        for (std::int64_t k = 0; k < args.k; k += deep) {
            const std::int64_t left = args.k - k;
            const int units = pack(b.from(0, k), columns, left, scratch.panels);
            const Unit* const a = packed_a + k / Row::tile_k * Block::a_step + k % Row::tile_k / factors;
            // Memory stays busy meanwhile: it is asked for what follows the rows that were asked for already.
            Lines next(b.from(0, k + std::min(left, deep + reads)), columns, std::min(left - deep - reads, reads));
            for (int column = 0; column < columns; column += panel) {
                next.ask(static_cast<int>(reads * panel * sizeof(T) / 64));
                Block::template multiply<Scratch::row_s>(k > 0, a, 0, rows, scratch.panels + column * depth, units,
                                                         scratch.sums + column);
            }
        }
    }

    // The same with spread rows of A. False: some sum is no number.
    bool multiply_in_place(Scratch& scratch, Factor<false, T> b, int columns) const {
        const int panels = (columns + panel - 1) / panel;
        std::fill_n(scratch.of_spread, panels * of_spread_tile, 0.0f);
        for (std::int64_t k = 0; k < args.k; k += deep) {
            const std::int64_t left = args.k - k;
            Lines next(b.from(0, k + std::min(left, deep)), columns, std::min(left - deep, deep));
            for_blocks<most_spread_panels, 2, 1>(0, panels, [&](auto across, int first) {
                const int width = std::min(across * panel, columns - first * panel);
                const auto lines_of_step = [&](int step) -> SpreadLines {
                    const auto from = b.from(first * panel, k + step * spread_depth);
                    const std::int64_t rows = std::min<std::int64_t>(left - step * spread_depth, spread_depth);
                    if (rows < spread_depth || width < across * panel) return copy_of(scratch, from, rows, width);
                    return {reinterpret_cast<const std::byte*>(from.data), from.stride * std::ptrdiff_t{sizeof(T)}};
                };
                multiply_spread<true, across>(spread_a + k / spread_depth * of_spread_tile, spread_steps(std::min(left, deep)),
                                              lines_of_step, scratch.of_spread + first * of_spread_tile,
                                              [&] { next.ask(spread_depth); });
            });
        }
        const SpreadSums sums{scratch.of_spread, static_cast<int>(args.m), panels * panel};
        if (!sums.are_finite()) return false;
        sums.for_vectors([&](int row, int column, Float sum) { store(scratch.sums + row * Scratch::row_s + column, sum); });
        return true;
    }

    static int spread_steps(std::int64_t depth) { return static_cast<int>((depth + spread_depth - 1) / spread_depth); }

    // Of fewer rows or columns than tiles have, with zeros after them.
    static SpreadLines copy_of(Scratch& scratch, Factor<false, T> from, std::int64_t rows, int columns) {
        constexpr std::ptrdiff_t width = most_spread_panels * panel;
        static_assert(spread_depth * width * sizeof(T) <= sizeof scratch.panels);
        T* const copies = reinterpret_cast<T*>(scratch.panels);
        std::fill_n(copies, spread_depth * width, T{});
        for (std::int64_t row = 0; row < rows; ++row) std::copy_n(from.from(0, row).data, columns, copies + row * width);
        return {reinterpret_cast<const std::byte*>(copies), width * std::ptrdiff_t{sizeof(T)}};
    }

    // Some rows, line by line, one row after the other.
    class Lines {
       public:
        Lines(Factor<false, T> first, int columns, std::int64_t rows) : row(first), width(columns), left(rows) {}

        void ask(int lines) {
            for (; lines > 0 && left > 0; --lines) {
                prefetch_later(row.data + at);
                if ((at += line) < width) continue;
                at = 0, row = row.from(0, 1), --left;
            }
        }

       private:
        static constexpr int line = 64 / sizeof(T);
        Factor<false, T> row;
        int width, at = 0;
        std::int64_t left;
    };

    // Panels of the columns, of all of the `left` rows or a whole depth; how many units they have.
    static int pack(Factor<false, T> from, int columns, std::int64_t left, Unit* panels) {
        constexpr std::int64_t whole = Block::whole * factors;
        const std::int64_t rows = std::min(left, deep);
        const int units = static_cast<int>((rows + whole - 1) / whole * Block::whole);
        for (int unit = 0; unit < units; unit += piece) {
            const std::int64_t first = std::min<std::int64_t>(unit * factors, rows), count = std::min(rows - first, reads);
            const bool has_next = left - first >= 2 * reads;
            for (int column = 0; column < columns; column += panel) {
                const auto source = from.from(column, first);
                if (has_next)
#pragma GCC unroll 8
                    for (std::int64_t row = 0; row < reads; ++row) prefetch_later(source.from(0, reads + row).data);
                pack_panel<Unit, panel>(source, std::min(columns - column, panel), count, piece,
                                        panels + column * depth + unit * panel);
            }
        }
        return units;
    }

    const catalog_args& args;
    const std::int64_t batch;
    const int threads;
    Unit *packed_a = nullptr, *spread_a = nullptr;
};

}  // namespace catalog::host
