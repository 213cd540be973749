// The choice of units for a type of factors, when a kernel is launched.
#pragma once

#include <type_traits>

#include "../abi/status.h"
#include "amx.hpp"
#include "units.hpp"

namespace catalog::host {

template <class Unit>
struct UnitType {
    using type = Unit;
};

// Calls multiply(UnitType<Unit>{}) with the units in which this CPU multiplies factors of T: several factors or single
// ones, whichever are faster, or those of AMX tiles, beside which some products need the instructions of vectors, too.
template <class T, bool in_tiles, class Multiply>
inline catalog_status with_units(Multiply multiply) {
    constexpr bool integers = std::is_same_v<T, std::int8_t>;
#if defined(CATALOG_BRAIN_PAIRS)
    using Dot = std::conditional_t<integers, IntegerUnit, BrainPair>;
#endif
#if defined(__AVX512F__)
    if constexpr (in_tiles && std::is_same_v<T, fp16>) {
        if (!Units<BrainPair>::is_supported() || !amx::is_permitted()) return CATALOG_UNSUPPORTED;
        return amx::multiplies_halves() ? multiply(UnitType<HalfPair>{}) : multiply(UnitType<SplitHalf>{});
    } else if constexpr (in_tiles)
        if (Units<Dot>::is_supported() && amx::is_permitted())
            return multiply(UnitType<std::conditional_t<integers, ByteQuad, BrainPair>>{});
#endif
#if defined(CATALOG_BRAIN_PAIRS)
    constexpr bool of_tables = std::is_same_v<T, fp8> || std::is_same_v<T, bf8>;
    if constexpr ((integers || std::is_same_v<T, bf16> || of_tables) && !in_tiles)
        if (Units<Dot>::is_supported() && (!of_tables || has_byte_tables())) return multiply(UnitType<Dot>{});
#endif
    if constexpr (in_tiles)
        return CATALOG_UNSUPPORTED;
    else
        return multiply(UnitType<std::conditional_t<integers, WordPair<false>, float>>{});
}

}  // namespace catalog::host
