// Powers of two.
#pragma once

#include <limits>

#include "vector.hpp"

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
    return zero_where(x < -126.0f, scaled);
}

// 2^x for every x.
inline Float exp2_or_infinity(Float x) { return x < 128.0f ? exp2(x) : x + infinity; }

}  // namespace catalog::host
