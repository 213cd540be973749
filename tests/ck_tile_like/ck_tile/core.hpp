// What every generated source knows of CK Tile.
#pragma once

#include <cstdint>
#include <hip/hip_runtime.h>
#include <stdexcept>
#include <utility>
#include <variant>

#define CK_TILE_HOST_DEVICE

namespace ck_tile {
template <class To, class From>
To type_convert(From from) {
    return static_cast<To>(from);
}
using index_t = std::int32_t;
struct stream_config {
    hipStream_t stream_id_ = nullptr;
};
template <int...>
struct sequence;
}  // namespace ck_tile

using drop_seed_offset_t =
    std::variant<std::pair<std::uint64_t, std::uint64_t>, std::pair<const void*, const void*>>;
