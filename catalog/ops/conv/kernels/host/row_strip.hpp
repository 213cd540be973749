// Some rows of a result whose whole depth is multiplied at once, in AMX tiles. Sums of a block become elements while the next
// block is multiplied. Elements are stored row by row, which memory takes faster than a panel of columns at a time; the lines
// that they will be stored to can be asked for meanwhile.
#pragma once

#include "host/around.hpp"
#include "host/tiles.hpp"

namespace catalog::host {

// CPUs with AMX have last caches of 100 MB and more, from which the next layer reads faster than from memory.
inline constexpr std::int64_t least_bytes_around_tiles = 64 << 20;

template <class Row, class Unit>
class RowStrip {
    using Result = typename Row::otype;
    using Sum = std::conditional_t<std::is_same_v<typename Units<Unit>::Sum, Float>, float, std::int32_t>;
    static constexpr int block = 2 * tile_rows, panel = 2 * tile_units, most_rows = 4 * block;
    static constexpr int most_elements = block * Row::tile_n;
    // Units of B that stay in the L1 cache: the panels of a step, and all of them, if rows of A are long.
    static constexpr int most_kept = 8 << 10, most_kept_beside_a = 4 << 10;
    static_assert(Row::warp_tile_m == block && Row::warp_tile_n == panel, "two tiles by two");

   public:
    // How many rows of some columns there is room for: whole blocks.
    static int rows_for(int columns) {
        return std::min(most_elements / round_up(columns, panel) / block * block, most_rows);
    }

    // The product of some rows of A and some columns of B, whose panels are `b_apart` units from each other. Asks for the
    // lines of rows that begin at `to`, if they will be stored there.
    template <class A, class Order>
    void multiply(const A* a, Order of_a, int rows, const Unit* b, std::int64_t b_apart, int depth, int of_columns,
                  Rows<Result> to = {}) {
        columns = of_columns;
        const bool keeps_all = depth * round_up(columns, panel) <= most_kept_beside_a;
        for (int row = 0; row < rows; row += block, a += of_a.rows_apart(block))
            for (int j = 0; j < columns; j += panel) {
                const Unit* const of_panel = b + j / panel * b_apart;
                if (rows - row > tile_rows && keeps_all)
                    multiply_tiles<false, 2, 2>(a, of_a, of_panel, panel, depth, sums, panel, narrowing(depth));
                else if (rows - row > tile_rows)
                    multiply_tiles<false, 2, 2, Passing::b>(a, of_a, of_panel, panel, depth, sums, panel, narrowing(depth));
                else
                    multiply_tiles<false, 1, 2, Passing::b>(a, of_a, of_panel, panel, depth, sums, panel, narrowing(depth));
                turn(row, std::min(rows - row, block), j, panel);
                if (to.data) waiting.asked = {to[row] + j, to.stride};
            }
        narrow(waiting.rows);
    }

    // The same, where rows of A are slow to load.
    template <class A, class Order>
    void multiply_slow(const A* a, Order of_a, int rows, const Unit* b, std::int64_t b_apart, int depth, int of_columns) {
        columns = of_columns;
        for (int row = 0; row < rows; row += tile_rows, a += of_a.rows_apart(tile_rows))
            for (int j = 0; j < columns;) {
                const Unit* const of_panel = b + j / panel * b_apart;
                const int width = j + panel < columns ? 2 * panel : panel;
                if (width > panel && depth * width <= most_kept)
                    multiply_row_of_tiles<false>(a, of_a, of_panel, panel, b_apart, depth, sums, width, narrowing(depth));
                else if (width > panel)
                    multiply_row_of_tiles<true>(a, of_a, of_panel, panel, b_apart, depth, sums, width, narrowing(depth));
                else
                    multiply_tiles<false, 1, 2, Passing::b>(a, of_a, of_panel, panel, depth, sums, width, narrowing(depth));
                turn(row, std::min(rows - row, tile_rows), j, width);
                j += width;
            }
        narrow(waiting.rows);
    }

    // Stores `count` rows from `first` on, which are `apart` elements from each other.
    void store(int first, int count, Result* to, std::int64_t apart, const Storing& storing) const {
        if (apart == columns && columns % panel == 0) return storing.copy(elements + first * columns, count * apart, to);
        for (int i = first; i < first + count; ++i, to += apart)
            storing.copy(elements + i * round_up(columns, panel), columns, to);
    }

    // Whether all sums were finite since the last call.
    bool were_finite() {
        const bool finite = reduce_sum((Float)odd) == 0;
        odd = Bits{};
        return finite;
    }

   private:
    // Rows of sums that are not yet elements.
    struct Waiting {
        const Sum* from = nullptr;
        Result* to = nullptr;
        int rows = 0, width = 0;
        Rows<Result> asked{};
    };

    // Narrows, at each step of the depth, as many of the waiting rows as are left for it.
    auto narrowing(int depth) {
        const int steps = std::max(depth / tile_units, 1), share = (waiting.rows + steps - 1) / steps;
        return [this, share] { narrow(share); };
    }

    // What changes with each vector is in registers meanwhile, not in members: they could be what is stored.
    void narrow(int rows) {
        rows = std::min(rows, waiting.rows);
        const int apart = round_up(columns, panel), width = waiting.width;
        const Sum* from = waiting.from;
        Result* to = waiting.to;
        Rows<Result> asked = waiting.asked;
        Bits seen = odd;
        for (int i = 0; i < rows; ++i, from += width, to += apart) {
            if (asked.data) {
                __builtin_prefetch(asked.data, 1);
                asked = asked.from(1);
            }
            for (int j = 0; j < width; j += panel)
#pragma GCC unroll 2
                for (int part = j; part < j + panel; part += lanes) {
                    const auto sum = load(from + part);
                    if constexpr (std::is_same_v<Unit, BrainPair> && std::is_same_v<Result, bf16>)
                        store_bits(to + part, Units<Unit>::narrow(sum));
                    else
                        host::store(to + part, sum);
                    if constexpr (std::is_same_v<Sum, float>) seen |= (Bits)(sum - sum);
                }
        }
        waiting = {from, to, waiting.rows - rows, width, asked};
        odd = seen;
    }

    // The sums of a block wait; those before, which are elements now, make room for the next.
    void turn(int row, int rows, int column, int width) {
        narrow(waiting.rows);
        waiting = {sums, elements + row * round_up(columns, panel) + column, rows, width};
        sums = sums == both ? both + block * panel : both;
    }

    alignas(64) Sum both[2 * block * panel];
    alignas(64) Result elements[most_elements];
    Sum* sums = both;
    Waiting waiting;
    Bits odd{};  // 0 where all sums are finite, and otherwise NaN
    int columns = 0;
};

}  // namespace catalog::host
