// The products that both GEMMs of attention are made of.
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "pack.hpp"

namespace catalog::host {

// C = start + A B with C held in registers: `rows` x `columns`. Element (row, k) of A is a[row * a_row + k * a_depth],
// so that a transposed A needs no copy; B has stride ldb. start(row, column) is the vector that an accumulator begins
// with.
template <int rows, int columns, int a_row, int a_depth, int ldc, class T, class Start>
inline void multiply_block(const float* a, const T* b, std::ptrdiff_t ldb, int depth, float* c, Start start) {
    constexpr int vectors = columns / lanes;
    Float acc[rows][vectors];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 16
        for (int j = 0; j < vectors; ++j) acc[r][j] = start(r, j * lanes);

    for (int k = 0; k < depth; ++k, b += ldb) {
        Float b_row[vectors];
#pragma GCC unroll 16
        for (int j = 0; j < vectors; ++j) b_row[j] = load(b + j * lanes);
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r)
#pragma GCC unroll 16
            for (int j = 0; j < vectors; ++j) acc[r][j] += a[r * a_row + k * a_depth] * b_row[j];
    }

#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 16
        for (int j = 0; j < vectors; ++j) store(c + r * ldc + j * lanes, acc[r][j]);
}

// body(std::integral_constant<int, size>, first_row) for blocks of `block` rows, then of half as many for the
// remainder: a decode step of one row runs a block of one row.
template <int block, class Body>
inline void for_row_blocks(int first, int rows, Body body) {
    for (; first + block <= rows; first += block) body(std::integral_constant<int, block>{}, first);
    if constexpr (block > 1) for_row_blocks<block / 2>(first, rows, body);
}

// What an accumulator begins with, given where its result will be stored.
inline constexpr auto from_zero = [](const float*) { return Float{}; };
inline constexpr auto from_c = [](const float* c) { return load(c); };

// C = start + A B for any number of rows and columns. The panel of B for column c begins at b + c * panel_stride and
// stays in L1 while all rows pass by.
template <int block_rows, int block_columns, int a_row, int a_depth, int ldc, class Start>
inline void multiply_panels(const float* a, const float* b, std::ptrdiff_t panel_stride, std::ptrdiff_t ldb, int rows,
                            int columns, int depth, float* c, Start start) {
    for (int column = 0; column < columns; column += block_columns)
        for_row_blocks<block_rows>(0, rows, [&](auto block, int row) {
            float* corner = c + row * ldc + column;
            multiply_block<block, block_columns, a_row, a_depth, ldc>(
                a + row * a_row, b + column * panel_stride, ldb, depth, corner,
                [&](int r, int j) { return start(corner + r * ldc + j); });
        });
}

// c[i] = a . b[i] for `lanes` rows of B: one accumulator a row, all reduced together. Rows behind `last` are read as
// `last`, so that their products need no tail code; nobody uses them.
template <class T>
inline void multiply_rows(const float* a, Rows<const T> b, int last, int depth, float* c) {
    const T* row[lanes];
    for (int i = 0; i < lanes; ++i) row[i] = b[std::min(i, last)];
    Float acc[lanes] = {};
    for (int k = 0; k < depth; k += lanes) {
        const Float a_k = load(a + k);
#pragma GCC unroll 16
        for (int i = 0; i < lanes; ++i) acc[i] += a_k * load(row[i] + k);
    }
    transpose(acc);
    Float sum = acc[0];
#pragma GCC unroll 16
    for (int i = 1; i < lanes; ++i) sum += acc[i];
    store(c, sum);
}

}  // namespace catalog::host
