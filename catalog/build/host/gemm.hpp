// The products that both GEMMs of attention are made of.
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "pack.hpp"

namespace catalog::host {

// C = start + A B with C held in registers: `rows` x `columns`, A row-major with stride lda, B with stride ldb.
// start(row, column) is the vector that an accumulator begins with.
template <int rows, int columns, int lda, int ldc, class T, class Start>
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
            for (int j = 0; j < vectors; ++j) acc[r][j] += a[r * lda + k] * b_row[j];
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
