// The product of few rows in AMX tiles. Columns of B are tiles as they lie in the tensor, which is read once; rows of A are
// packed instead, and what is summed is the transpose of C.
#pragma once

#include <algorithm>
#include <atomic>

#include "epilogue.hpp"
#include "host/blocks.hpp"
#include "host/threads.hpp"

namespace catalog::host {

template <class Row, class Unit>
class TileStream {
    using T = typename Row::dtype;
    using Sum = SumOf<Row, Unit>;
    static constexpr int factors = Units<Unit>::depth;
    static constexpr int columns = 2 * tile_rows;   // of B, which a thread multiplies at a time
    static constexpr int most_across = 2;           // tiles beside each other that rows of A fill
    static constexpr int chunk = 256;               // units of a column that stay in L1 until all rows are multiplied
    static constexpr std::int64_t at_once = 128;    // rows of A, whose sums stay in L1
    // It takes less time to pack B if there are more rows, or A is so large that it would be read from the L3 cache for each
    // panel, or if the depth is short, there are more than few rows, and B is small: a large one is better read from memory once.
    static constexpr std::int64_t most_rows = 384, most_packed = 1 << 19, short_depth = 512, few_rows = 32, small = 1 << 20;

    struct Scratch {
        static constexpr int row_s = columns + 16, width = most_across * tile_rows;
        alignas(64) Sum sums[at_once / width][columns * width];  // of the transpose
        alignas(64) Sum turned[width * row_s];
        alignas(64) Unit rest[columns * tile_units];
    };

   public:
    static constexpr bool exists = holds_neighbours<Unit, T> && scales_of<Row> != Scales::block;

    static bool takes(const catalog_args& args) {
        if (args.k <= short_depth && (args.m > at_once || (args.m > few_rows && args.n * args.k < small))) return false;
        if (args.m > at_once && (args.m > most_rows || args.m * args.k > most_packed)) return false;
        return args.n >= columns && args.b.stride_outer % factors == 0;
    }

    static std::int64_t tiles(const catalog_args& args) {
        return (args.m + at_once - 1) / at_once * ((args.n + columns - 1) / columns);
    }

    TileStream(const catalog_args& args, std::int64_t batch, int threads)
        : args(args),
          batch(batch),
          threads(threads),
          units(args.k / deep * tile_units),
          rest(args.k % deep),
          all_units(units + (rest ? tile_units : 0)) {}

    catalog_status run() { return args.m <= tile_rows ? stream<1>() : stream<most_across>(); }

   private:
    static constexpr std::int64_t deep = factors * tile_units;  // elements along the depth of a tile

    template <int across>
    catalog_status stream() {
        constexpr int width = across * tile_rows;
        const std::int64_t panels = (args.m + width - 1) / width;
        Room<Unit>& room = thread_room<struct PackedA, Unit>();
        Unit* const packed = room.reserve(panels * all_units * width + 1);
        if (!packed) return CATALOG_NO_MEMORY;
        const auto a = factor_of<Row::a_along, T>(args.a, batch);
        const std::int64_t pieces = (all_units + chunk - 1) / chunk;
        parallel_for(args, threads, panels * pieces, [&](std::int64_t task) {
            const std::int64_t row = task / pieces * width, first = task % pieces * chunk, k = first * factors;
            const std::int64_t count = std::min<std::int64_t>(chunk, all_units - first);
            pack_panel<Unit, width>(a.from(row, k), static_cast<int>(std::min<std::int64_t>(width, args.m - row)),
                                    std::min<std::int64_t>(args.k - k, count * factors), count,
                                    packed + (task / pieces * all_units + first) * width);
        });
        std::atomic<bool> out_of_memory = false;
        constexpr std::int64_t panels_at_once = at_once / width;
        const std::int64_t blocks = (panels + panels_at_once - 1) / panels_at_once;
        parallel_for(args, threads, tiles(args), [&](std::int64_t item) {
            Scratch* const scratch = thread_scratch<Scratch>();
            if (!scratch) return void(out_of_memory = true);
            [[maybe_unused]] const amx::Tiles state;
            const std::int64_t begin = item / blocks * columns, first = item % blocks * panels_at_once;
            const std::int64_t count = std::min(panels_at_once, panels - first);
            // The last columns are those before the end, some of which are known already.
            const std::int64_t column = std::min<std::int64_t>(begin, args.n - columns);
            multiply<across>(*scratch, column, count, packed + first * all_units * width);
            store<across>(*scratch, column, static_cast<int>(begin - column), first * width, count);
        });
        room.release_above(kept_units);
        return out_of_memory ? CATALOG_NO_MEMORY : CATALOG_OK;
    }

    template <int across>
    void multiply(Scratch& scratch, std::int64_t column, std::int64_t panels, const Unit* packed) const {
        constexpr int width = across * tile_rows;
        const auto b = factor_of<true, T>(args.b, batch).from(column, 0);
        const std::ptrdiff_t apart = b.stride / factors;
        const auto each_panel = [&](std::int64_t first, const Unit* from, TileOrder order, int depth) {
            for (std::int64_t i = 0; i < panels; ++i) {
                const Unit* const of_a = packed + (i * all_units + first) * width;
                if (first > 0)
                    multiply_tiles<true, 2, across>(from, order, of_a, width, depth, scratch.sums[i], width);
                else
                    multiply_tiles<false, 2, across>(from, order, of_a, width, depth, scratch.sums[i], width);
            }
        };
        if (all_units == 0)
            for (std::int64_t i = 0; i < panels; ++i) std::fill_n(scratch.sums[i], columns * width, Sum{});
        const std::int64_t length = panels > 1 ? chunk : units;
        for (std::int64_t first = 0; first < units; first += length)
            each_panel(first, reinterpret_cast<const Unit*>(b.data) + first, tiles_of_rows(apart),
                       static_cast<int>(std::min(length, units - first)));
        if (rest) {
            // What follows in memory may be NaN, and so would its product with zero be.
            pack_rows(b.from(0, units * factors), columns, rest, scratch.rest, tile_units);
            each_panel(units, scratch.rest, tiles_of_rows(tile_units), tile_units);
        }
    }

    template <int across>
    void store(Scratch& scratch, std::int64_t column, int known, std::int64_t first_row, std::int64_t panels) const {
        constexpr int width = across * tile_rows, row_s = Scratch::row_s;
        for (std::int64_t i = 0; i < panels; ++i) {
            for (int row = 0; row < width; row += lanes)
                for (int j = 0; j < columns; j += lanes) {
                    Float block[lanes];
                    for (int c = 0; c < lanes; ++c)
                        std::memcpy(block + c, scratch.sums[i] + (j + c) * width + row, sizeof *block);
                    transpose(block);
                    for (int r = 0; r < lanes; ++r)
                        std::memcpy(scratch.turned + (row + r) * row_s + j, block + r, sizeof *block);
                }
            const std::int64_t row = first_row + i * width;
            finish<Row>(args, batch, scratch.turned + known, row_s, row, column + known,
                        static_cast<int>(std::min<std::int64_t>(width, args.m - row)), columns - known);
        }
    }

    const catalog_args& args;
    const std::int64_t batch;
    const int threads;
    const std::int64_t units, rest, all_units;  // of whole tiles along the depth, elements after them, and units of both
};

}  // namespace catalog::host
