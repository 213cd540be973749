// A product of few columns as its transpose, which has few rows: C^T = B^T A^T. So A is read once, and not copied.
#pragma once

#include <utility>

#include "epilogue.hpp"

namespace catalog::host {

// The row that multiplies the transpose: factors and extents have changed places.
template <class Row>
struct TransposedRow : Row {
    using Original = Row;
    static_assert(scales_of<Row> != Scales::block, "blocks of A and B have different shapes");
    static constexpr bool a_along = Row::b_along, b_along = Row::a_along;
    static constexpr int tile_m = Row::tile_n, tile_n = Row::tile_m;
    static constexpr int warp_tile_m = Row::warp_tile_n, warp_tile_n = Row::warp_tile_m;
};

template <class Row>
inline constexpr bool is_transposed = false;
template <class Row>
inline constexpr bool is_transposed<TransposedRow<Row>> = true;

inline catalog_args transposed(catalog_args args) {
    std::swap(args.a, args.b);
    std::swap(args.m, args.n);
    std::swap(args.scale_a, args.scale_b);
    return args;
}

// Whether the only column of C, and those of the D tensors, are contiguous, and have no bias: then they are rows.
template <class Row>
inline bool is_column_in_place(const catalog_args& args) {
    return args.n == 1 && args.c.stride_outer == 1 && !args.bias.data && (Row::num_d < 1 || args.d0.stride_outer == 1) &&
           (Row::num_d < 2 || args.d1.stride_outer == 1);
}

// As finish(), of the sums of a transposed row and with its arguments.
template <class Transposed, class Sum>
__attribute__((noinline)) void finish_transposed(const catalog_args& args, std::int64_t batch, const Sum* sums,
                                                 std::int64_t lds, std::int64_t first_row, std::int64_t first_column,
                                                 int rows, int columns) {
    using Row = typename Transposed::Original;
    const catalog_args whole = transposed(args);
    if (is_column_in_place<Row>(whole))
        return finish<Row>(args, batch, sums, lds, first_row, first_column, rows, columns);
    alignas(64) Sum turned[lanes][Row::tile_n];
    for (int column = 0; column < columns; column += lanes) {
        for (int i = 0; i < rows; i += lanes) {
            Float block[lanes] = {};  // the bits of either type of sums
            for (int r = 0; r < std::min(lanes, rows - i); ++r)
                std::memcpy(block + r, sums + (i + r) * lds + column, sizeof *block);
            transpose(block);
            for (int c = 0; c < lanes; ++c) std::memcpy(turned[c] + i, block + c, sizeof *block);
        }
        finish<Row>(whole, batch, turned[0], Row::tile_n, first_column + column, first_row,
                    std::min(lanes, columns - column), rows);
    }
}

// The product of the transposed arguments.
template <class Product>
class OfTranspose {
   public:
    static std::int64_t tiles(const catalog_args& args) { return Product::tiles(transposed(args)); }

    OfTranspose(const catalog_args& args, std::int64_t batch, int threads)
        : args(transposed(args)), product(this->args, batch, threads) {}

    catalog_status run() { return product.run(); }

   private:
    const catalog_args args;
    Product product;
};

}  // namespace catalog::host
