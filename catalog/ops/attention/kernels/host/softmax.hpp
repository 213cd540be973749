// Online softmax in base 2 over one tile of scores.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "host/dtype.hpp"

namespace catalog::host {

inline constexpr float infinity = std::numeric_limits<float>::infinity();

// 2^x for x < 128, within EXP2_ULP ulp; 0 below the smallest normal number, so exp2(-infinity) == 0. NaN stays NaN.
inline Float exp2(Float x) {
    constexpr float to_integer = 0x1.8p23f;  // adding it leaves round(x) in the low mantissa bits
    const Float shifted = x + to_integer;
    const Float f = x - (shifted - to_integer);  // in [-1/2, 1/2]
    Float p = splat(0x1.41d334p-13f);            // minimax polynomial of 2^f, relative error 1.9e-9
    p = p * f + 0x1.5f456ap-10f;
    p = p * f + 0x1.3b2dbcp-7f;
    p = p * f + 0x1.c6aed4p-5f;
    p = p * f + 0x1.ebfbdap-3f;
    p = p * f + 0x1.62e43p-1f;
    p = p * f + 1.0f;
    const Float scaled = (Float)((Bits)p + ((Bits)shifted << 23));
    return x < -126.0f ? Float{} : scaled;
}

// 2^x for every x.
inline Float exp2_or_infinity(Float x) { return x < 128.0f ? exp2(x) : x + infinity; }

// log(exp(a) + exp(b))
inline float log_add(float a, float b) {
    const float larger = std::max(a, b);
    return larger == -infinity ? larger : larger + std::log1p(std::exp(std::min(a, b) - larger));
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

}  // namespace catalog::host
