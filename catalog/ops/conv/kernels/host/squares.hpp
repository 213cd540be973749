// The squares of an image that minimal filtering of 3 x 3 elements multiplies: 4 x 4 elements each, 2 from the next one.
// Channels are the last axis. Sums and differences alone transform them.
// Winograd, "Arithmetic Complexity of Computations" (1980); Lavin and Gray, "Fast Algorithms for Convolutional Neural
// Networks" (2015).
#pragma once

#include "image.hpp"

namespace catalog::host {

// Whether minimal filtering applies: each plane of the filter is 3 x 3 neighbours, and strides are 1.
inline bool is_minimal(const Geometry& of) {
    for (int i = 0; i < axes; ++i)
        if ((i > 0 && of.filter[i] != 3) || of.stride[i] != 1 || of.dilation[i] != 1) return false;
    return true;
}

inline constexpr int square_side = 4, square_places = square_side * square_side;
inline constexpr int square_step = 2;  // positions along a side

// Where a square begins, as a position; those of its 2 x 2 that are outside of the image are not computed, or are zero.
struct Square {
    std::int64_t image, z, y, x;
};

class Squares {
   public:
    Squares(const Window& window, std::int64_t images)
        : window(window),
          images(images),
          high((window.axis[1].count + square_step - 1) / square_step),
          wide((window.axis[2].count + square_step - 1) / square_step) {}

    std::int64_t count() const { return images * window.axis[0].count * high * wide; }

    Square operator[](std::int64_t index) const {
        const std::int64_t line = index / wide, slice = line / high, planes = window.axis[0].count;
        return {slice / planes, slice % planes, line % high * square_step, index % wide * square_step};
    }

    // The channels that each place of a square reads, of those that meet a plane of the filter; `zeros` outside of the
    // image.
    template <class T>
    void find_channels(const Image<const T>& image, const Square& at, std::int64_t plane, const T* zeros,
                       const T* (&to)[square_places]) const {
        const std::int64_t d = window.axis[0].origin + at.z + plane * window.axis[0].apart;
        const std::int64_t y = first(window.axis[1], at.y), x = first(window.axis[2], at.x);
        const T* const from = image.data + at.image * image.stride_image;
        const bool has_plane = 0 <= d && d < image.extents[0];
        for (int i = 0; i < square_side; ++i) {
            const bool has_row = has_plane && 0 <= y + i && y + i < image.extents[1];
            const std::int64_t row = image.index(d, y + i, x);
            for (int j = 0; j < square_side; ++j) {
                const bool inside = has_row && 0 <= x + j && x + j < image.extents[2];
                to[i * square_side + j] = inside ? from + (row + j) * image.all_channels : zeros;
            }
        }
    }

   private:
    // The first element that meets a filter of 3: what its elements meet ascends or descends.
    static std::int64_t first(const Axis& axis, std::int64_t position) {
        return axis.origin + position - (axis.apart > 0 ? 0 : 2);
    }

    const Window& window;
    const std::int64_t images, high, wide;
};

// Four neighbours, of which three at a time meet the filter.
inline void transform_image(Float (&x)[square_places], int begin, int step) {
    Float *const a = x + begin, *const b = a + step, *const c = b + step, *const d = c + step;
    const Float second = *b;
    *a -= *c;
    *b += *c;
    *c -= second;
    *d = second - *d;
}

// `count` channels of a square: in each place, a row of a matrix. These matrices are `apart` elements apart.
template <class T>
inline void transform_image(const T* const (&channels)[square_places], std::int64_t first, int count, T* to,
                            std::int64_t apart) {
    for (int k = 0; k < count; k += lanes) {
        Float x[square_places];
#pragma GCC unroll 16
        for (int place = 0; place < square_places; ++place) x[place] = load_first(channels[place] + first + k, count - k);
#pragma GCC unroll 4
        for (int i = 0; i < square_side; ++i) transform_image(x, i, square_side);
#pragma GCC unroll 4
        for (int i = 0; i < square_side; ++i) transform_image(x, square_side * i, 1);
#pragma GCC unroll 16
        for (int place = 0; place < square_places; ++place) store(to + place * apart + k, x[place]);
    }
}

}  // namespace catalog::host
