// A product of few columns as its transpose, which has few rows: C^T = B^T A^T. So A is read once, and not copied.
#pragma once

#include <utility>

#include "epilogue.hpp"

namespace catalog::host {

inline constexpr int most_few_columns = 64;

inline catalog_args transposed(catalog_args args) {
    std::swap(args.a, args.b);
    std::swap(args.m, args.n);
    std::swap(args.scale_a, args.scale_b);
    return args;
}

// As finish(), of the transpose's sums and with its arguments.
template <class Row, class Sum>
__attribute__((noinline)) void finish_transposed(const catalog_args& args, std::int64_t batch, const Sum* sums,
                                                 std::int64_t lds, std::int64_t first_row, std::int64_t first_column,
                                                 int rows, int columns) {
    const catalog_args whole = transposed(args);
    alignas(64) Sum turned[lanes][most_few_columns];
    for (int column = 0; column < columns; column += lanes) {
        for (int i = 0; i < rows; i += lanes) {
            Float block[lanes] = {};  // the bits of either type of sums
            for (int r = 0; r < std::min(lanes, rows - i); ++r)
                std::memcpy(block + r, sums + (i + r) * lds + column, sizeof *block);
            transpose(block);
            for (int c = 0; c < lanes; ++c) std::memcpy(turned[c] + i, block + c, sizeof *block);
        }
        finish<Row>(whole, batch, turned[0], most_few_columns, first_column + column, first_row,
                    std::min(lanes, columns - column), rows);
    }
}

// The product of the transposed arguments.
template <class Product>
class OfTranspose {
   public:
    static constexpr bool exists = true;

    static std::int64_t tiles(const catalog_args& args) { return Product::tiles(transposed(args)); }

    OfTranspose(const catalog_args& args, std::int64_t batch, int threads)
        : args(transposed(args)), product(this->args, batch, threads, true) {}

    catalog_status run() { return product.run(); }

   private:
    const catalog_args args;
    Product product;
};

}  // namespace catalog::host
