// fp16 for AMX: pairs of it, and the parts of a fp16 that are bf16.
#pragma once

#include "units.hpp"

namespace catalog::host {

inline constexpr int pairs_deep = 2 * lanes;  // factors along the depth that a vector of pairs holds

// What a tensor's elements are read as: fp16 that will be split are read as pairs.
template <class Unit>
using ReadUnit = std::conditional_t<std::is_same_v<Unit, SplitHalf>, HalfPair, Unit>;

#if defined(CATALOG_BRAIN_PAIRS)

// Neighbours as pairs, those of `low` first, rounded to nearest even.
template <class Pair>
inline Bits pairs_of(Float low, Float high) {
    if constexpr (std::is_same_v<Pair, HalfPair>) {
        fp16 both[pairs_deep];
        store(both, low);
        store(both + lanes, high);
        Bits pairs;
        std::memcpy(&pairs, both, sizeof pairs);
        return pairs;
    } else {
        return brain_pairs(low, high);
    }
}

struct Parts {
    Bits upper, lower;
};

// Neighbours as pairs of parts: rounded to 16 bits.
inline Parts parts_of(Float low, Float high) {
    const Bits upper = brain_pairs(low, high);
    bf16 rounded[pairs_deep];
    std::memcpy(rounded, &upper, sizeof upper);
    return {upper, brain_pairs(low - load(rounded), high - load(rounded + lanes))};
}

inline Float floats_of(HalfBits halves) {
    fp16 elements[lanes];
    store_bits(elements, halves);
    return load(elements);
}

// The parts of pairs of fp16, exactly. An infinite factor has a lower part that is NaN.
inline Parts parts_of(Bits pairs) {
    const Float even = floats_of(narrow(pairs & 0xffff)), odd = floats_of(narrow(pairs >> 16));
    const Bits upper = brain_pairs_across(even, odd);
    return {upper, brain_pairs_across(even - (Float)(upper << 16), odd - (Float)(upper & 0xffff0000))};
}

#endif

// Stores a vector of units, of SplitHalf those read as pairs; lower parts are `apart` units after the upper ones.
template <class Unit, class Vector>
inline void store_read(Unit* to, Vector units, [[maybe_unused]] std::ptrdiff_t apart) {
#if defined(CATALOG_BRAIN_PAIRS)
    if constexpr (std::is_same_v<Unit, SplitHalf>) {
        const Parts parts = parts_of(units);
        store(to, parts.upper);
        store(to + apart, parts.lower);
        return;
    }
#endif
    store(to, units);
}

}  // namespace catalog::host
