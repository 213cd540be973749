// What the pipeline of a row needs of the machine and of a thread.
#pragma once

#include <type_traits>

#include "host/amx.hpp"
#include "host/units.hpp"
#include "traits.hpp"

namespace catalog::host {

// Whether Q, K, the weights and V are multiplied as pairs of bf16.
template <class Row>
inline constexpr bool multiplies_pairs = Row::pipeline == Pipeline::host_bf16 || Row::pipeline == Pipeline::host_amx;

// Whether this machine runs the instructions of the row's pipeline.
template <class Row>
inline bool is_supported() {
    if constexpr (Row::pipeline == Pipeline::host_amx)
        if (!amx::is_permitted()) return false;
#if defined(CATALOG_BRAIN_PAIRS)
    if constexpr (multiplies_pairs<Row>) return Units<BrainPair>::is_supported();
#endif
    return true;
}

// What a thread holds while it attends: the AMX tiles, if the row multiplies in them.
struct NoTiles {};

template <class Row>
using TileState = std::conditional_t<Row::pipeline == Pipeline::host_amx, amx::Tiles, NoTiles>;

}  // namespace catalog::host
