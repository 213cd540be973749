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

// Turns scores into exp2(score - max), and returns the factor that rescales what earlier tiles have accumulated.
inline float softmax_row(float* scores, int columns, RowState& row) {
    Float tile_max = splat(row.max);
    for (int j = 0; j < columns; j += lanes) tile_max = max(tile_max, load(scores + j));
    const float new_max = reduce_max(tile_max);
    // A row that has seen no key: subtracting -infinity from itself would give NaN.
    const float reference = new_max == -infinity ? 0.0f : new_max;

    Float tile_sum = {};
    for (int j = 0; j < columns; j += lanes) {
        const Float p = exp2(load(scores + j) - reference);
        tile_sum += p;
        store(scores + j, p);
    }
    const float rescale = exp2(splat(row.max - reference))[0];
    row = {new_max, row.sum * rescale + reduce_sum(tile_sum)};
    return rescale;
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

// The same for pairs: reads `scale` times the scores, and writes the weights rounded. Their sum is that of the weights
// before rounding.
template <class Unit>
inline float softmax_row(const float* scores, int columns, float scale, RowState& row, Unit* weights) {
    Float tile_max = splat(row.max);
    for (int j = 0; j < columns; j += lanes) tile_max = max(tile_max, load(scores + j) * scale);
    const float new_max = reduce_max(tile_max);
    const float reference = new_max == -infinity ? 0.0f : new_max;

    Float sums[2] = {};
    for (int j = 0; j < columns; j += 2 * lanes) {
        const Float low = exp2(load(scores + j) * scale - reference);
        const Float high = exp2(load(scores + j + lanes) * scale - reference);
        sums[0] += low;
        sums[1] += high;
        store_weights(weights + j / Units<Unit>::depth, low, high);
    }
    const float rescale = exp2(splat(row.max - reference))[0];
    row = {new_max, row.sum * rescale + reduce_sum(sums[0] + sums[1])};
    return rescale;
}

template <class Unit>
inline void round_weights(const float* from, int columns, Unit* to) {
    for (int j = 0; j < columns; j += 2 * lanes)
        store_weights(to + j / Units<Unit>::depth, load(from + j), load(from + j + lanes));
}

#endif

}  // namespace catalog::host
