// Matrix products of units in AMX tiles: the counterpart of multiply_block, over the same panels.
#pragma once

#include <type_traits>

#include "amx.hpp"
#include "halves.hpp"
#include "lines.hpp"

namespace catalog::host {

inline constexpr int tile_rows = 16, tile_units = 16;

// Where the tiles of A are, in units: the rows of a tile are `row` apart, and tiles `down` apart along the rows and `along`
// apart along the depth.
struct TileOrder {
    std::ptrdiff_t row, down, along;

    std::ptrdiff_t rows_apart(int rows) const { return rows / tile_rows * down; }

    // The tile of the rows with this number, `deep` units from the first.
    template <int tile, bool passes = false, class Unit>
    void load(const Unit* a, int number, int deep) const {
        amx::load<tile, passes>(a + number * down + deep / tile_units * along, row * sizeof(Unit));
    }
};

// The same in bytes, which need not be whole units. Along the depth, tiles are at any distances from the first.
struct ScatteredTiles {
    std::ptrdiff_t row;
    const std::ptrdiff_t* along;

    std::ptrdiff_t rows_apart(int rows) const { return rows * row; }

    template <int tile, bool passes = false>
    void load(const std::byte* a, int number, int deep) const {
        amx::load<tile, passes>(a + number * tile_rows * row + along[deep / tile_units], row);
    }
};

// Tiles of rows that are `stride` units apart.
constexpr TileOrder tiles_of_rows(std::ptrdiff_t stride) { return {stride, tile_rows * stride, tile_units}; }

// Units along the depth that are multiplied together.
template <class Unit>
inline constexpr int whole_units = (std::is_same_v<Unit, SplitHalf> ? 2 : 1) * tile_units;

template <class Unit, int c, int a, int b>
inline void multiply_add_tiles() {
    if constexpr (std::is_same_v<Unit, ByteQuad>)
        amx::multiply_add_bytes<c, a, b>();
    else if constexpr (std::is_same_v<Unit, HalfPair>)
        amx::multiply_add_half_pairs<c, a, b>();
    else
        amx::multiply_add_pairs<c, a, b>();
}

// Which products of the parts of SplitHalf are made. All: the product is exact. Without those of lower parts with each other,
// it may be off by 2^-16 of itself, and takes three quarters of the time.
enum class PartProducts { all, large };

// Adds the products of a tile's parts to tiles 0 to 3, small ones first.
template <int down, int across, PartProducts parts>
inline void multiply_parts(const SplitHalf* a, TileOrder of_a, const SplitHalf* b, std::ptrdiff_t ldb) {
    const auto load_a = [&](const SplitHalf* from) {
        amx::load<4>(from, of_a.row * sizeof(SplitHalf));
        if constexpr (down > 1) amx::load<5>(from + of_a.down, of_a.row * sizeof(SplitHalf));
    };
    const auto load_b = [&](const SplitHalf* from) {
        amx::load<6>(from, ldb * sizeof(SplitHalf));
        if constexpr (across > 1) amx::load<7>(from + tile_units, ldb * sizeof(SplitHalf));
    };
    const auto multiply = [] {
        multiply_add_tiles<SplitHalf, 0, 4, 6>();
        if constexpr (across > 1) multiply_add_tiles<SplitHalf, 1, 4, 7>();
        if constexpr (down > 1) multiply_add_tiles<SplitHalf, 2, 5, 6>();
        if constexpr (down > 1 && across > 1) multiply_add_tiles<SplitHalf, 3, 5, 7>();
    };
    const SplitHalf *const lower_a = a + of_a.along, *const lower_b = b + tile_units * ldb;
    load_a(lower_a);
    if constexpr (parts == PartProducts::all) {
        load_b(lower_b);
        multiply();
    }
    load_b(b);
    multiply();
    load_a(a);
    multiply();
    load_b(lower_b);
    multiply();
}

// A tile of a factor that is read past the L1 cache.
template <int tile>
inline void load_passing(const void* from, std::size_t stride) {
    amx::load<tile, true>(from, stride);
}

// Which factor is read past the L1 cache, so that the other one, which fits, stays there. On a Xeon, products take a fifth less
// time than with tiles of both from the L2 cache.
enum class Passing { neither, a, b };

// C = A B, or C = D + A B: C has 16 rows for each of `down` tiles, and 16 columns for each of `across`. The depth is in units,
// a multiple of whole_units; rows of B are `ldb` units apart, those of C and D `ldc` and `ldd` sums. Needs amx::Tiles.
// Prefetching the tiles of the next rows would take a quarter longer: as many further loads delay those that products wait
// for. Calls beside() after the products of each step of the depth: other instructions run while tiles are multiplied.
template <bool adds, int down, int across, Passing passing = Passing::neither, PartProducts parts = PartProducts::all, class A,
          class Order, class Unit, class Sum, class Beside = NothingBeside>
inline void add_tiles(const A* a, Order of_a, const Unit* b, std::ptrdiff_t ldb, int depth, const Sum* d, std::ptrdiff_t ldd,
                      Sum* c, std::ptrdiff_t ldc, Beside beside = {}) {
    static_assert(down >= 1 && down <= 2 && across >= 1 && across <= 2, "four tiles of C, two of A, two of B");
    static_assert(sizeof(Unit) == 4 && sizeof(Sum) == 4);
    const auto each_tile = [](auto visit) {
        visit(std::integral_constant<int, 0>{}, 0, 0);
        if constexpr (across > 1) visit(std::integral_constant<int, 1>{}, 0, tile_rows);
        if constexpr (down > 1) visit(std::integral_constant<int, 2>{}, tile_rows, 0);
        if constexpr (down > 1 && across > 1) visit(std::integral_constant<int, 3>{}, tile_rows, tile_rows);
    };
    each_tile([&](auto tile, [[maybe_unused]] int row, [[maybe_unused]] int column) {
        if constexpr (adds)
            amx::load<tile>(d + row * ldd + column, ldd * sizeof(Sum));
        else
            amx::clear<tile>();
    });
    for (int k = 0; k < depth; k += whole_units<Unit>) {
        const Unit* const b_k = b + k * ldb;
        if constexpr (std::is_same_v<Unit, SplitHalf>) {
            multiply_parts<down, across, parts>(a + k / tile_units * of_a.along, of_a, b_k, ldb);
        } else {
            constexpr bool a_passes = passing == Passing::a, b_passes = passing == Passing::b;
            amx::load<6, b_passes>(b_k, ldb * sizeof(Unit));
            of_a.template load<4, a_passes>(a, 0, k);
            multiply_add_tiles<Unit, 0, 4, 6>();
            if constexpr (across > 1) {
                amx::load<7, b_passes>(b_k + tile_units, ldb * sizeof(Unit));
                multiply_add_tiles<Unit, 1, 4, 7>();
            }
            if constexpr (down > 1) {
                of_a.template load<5, a_passes>(a, 1, k);
                multiply_add_tiles<Unit, 2, 5, 6>();
            }
            if constexpr (down > 1 && across > 1) multiply_add_tiles<Unit, 3, 5, 7>();
        }
        beside();
    }
    each_tile([&](auto tile, int row, int column) { amx::store<tile>(c + row * ldc + column, ldc * sizeof(Sum)); });
}

// C = A B, or C += A B.
template <bool adds, int down, int across, Passing passing = Passing::neither, PartProducts parts = PartProducts::all, class A,
          class Order, class Unit, class Sum, class Beside = NothingBeside>
inline void multiply_tiles(const A* a, Order of_a, const Unit* b, std::ptrdiff_t ldb, int depth, Sum* c,
                           std::ptrdiff_t ldc, Beside beside = {}) {
    add_tiles<adds, down, across, passing, parts>(a, of_a, b, ldb, depth, c, ldc, c, ldc, beside);
}

// The same for 16 rows of A and two tiles of columns of each of two panels of B, which are `ldb` units wide and `b_apart` from
// each other. A tile of A is loaded once for four products: for rows that are slow to load, as lines that lie in two cache
// lines each. `passes`: B is read past the L1 cache.
template <bool passes, class A, class Order, class Unit, class Sum, class Beside>
inline void multiply_row_of_tiles(const A* a, Order of_a, const Unit* b, std::ptrdiff_t ldb, std::ptrdiff_t b_apart, int depth,
                                  Sum* c, std::ptrdiff_t ldc, Beside beside) {
    static_assert(!std::is_same_v<Unit, SplitHalf> && sizeof(Unit) == 4 && sizeof(Sum) == 4);
    amx::clear<0>(), amx::clear<1>(), amx::clear<2>(), amx::clear<3>();
    for (int k = 0; k < depth; k += tile_units, b += tile_units * ldb) {
        const std::size_t stride = ldb * sizeof(Unit);
        of_a.template load<4>(a, 0, k);
        amx::load<5, passes>(b, stride);
        multiply_add_tiles<Unit, 0, 4, 5>();
        amx::load<6, passes>(b + tile_units, stride);
        multiply_add_tiles<Unit, 1, 4, 6>();
        amx::load<7, passes>(b + b_apart, stride);
        multiply_add_tiles<Unit, 2, 4, 7>();
        amx::load<5, passes>(b + b_apart + tile_units, stride);
        multiply_add_tiles<Unit, 3, 4, 5>();
        beside();
    }
    const std::size_t stride = ldc * sizeof(Sum);
    amx::store<0>(c, stride), amx::store<1>(c + tile_units, stride);
    amx::store<2>(c + 2 * tile_units, stride), amx::store<3>(c + 3 * tile_units, stride);
}

// The products of rows of A with two tiles of columns, each of which has rows of its own or, if `shares`, those of `first`. B has
// a tile for each of these columns at each step of the depth, and C 16 rows for each of `down` tiles and 32 columns. B is read
// past the L1 cache.
template <int down, bool shares, class Unit, class Beside>
inline void multiply_two_columns(const std::byte* first, const std::byte* second, ScatteredTiles of_a, int steps, const Unit* b,
                                 float* c, Beside beside) {
    static_assert(!std::is_same_v<Unit, SplitHalf> && sizeof(Unit) == 4 && down >= 1 && down <= 2);
    constexpr int of_tile = tile_units * tile_units, columns = 2 * tile_units;
    amx::clear<0>(), amx::clear<1>();
    if constexpr (down > 1) amx::clear<2>(), amx::clear<3>();
    for (int k = 0; k < steps * tile_units; k += tile_units, b += 2 * of_tile) {
        load_passing<6>(b, tile_units * sizeof(Unit));
        of_a.load<4>(first, 0, k);
        multiply_add_tiles<Unit, 0, 4, 6>();
        if constexpr (down > 1) {
            of_a.load<5>(first, 1, k);
            multiply_add_tiles<Unit, 2, 5, 6>();
        }
        load_passing<7>(b + of_tile, tile_units * sizeof(Unit));
        if constexpr (!shares) of_a.load<4>(second, 0, k);
        multiply_add_tiles<Unit, 1, 4, 7>();
        if constexpr (down > 1) {
            if constexpr (!shares) of_a.load<5>(second, 1, k);
            multiply_add_tiles<Unit, 3, 5, 7>();
        }
        beside();
    }
    constexpr std::size_t stride = columns * sizeof(float);
    amx::store<0>(c, stride), amx::store<1>(c + tile_units, stride);
    if constexpr (down > 1) {
        amx::store<2>(c + tile_rows * columns, stride);
        amx::store<3>(c + tile_rows * columns + tile_units, stride);
    }
}

// Of `blocks` 16 rows and as many columns each, C[t] += A B[t], of which at most three share A. Only rows and columns of the
// same number are multiplied: rows of A are `lda` units apart, those of B and C two tiles. B is read past the L1 cache.
template <int count, int blocks, class Unit>
inline void multiply_diagonal(const Unit* a, std::ptrdiff_t lda, const Unit* const (&b)[3], int depth, float* const (&c)[3]) {
    static_assert(count >= 1 && count <= 3 && blocks >= 1 && blocks <= 2 && !std::is_same_v<Unit, SplitHalf>);
    constexpr int ld = 2 * tile_units;
    constexpr std::size_t stride = ld * sizeof(Unit);
    const auto each = [](auto visit) {
        visit(std::integral_constant<int, 0>{});
        if constexpr (count > 1) visit(std::integral_constant<int, 1>{});
        if constexpr (count > 2) visit(std::integral_constant<int, 2>{});
    };
    const auto diagonal = [](int block) { return block * (tile_rows * ld + tile_units); };
    each([&](auto t) {
        amx::load<t>(c[t], stride);
        if constexpr (blocks > 1) amx::load<3 + t>(c[t] + diagonal(1), stride);
    });
    for (int k = 0; k < depth; k += tile_units) {
        amx::load<6>(a + k, lda * sizeof(Unit));
        each([&](auto t) {
            load_passing<7>(b[t] + k * ld, stride);
            multiply_add_tiles<Unit, t, 6, 7>();
        });
        if constexpr (blocks > 1) {
            amx::load<6>(a + tile_rows * lda + k, lda * sizeof(Unit));
            each([&](auto t) {
                load_passing<7>(b[t] + k * ld + tile_units, stride);
                multiply_add_tiles<Unit, 3 + t, 6, 7>();
            });
        }
    }
    each([&](auto t) {
        amx::store<t>(c[t], stride);
        if constexpr (blocks > 1) amx::store<3 + t>(c[t] + diagonal(1), stride);
    });
}

}  // namespace catalog::host
