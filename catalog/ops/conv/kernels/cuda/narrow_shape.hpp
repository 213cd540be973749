// Filters for which pipeline sm90_narrow has kernels of their own: all their elements are known to the compiler.
#pragma once

namespace catalog::cuda {

// The extents of a filter whose elements meet neighbours in the images, and the distance of positions.
template <int of_down, int of_across, int of_step>
struct NarrowShape {
    static constexpr int down = of_down, across = of_across, step = of_step;
    static constexpr int pairs = across / 2, steps = (across + 1) / 2;  // of a row: what an instruction multiplies at once
    static constexpr int runs = 8;                                      // of a patch: rows of 16 positions
    static constexpr int rows = (runs - 1) * step + down;               // of images that a patch meets
};

// Any filter.
using AnyNarrowShape = NarrowShape<0, 0, 0>;

}  // namespace catalog::cuda
