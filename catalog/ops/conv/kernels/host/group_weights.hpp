// The weights of narrow groups in AMX tiles: group_shape.hpp.
#pragma once

#include "group_shape.hpp"
#include "narrow.hpp"

namespace catalog::host {

// The taps along the height that rows of an image meet from a strip of results, which are computed together. Layer after
// layer of these rows is the depth of tiles.
template <int width>
class StripOfTaps {
    using Shape = GroupShape<width>;

   public:
    StripOfTaps() = default;
    explicit StripOfTaps(const Axis& of_h)
        : rows((Shape::high - 1) * of_h.stride + std::max<std::int64_t>(of_h.taps - 1, 0) * of_h.apart + 1),
          layers((rows + Shape::groups - 1) / Shape::groups),
          axis(of_h) {}

    // The tap with which a row of the image meets a row of the result; -1: none.
    std::int64_t tap(std::int64_t row, int result) const {
        const std::int64_t from_first = row - result * axis.stride, number = from_first / axis.apart;
        return from_first < 0 || from_first % axis.apart || number >= axis.taps ? -1 : number;
    }

    // Whether some row of a layer meets some row of a tile of sums.
    bool meets(std::int64_t layer, int pair) const {
        for (int slot = 0; slot < Shape::groups; ++slot)
            for (int r = 0; r < Shape::rows; ++r)
                if (tap(layer * Shape::groups + slot, Shape::row(pair) + r) >= 0) return true;
        return false;
    }

    std::int64_t rows = 0, layers = 0;  // of the image

   private:
    Axis axis{};
};

// Writes, for each tap of a window and each unit of a shape's width, the units of a block's 32 channels. `first` is the block's
// first channel.
template <bool is_forward, int width, class T, class Unit>
inline void find_units(const catalog_args& args, const Geometry& of, const Window& window, std::int64_t first, Unit* to) {
    using Shape = GroupShape<width>;
    constexpr int of_group = width / 2, piece = std::min(width, lanes);
    const std::int64_t stride = args.weight.stride_first;
    const T* const weights = static_cast<const T*>(args.weight.data) + first * stride;
    const auto place = [to](std::int64_t tap, int channel, int unit) {
        const int row = channel / width * width % Shape::width / 2 + unit;
        return to + (tap * Shape::units + row) * Shape::block + channel;
    };
    if constexpr (width < Shape::width) std::fill_n(to, window.taps() * Shape::units * Shape::block, Unit{});
    if constexpr (is_forward) {
        const std::int64_t count = window.taps() * of_group;  // of a row
        for (std::int64_t k = 0; k < count; k += lanes)
            for (int channel = 0; channel < Shape::block; channel += lanes) {
                Float square[lanes];
#pragma GCC unroll 16
                for (int i = 0; i < lanes; ++i)
                    square[i] = (Float)load_along<Unit>(weights + (channel + i) * stride + 2 * k, 2 * (count - k));
                transpose(square);
                if constexpr (width == Shape::width) {
                    for (int i = 0; i < lanes; ++i) store(to + (k + i) * Shape::block + channel, (Bits)square[i]);
                } else {
                    for (int i = 0; i < std::min<std::int64_t>(lanes, count - k); ++i)
                        for (int lane = 0; lane < lanes; lane += piece)
                            std::memcpy(place((k + i) / of_group, channel + lane, (k + i) % of_group),
                                        reinterpret_cast<const Unit*>(square + i) + lane, piece * sizeof(Unit));
                }
            }
    } else {
        std::int64_t tap = 0;
        for_each_tap(window, of, [&](std::int64_t number) {
            for (int unit = 0; unit < of_group; ++unit)
                for (int channel = 0; channel < Shape::block; channel += piece) {
                    const int group = channel / width * width;
                    const T* const from = weights + (group + 2 * unit) * stride + number * width + (channel - group);
                    const Bits units = load_across<Unit>(from, stride, 2, piece);
                    std::memcpy(place(tap, channel, unit), &units, piece * sizeof(Unit));
                }
            ++tap;
        });
    }
}

// How many units find_units() writes: the last square is whole.
template <int width>
inline std::int64_t units_found(const Window& window) {
    return (window.taps() * GroupShape<width>::units + lanes) * GroupShape<width>::block;
}

// A tile of B: what a layer of rows of the image is multiplied with in one column of the filter. `found` is from find_units(),
// of the first tap in its column and plane.
template <int width, class Unit>
inline void pack_tile(const Unit* found, std::int64_t taps_across, const StripOfTaps<width>& strip, std::int64_t layer,
                      int pair, int half, Unit* to) {
    using Shape = GroupShape<width>;
    for (int slot = 0; slot < Shape::groups; ++slot)
        for (int r = 0; r < Shape::rows; ++r) {
            const std::int64_t tap = strip.tap(layer * Shape::groups + slot, Shape::row(pair) + r);
            const std::int64_t row = std::max<std::int64_t>(tap, 0) * taps_across * Shape::units;
            const Unit* const from = found + row * Shape::block + Shape::channel(pair, half);
            Unit* const rows = to + slot * Shape::units * tile_units + r * Shape::columns;
            for (int unit = 0; unit < Shape::units; ++unit)
                if (tap < 0)
                    std::memset(rows + unit * tile_units, 0, Shape::columns * sizeof(Unit));
                else
                    std::memcpy(rows + unit * tile_units, from + unit * Shape::block, Shape::columns * sizeof(Unit));
        }
}

}  // namespace catalog::host
