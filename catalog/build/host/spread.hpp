// Products of few rows of A in AMX tiles with rows of B as they lie in memory. Each row of A has two rows of a tile, in which its
// elements have zeros beside them: after them in the first, before them in the second. So pairs of neighbouring columns of B
// need not become pairs of rows: twice the products take less time than that.
#pragma once

#include "tiles.hpp"

namespace catalog::host {

inline constexpr int most_spread_rows = tile_rows / 2;
inline constexpr int spread_depth = tile_rows;         // elements along the depth of a tile of A
inline constexpr int spread_columns = 2 * tile_units;  // of a tile of B, whose rows are pairs of columns
inline constexpr int most_spread_panels = 4;           // that are multiplied at a time: a tile of C each
inline constexpr int of_spread_tile = tile_rows * tile_units;

// Whether a unit is a pair of such elements: a tile has the bits of either 16-bit type.
template <class Unit>
inline constexpr bool is_spreadable = std::is_same_v<Unit, BrainPair> || std::is_same_v<Unit, HalfPair>;

#if defined(CATALOG_BRAIN_PAIRS)

// A row of A for `steps` tiles, which follow each other.
template <class Unit>
inline void spread_row(const Unit* pairs, int steps, int row, Unit* tiles) {
    for (int step = 0; step < steps; ++step, pairs += spread_depth / 2, tiles += of_spread_tile) {
        const Bits second = (Bits)load(reinterpret_cast<const bf16*>(pairs));
        store_bits(tiles + 2 * row * tile_units, second >> 16);
        store_bits(tiles + (2 * row + 1) * tile_units, second);
    }
}

#endif

// Where the rows of a tile of B are.
struct SpreadLines {
    const std::byte* first;
    std::ptrdiff_t stride;  // in bytes
};

// Sums of some rows: a tile for each panel of `spread_columns`.
struct SpreadSums {
    const float* tiles;
    int rows, columns;

    // Calls visit(row, column, sums) for vectors of sums, in the order of the columns.
    template <class Visit>
    void for_vectors(Visit visit) const {
        for (int row = 0; row < rows; ++row)
            for (int column = 0; column < columns; column += spread_columns) {
                const float* const pair = tiles + (column / spread_columns * tile_rows + 2 * row) * tile_units;
                const Float even = load(pair), odd = load(pair + tile_units);
                visit(row, column, permute<InterleaveLow<>>(even, odd));
                visit(row, column + lanes, permute<InterleaveHigh<>>(even, odd));
            }
    }

    // Otherwise an infinite element of B may have met a zero in the sum of the neighbouring column.
    bool are_finite() const {
        Float differences{};
        for_vectors([&](int, int, Float sums) { differences += sums - sums; });
        return reduce_sum(differences) == 0;
    }
};

// C = A B, or C += A B, of spread rows and `across` panels of columns. lines_of(step) are the SpreadLines of a step of the
// depth. Calls beside() after each product.
template <bool adds, int across, class Unit, class LinesOf, class Beside>
inline void multiply_spread(const Unit* a, int steps, LinesOf lines_of, float* c, Beside beside) {
    static_assert(is_spreadable<Unit> && across >= 1 && across <= most_spread_panels);
    constexpr int line = tile_units * static_cast<int>(sizeof(Unit));
    const auto each_of_c = [](auto visit) {
        visit(std::integral_constant<int, 0>{});
        if constexpr (across > 1) visit(std::integral_constant<int, 1>{});
        if constexpr (across > 2) visit(std::integral_constant<int, 2>{});
        if constexpr (across > 3) visit(std::integral_constant<int, 3>{});
    };
    each_of_c([&](auto tile) {
        if constexpr (adds)
            amx::load<tile>(c + tile * of_spread_tile, line);
        else
            amx::clear<tile>();
    });
    for (int step = 0; step < steps; ++step, a += of_spread_tile) {
        const SpreadLines b = lines_of(step);
        amx::load<4>(a, line);
        each_of_c([&](auto tile) {
            constexpr int of_b = 5 + tile % 3;
            amx::load<of_b>(b.first + tile * line, b.stride);
            multiply_add_tiles<Unit, tile, 4, of_b>();
            beside();
        });
    }
    each_of_c([&](auto tile) { amx::store<tile>(c + tile * of_spread_tile, line); });
}

}  // namespace catalog::host
