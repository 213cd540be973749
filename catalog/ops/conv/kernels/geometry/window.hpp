// Which elements of an image meet which elements of a filter: the index map of a convolution, linear along each axis.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "abi/export.hpp"

namespace catalog::conv {

inline constexpr int axes = 3;  // depth, height and width; missing ones come first and have extent 1

enum class Direction { forward, bwd_data, bwd_weight };

// The geometry of a call, as its argument struct has it.
struct Geometry {
    const std::int32_t *size, *out, *filter, *stride, *dilation, *pad;

    explicit Geometry(const catalog_args& args)
        : size(args.geometry),
          out(size + axes),
          filter(out + axes),
          stride(filter + axes),
          dilation(stride + axes),
          pad(dilation + axes) {}

    std::int64_t taps() const { return volume(filter); }

    static std::int64_t volume(const std::int32_t* extents) {
        return std::int64_t{extents[0]} * extents[1] * extents[2];
    }
};

struct Range {
    std::int64_t first, end;
};

// The size of pieces into which `count` is divided, as few as are not larger than `most`, and about equally large.
inline std::int64_t evenly(std::int64_t count, std::int64_t most) {
    const std::int64_t pieces = (count + most - 1) / most;
    return (count + pieces - 1) / pieces;
}

// Piece `at` of `count`, of a size each; the last one may be smaller.
inline Range piece_of(std::int64_t at, std::int64_t size, std::int64_t count) {
    return {at * size, std::min((at + 1) * size, count)};
}

// Takes a number apart: returns its remainder, and leaves its quotient.
inline std::int64_t take_from(std::int64_t& number, std::int64_t divisor) {
    const std::int64_t remainder = number % divisor;
    number /= divisor;
    return remainder;
}

// One axis of an index map. Position p of `count` is element `first + p * step` of the image that is computed. Its tap t of
// `taps` is element `tap + t * tap_step` of the filter, and meets element `origin + p * stride + t * apart` of the image
// that is read, which is zero outside of [0, extent).
struct Axis {
    std::int64_t count, first, step;
    std::int64_t taps, tap, tap_step;
    std::int64_t extent, origin, stride, apart;

    // The positions at which a tap meets the image.
    Range positions_of(std::int64_t t) const {
        const std::int64_t at = origin + t * apart;
        const std::int64_t end = at < extent ? std::min((extent - 1 - at) / stride + 1, count) : 0;
        return {std::min(at < 0 ? (-at + stride - 1) / stride : 0, end), end};
    }

    // The taps that meet the image at a position, where taps ascend.
    Range inside(std::int64_t position) const {
        const std::int64_t at = origin + position * stride;
        const std::int64_t end = at < extent ? std::min((extent - 1 - at) / apart + 1, taps) : 0;
        return {std::min(at < 0 ? (-at + apart - 1) / apart : 0, end), end};
    }
};

struct Window {
    Axis axis[axes];

    std::int64_t positions() const { return axis[0].count * axis[1].count * axis[2].count; }
    std::int64_t taps() const { return axis[0].taps * axis[1].taps * axis[2].taps; }

    // Whether positions are the elements of the image that is computed, in order.
    bool is_dense() const {
        return std::all_of(axis, axis + axes, [](const Axis& one) { return one.step == 1; });
    }

