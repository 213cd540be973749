// How narrow groups fill AMX tiles.
//
// The depth of a tile is 32 factors, more than the channels of a narrow group. So each row of A has one column of the image
// in several rows of it, and if groups have fewer than 16 channels, the columns of a tile of sums are several rows of the
// result: each meets other rows of the image. Weights of a tile that belong to no tap are zeros, a quarter of them where a
// filter of 3 x 3 has strides of 1.
//
// Groups of less than 8 channels are multiplied as if 8 channels were one, with zeros as weights: more rows in a tile would
// take as many products, and more time to copy.
#pragma once

#include <utility>

#include "host/tiles.hpp"

namespace catalog::host {

// Of groups of `channels`.
template <int channels>
struct GroupShape {
    static constexpr int width = channels < 8 ? 8 : channels;
    static constexpr int block = 32;              // channels that are computed together: a cache line
    static constexpr int groups = block / width;  // of a block, and rows of the image in a tile of A
    static constexpr bool is_half = width < tile_units;                  // groups have fewer columns than a tile
    static constexpr int high = is_half ? tile_units / width : groups;  // rows of the result that are computed together
    static constexpr int tiles = 2 * high;                              // of sums, for 16 positions of a block
    static constexpr int units = width / 2;                             // of a tap

    // Tiles of sums are computed in pairs, one for each half of what becomes a vector of results. The first channel and the
    // first row of the result of a tile:
    static constexpr int channel(int pair, int half) { return is_half ? (2 * pair + half) * width : half * tile_units; }
    static constexpr int row(int pair) { return is_half ? 0 : pair; }
    static constexpr int rows = is_half ? high : 1;                         // of a tile
    static constexpr int columns = is_half ? width : tile_units;            // of each of them
    static constexpr int group(int pair, int half) { return channel(pair, half) / width; }
};

// Lanes of parts: the even ones, or the odd ones, of two vectors.
template <int part, bool odd>
struct EveryOtherPart {
    static constexpr unsigned at(int lane) { return (lane / part * 2 + odd) * part + lane % part; }
};

// Exchanges rows and columns of a matrix of `of_row` columns, which are parts of some lanes: each round moves the lowest bit
// of a column's number before the others.
template <int part, int of_row, int count>
[[gnu::always_inline]] inline void transpose_parts(Bits (&x)[count]) {
    if constexpr (of_row > 1) {
        Bits next[count];
#pragma GCC unroll 8
        for (int i = 0; i < count / 2; ++i) {
            const Float a = (Float)x[2 * i], b = (Float)x[2 * i + 1];
            next[i] = (Bits)permute<EveryOtherPart<part, false>>(a, b);
            next[i + count / 2] = (Bits)permute<EveryOtherPart<part, true>>(a, b);
        }
#pragma GCC unroll 8
        for (int i = 0; i < count; ++i) x[i] = next[i];
        transpose_parts<part, of_row / 2>(x);
    }
}

}  // namespace catalog::host
