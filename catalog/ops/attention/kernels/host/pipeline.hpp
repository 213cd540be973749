// What the pipeline of a row needs of the machine and of a thread.
#pragma once

#include <type_traits>

#include "host/amx.hpp"
#include "host/halves.hpp"
#include "traits.hpp"

namespace catalog::host {

// Whether Q, K, the weights and V are multiplied as pairs: of bf16, or of fp16 in tiles.
template <class Row>
inline constexpr bool multiplies_pairs = Row::pipeline == Pipeline::host_bf16 || Row::pipeline == Pipeline::host_amx;

// A row for fp16 in tiles, on a CPU that multiplies bf16 in them only.
template <class Row>
struct SplitRow : Row {};

template <class Row>
struct FactorsOf {
    using Unit =
        std::conditional_t<!multiplies_pairs<Row>, float,
                           std::conditional_t<std::is_same_v<typename Row::dtype, fp16>, HalfPair, BrainPair>>;
};
template <class Row>
struct FactorsOf<SplitRow<Row>> {
    using Unit = SplitHalf;
};

// Factors of the packed products.
template <class Row>
using UnitOf = typename FactorsOf<Row>::Unit;

// Whether this machine runs the instructions of the row's pipeline.
template <class Row>
inline bool is_supported() {
    if constexpr (Row::pipeline == Pipeline::host_amx)
        if (!amx::is_permitted()) return false;
#if defined(CATALOG_BRAIN_PAIRS)
    if constexpr (multiplies_pairs<Row>)
        return Units<BrainPair>::is_supported() && (!has_bytes<Row> || has_byte_tables());
#endif
    return true;
}

// What a thread holds while it attends: the AMX tiles, if the row multiplies in them.
struct NoTiles {};

template <class Row>
using TileState = std::conditional_t<Row::pipeline == Pipeline::host_amx, amx::Tiles, NoTiles>;

}  // namespace catalog::host
