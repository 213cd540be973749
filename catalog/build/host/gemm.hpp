// Matrix products of tiles, held in registers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "lines.hpp"
#include "pack.hpp"
#include "units.hpp"

namespace catalog::host {

// Neighbouring vectors of one row.
template <class From, class Vector, int vectors>
inline void load_row(From from, Vector (&to)[vectors]) {
#pragma GCC unroll 16
    for (int j = 0; j < vectors; ++j) to[j] = load(from + j * lanes);
}

// The same of a row that a Reader reads.
template <class Reader, class T>
struct ReadRow {
    const T* data;

    template <int vectors>
    friend void load_row(ReadRow row, Float (&to)[vectors]) {
        constexpr int whole = vectors / Reader::vectors * Reader::vectors;
#pragma GCC unroll 16
        for (int j = 0; j < whole; j += Reader::vectors) {
            Float read[Reader::vectors];
            Reader::load(row.data + j * lanes, read);
#pragma GCC unroll 4
            for (int i = 0; i < Reader::vectors; ++i) to[j + i] = read[i];
        }
        for (int j = whole; j < vectors; ++j) to[j] = load(row.data + j * lanes) * (1 / Reader::factor);
    }
};

// A B for `rows` x `columns` held in registers; the depth is in units. Unit (row, k) of A is a[row * a_row + k * a_depth],
// so that a transposed A needs no copy; b[k] points to row k of B. finish(row, column, sum) consumes each vector of sums.
// What they are added to is better read there, at the end: read at the start, it would occupy registers throughout the
// loop, and the next block's sums would wait for it. beside(b[k]) is called at each k. Register tiles have up to 24 rows: where
// g++ does not unroll a loop over them, sums are in memory.
template <int rows, int columns, int a_depth, class A, class Distance, class B, class Finish, class Beside = NothingBeside>
inline void multiply_block(const A* a, Distance a_row, B b, int depth, Finish finish, Beside beside = {}) {
    constexpr int vectors = columns / lanes;
    typename Units<A>::Sum sum[rows][vectors] = {};
    for (int k = 0; k < depth; ++k) {
        const auto b_k = b[k];
        typename Units<A>::Vector b_row[vectors];
        load_row(b_k, b_row);
        beside(b_k);
#pragma GCC unroll 24
        for (int r = 0; r < rows; ++r)
#pragma GCC unroll 16
            for (int j = 0; j < vectors; ++j) Units<A>::multiply_add(sum[r][j], a[r * a_row + k * a_depth], b_row[j]);
    }

#pragma GCC unroll 24
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 16
        for (int j = 0; j < vectors; ++j) finish(r, j * lanes, sum[r][j]);
}

template <int rows, int columns, int a_row, int a_depth, class A, class B, class Finish>
inline void multiply_block(const A* a, B b, int depth, Finish finish) {
    multiply_block<rows, columns, a_depth>(a, std::integral_constant<int, a_row>{}, b, depth, finish);
}

// The usual forms of finish, for rows of C that are ldc apart.
template <int ldc>
inline auto store_to(float* c) {
    return [c](int row, int column, Float sum) { store(c + row * ldc + column, sum); };
}

template <int ldc, class C>
inline auto add_to(C* c) {
    return [c](int row, int column, auto sum) {
        C* to = c + row * ldc + column;
        store(to, load(to) + sum);
    };
}

// The same of products whose row r is multiplied by factors[r] first.
template <int ldc>
inline auto add_scaled_to(float* c, const float* factors) {
    return [c, factors](int row, int column, auto sum) {
        float* const to = c + row * ldc + column;
        store(to, load(to) + as_float(sum) * factors[row]);
    };
}

// Calls body(std::integral_constant<int, size>, first) for blocks of the first size from `first` to `end`, then of the
// next sizes for the remainder: a single row runs a block of one row.
template <int size, int... smaller, class Body>
inline void for_blocks(int first, int end, Body body) {
    for (; first + size <= end; first += size) body(std::integral_constant<int, size>{}, first);
    if constexpr (sizeof...(smaller) > 0) for_blocks<smaller...>(first, end, body);
}

// As many sizes as are worth the time to compile one product each.
template <int size, class Body>
inline void for_row_blocks(int first, int end, Body body) {
    for_blocks<size, (size + 1) / 2, 1>(first, end, body);
}

// The same, but some blocks are one row shorter, so that no row is left over, unless there are too few rows for that.
template <int size, class Body>
inline void for_even_row_blocks(int first, int end, Body body) {
    constexpr int shorter = size - 1;
    const int rows = end - first, short_rows = (size - rows % size) % size * shorter;
    if (short_rows > rows) return for_row_blocks<size>(first, end, body);
    for_blocks<size>(first, end - short_rows, body);
    if constexpr (shorter > 0) for_blocks<shorter>(end - short_rows, end, body);
}

// A B for any number of rows and columns. The panel of B for column c begins at b + c * panel_stride and stays in L1
// while all rows use it.
template <int block_rows, int block_columns, int a_row, int a_depth, class Finish>
inline void multiply_panels(const float* a, const float* b, std::ptrdiff_t panel_stride, std::ptrdiff_t ldb, int rows,
                            int columns, int depth, Finish finish) {
    for (int column = 0; column < columns; column += block_columns)
        for_row_blocks<block_rows>(0, rows, [&](auto block, int row) {
            multiply_block<block, block_columns, a_row, a_depth>(
                a + row * a_row, Rows<const float>{b + column * panel_stride, ldb}, depth,
                [&](int r, int j, Float sum) { finish(row + r, column + j, sum); });
        });
}

// c[r * ldc + j] = a[r * lda] . b[first + j] for `rows` rows of A and as many rows of B as give a vector of products: one
// accumulator each, all reduced together. Rows after `last` are read as `last`, so that no tail code is needed; their
// products are not used. As much as the Reader reads of B is prefetched of `next`. The loops over `read` are unrolled
// early, as g++ otherwise keeps the vectors of A in memory.
template <class Reader, int rows, int lda, int ldc, class B, class Ahead>
__attribute__((noinline)) inline void multiply_rows(const float* a, B b, int first, int last, int depth, Ahead& next,
                                                    float* c) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(b[0])>>;
    constexpr int columns = lanes / rows, read = Reader::vectors, bytes = read * lanes * static_cast<int>(sizeof(T));
    decltype(b[0]) row[columns];
    for (int j = 0; j < columns; ++j) row[j] = b[std::min(first + j, last)];
    Ahead ahead = next;  // in registers
    Float acc[lanes] = {};
    for (int k = 0, index = 0; k < depth; k += read * lanes) {
        Float a_k[rows][read];
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < read; ++v) a_k[r][v] = load(a + r * lda + k + v * lanes);
#pragma GCC unroll 16
        for (int j = 0; j < columns; ++j) {
            ask_alike<bytes>(ahead, columns * bytes % 64 == 0 ? j : index++);
            Float b_k[read];
            Reader::load(row[j] + k, b_k);
#pragma GCC unroll 16
            for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
                for (int v = 0; v < read; ++v) acc[r * columns + j] += a_k[r][v] * b_k[v];
        }
    }
    next = ahead;
    float sums[lanes];
    store(sums, sum_each(acc) * Reader::factor);
    for (int r = 0; r < rows; ++r) std::memcpy(c + r * ldc, sums + r * columns, columns * sizeof(float));
}

}  // namespace catalog::host
