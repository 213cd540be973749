// Pixels in one line: the rows of an image follow each other, with the zeros around them. What a tap of a filter meets
// from all positions is then one line, too: the same one from another pixel on.
#pragma once

#include <numeric>

#include "image.hpp"

namespace catalog::host {

// The distances of rows, in pixels, and of images, in rows, within a line.
struct LineShape {
    std::int64_t pitch, high;
};

// Along an axis with a stride, a tap meets each stride-th pixel from its phase on: of those, the ones after its shift.
// Taps that are `period` apart have the same phase.
inline std::int64_t shift_of(const Axis& axis, std::int64_t tap) { return tap * axis.apart / axis.stride; }
inline std::int64_t most_shift(const Axis& axis) { return shift_of(axis, axis.taps - 1); }
inline std::int64_t period_of(const Axis& axis) { return axis.stride / std::gcd(axis.stride, axis.apart); }

// The pixels in the phase of a tap that taps of this phase meet from `count` positions, beginning with `first`.
inline Axis seen_in_phase(const Axis& axis, std::int64_t tap, std::int64_t first, std::int64_t count) {
    Axis seen = axis;
    seen.count = count + most_shift(axis);
    seen.origin += first * axis.stride + tap * axis.apart % axis.stride;
    seen.taps = 1;
    return seen;
}

// `count` positions themselves from `first` on, of which those from `end` on are zeros.
inline Axis positions_alone(std::int64_t first, std::int64_t count, std::int64_t end) {
    return {count, 0, 1, 1, 0, 1, end, first, 1, 1};
}

// How many zeros at the end of what is seen from all positions may also be the zeros at the beginning of what follows.
inline std::int64_t zeros_shared(const Axis& axis) {
    std::int64_t shared = most_shift(axis);
    for (std::int64_t tap = 0; tap < std::min(period_of(axis), axis.taps); ++tap) {
        const Axis seen = seen_in_phase(axis, tap, 0, axis.count);
        const Range inside = seen.positions_of(0);
        shared = std::min({shared, inside.first, seen.count - inside.end});
    }
    return shared;
}

inline constexpr int most_zeros = 256;
template <class T>
inline constexpr T zero_pixel[most_zeros]{};  // the channels of a pixel outside of an image

// Writes where each pixel of a line is: those of a plane of some images that the axes see down and across. The line ends
// with the last pixel of the last image. Returns the end.
template <class T>
inline const T** find_pixels(const Image<const T>& image, std::int64_t plane, Range images, const Axis& down,
                             const Axis& across, LineShape shape, const T** to) {
    const Range rows_inside = down.positions_of(0), inside = across.positions_of(0);
    const std::int64_t apart = across.stride * image.all_channels;
    for (std::int64_t i = images.first; i < images.end; ++i) {
        const std::int64_t rows = i + 1 < images.end ? shape.high : down.count;
        for (std::int64_t row = 0; row < rows; ++row) {
            const std::int64_t columns = i + 1 < images.end || row + 1 < rows ? shape.pitch : across.count;
            const bool is_inside = row >= rows_inside.first && row < rows_inside.end;
            const Range seen = is_inside ? inside : Range{0, 0};
            to = std::fill_n(to, seen.first, zero_pixel<T>);
            if (seen.first < seen.end) {
                const std::int64_t h = down.origin + row * down.stride, w = across.origin + seen.first * across.stride;
                const T* pixel = image.data + i * image.stride_image + image.index(plane, h, w) * image.all_channels;
                for (std::int64_t j = seen.first; j < seen.end; ++j, pixel += apart) *to++ = pixel;
            }
            to = std::fill_n(to, columns - seen.end, zero_pixel<T>);
        }
    }
    return to;
}

}  // namespace catalog::host
