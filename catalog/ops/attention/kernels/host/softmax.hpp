// Online softmax in base 2 over one tile of scores.
#pragma once

#include <algorithm>

#include "host/dtype.hpp"
#include "host/exp2.hpp"
#include "host/math.hpp"
#include "host/halves.hpp"

namespace catalog::host {

// log(exp(a) + exp(b))
inline float log_add(float a, float b) {
    const float larger = std::max(a, b);
    return larger == -infinity ? larger : larger + log1p(exp(std::min(a, b) - larger));
}

// Running state of one query row. Scores, and so the maximum, are already multiplied by log2(e).
struct RowState {
    float max = -infinity;
    float sum = 0;
};

// Rows whose softmax runs side by side: that of one alone mostly waits for its own results. Measured with AVX-512.
#if defined(__AVX512F__)
inline constexpr int rows_beside = 2;
#else
inline constexpr int rows_beside = 1;
#endif

// Turns the scores of some rows into exp2(score - max), and the states into those after this tile. score(row, column) is a
// vector of them, put(row, column, weights) consumes `vectors` vectors of their weights; rescale[row] becomes the factor for
// what earlier tiles have accumulated.
template <int rows, int vectors, class Score, class Put, class State>
inline void softmax_rows(int columns, const Score& score, const Put& put, const State& state, float* rescale) {
    constexpr int chains = 4 / rows;
    Float largest[rows][chains], sum[rows][vectors] = {};
    float reference[rows];
    for (int r = 0; r < rows; ++r)
        for (int c = 0; c < chains; ++c) largest[r][c] = splat(state(r).max);
    int j = 0;
    for (; j + chains * lanes <= columns; j += chains * lanes)
#pragma GCC unroll 2
        for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
            for (int c = 0; c < chains; ++c) largest[r][c] = max(largest[r][c], score(r, j + c * lanes));
    for (; j < columns; j += lanes)
        for (int r = 0; r < rows; ++r) largest[r][0] = max(largest[r][0], score(r, j));
    for (int r = 0; r < rows; ++r) {
        for (int c = 1; c < chains; ++c) largest[r][0] = max(largest[r][0], largest[r][c]);
        const float new_max = reduce_max(largest[r][0]);
        // A row that has seen no key: subtracting -infinity from itself would give NaN.
        reference[r] = new_max == -infinity ? 0.0f : new_max;
        rescale[r] = state(r).max - reference[r];
        state(r).max = new_max;
    }
    for (j = 0; j < columns; j += vectors * lanes)
#pragma GCC unroll 2
        for (int r = 0; r < rows; ++r) {
            Float weights[vectors];
#pragma GCC unroll 2
            for (int v = 0; v < vectors; ++v) {
                weights[v] = exp2(score(r, j + v * lanes) - reference[r]);
                sum[r][v] += weights[v];
            }
            put(r, j, weights);
        }
    for (int r = 0; r < rows; ++r) {
        for (int v = 1; v < vectors; ++v) sum[r][0] += sum[r][v];
        rescale[r] = exp2(splat(rescale[r]))[0];
        state(r).sum = state(r).sum * rescale[r] + reduce_sum(sum[r][0]);
    }
}

// The same in place, of rows that are `stride` apart.
template <int rows, class State>
inline void softmax_rows(float* scores, int stride, int columns, const State& state, float* rescale) {
    softmax_rows<rows, 1>(
        columns, [&](int r, int j) { return load(scores + r * stride + j); },
        [&](int r, int j, const Float (&weights)[1]) { store(scores + r * stride + j, weights[0]); }, state, rescale);
}

#if defined(CATALOG_BRAIN_PAIRS)

// Two vectors of neighbouring weights as units, rounded: pairs to the type of their factors, parts to 16 bits.
template <class Unit>
inline void store_weights(Unit* to, Float low, Float high) {
    if constexpr (std::is_same_v<Unit, SplitHalf>) {
        const Parts parts = parts_of(low, high);
        store(to, parts.upper);
        store(to + lanes, parts.lower);
    } else {
        store(to, pairs_of<Unit>(low, high));
    }
}

template <class Unit>
inline void round_weights(const float* from, int columns, Unit* to) {
    for (int j = 0; j < columns; j += 2 * lanes)
        store_weights(to + j / Units<Unit>::depth, load(from + j), load(from + j + lanes));
}

#endif

}  // namespace catalog::host