    // Whether the positions are also the elements of the image that is read.
    bool is_pointwise() const {
        return taps() == 1 && is_dense() && std::all_of(axis, axis + axes, [](const Axis& one) {
                   return one.count == one.extent && one.origin == 0 && one.stride == 1;
               });
    }
};

// The output reads the input.
inline Window forward_window(const Geometry& of) {
    Window window;
    for (int i = 0; i < axes; ++i)
        window.axis[i] = {of.out[i], 0, 1, of.filter[i], 0, 1, of.size[i], -of.pad[i], of.stride[i], of.dilation[i]};
    return window;
}

// The elements of an image itself, as if read by a filter of one element.
inline Window identity_window(const std::int32_t* extents) {
    Window window;
    for (int i = 0; i < axes; ++i) window.axis[i] = {extents[i], 0, 1, 1, 0, 1, extents[i], 0, 1, 1};
    return window;
}

// The gradient of the input reads that of the output. With a stride s, input i meets tap t at output
// (i + pad - dilation t) / s, where that is whole: every s-th input meets the same taps, and reads neighbours. Each such
// class is a window of its own, from its first input on.
inline Axis backward_axis(const Geometry& of, int i, std::int64_t first) {
    const std::int64_t size = of.size[i], filter = of.filter[i], s = of.stride[i], dilation = of.dilation[i];
    const std::int64_t remainder = (first + of.pad[i]) % s, count = (size - first + s - 1) / s;
    const std::int64_t period = s / std::gcd(s, dilation);
    std::int64_t tap = 0;
    while (tap < std::min(period, filter) && dilation * tap % s != remainder) ++tap;
    const std::int64_t taps = tap < std::min(period, filter) ? (filter - tap + period - 1) / period : 0;
    const std::int64_t origin = taps ? (first + of.pad[i] - dilation * tap) / s : 0;
    return {count, first, s, taps, tap, period, of.out[i], origin, 1, -(dilation * period / s)};
}

// Calls body(window) for the windows that together are all of the image that is computed.
template <Direction direction, class Body>
inline void for_windows(const Geometry& of, Body body) {
    if constexpr (direction != Direction::bwd_data) {
        body(forward_window(of));
    } else {
        const auto classes = [&](int i) { return std::min(of.stride[i], of.size[i]); };
        for (int d = 0; d < classes(0); ++d) {
            const Axis depth = backward_axis(of, 0, d);
            for (int h = 0; h < classes(1); ++h) {
                const Axis height = backward_axis(of, 1, h);
                for (int w = 0; w < classes(2); ++w) body(Window{{depth, height, backward_axis(of, 2, w)}});
            }
        }
    }
}

// A position in order: the last axis changes first, the image last.
struct Position {
    std::int64_t image, at[axes];

    Position(const Window& window, std::int64_t index) {
        for (int i = axes - 1; i >= 0; --i) {
            at[i] = index % window.axis[i].count;
            index /= window.axis[i].count;
        }
        image = index;
    }

    // Moves by `count` positions, at most to the first one of the next row.
    void advance(const Window& window, std::int64_t count) {
        at[2] += count;
        for (int i = 2; i > 0 && at[i] == window.axis[i].count; --i) at[i] = 0, ++at[i - 1];
        if (at[0] == window.axis[0].count) at[0] = 0, ++image;
    }
};

// An element of a filter within a window, the last axis first.
struct Tap {
    std::int64_t at[axes];

    Tap(const Window& window, std::int64_t index) {
        for (int i = axes - 1; i >= 0; --i) {
            at[i] = index % window.axis[i].taps;
            index /= window.axis[i].taps;
        }
    }

    // Its number in the whole filter.
    std::int64_t number(const Window& window, const Geometry& of) const {
        std::int64_t number = 0;
        for (int i = 0; i < axes; ++i)
            number = number * of.filter[i] + window.axis[i].tap + at[i] * window.axis[i].tap_step;
        return number;
    }
};

// Calls body(number) for the taps of a window in order, with the number of each in the whole filter.
template <class Body>
inline void for_each_tap(const Window& window, const Geometry& of, Body body) {
    const Axis &of_d = window.axis[0], &of_h = window.axis[1], &of_w = window.axis[2];
    for (std::int64_t d = 0; d < of_d.taps; ++d)
        for (std::int64_t h = 0; h < of_h.taps; ++h) {
            const std::int64_t plane = (of_d.tap + d * of_d.tap_step) * of.filter[1];
            const std::int64_t row = (plane + of_h.tap + h * of_h.tap_step) * of.filter[2];
            for (std::int64_t w = 0; w < of_w.taps; ++w) body(row + of_w.tap + w * of_w.tap_step);
        }
}

}  // namespace catalog::conv
