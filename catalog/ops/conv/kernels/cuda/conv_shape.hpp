// What follows from a row's traits: the direction's product, and how blocks hold it in shared memory.
//
// A convolution is a product C = A B whose operand A or B is never in memory: TMA gathers what the filter meets.
//
//     direction     rows of C            columns of C                    depth
//     forward       output positions     output channels                 elements of the filter x input channels
//     bwd_data      input positions      input channels                  elements of the filter x output channels
//     bwd_weight    output channels      element of the filter, input    output positions
//                                        channels
//
// Channels are those of a group, in blocks of 64; a column of bwd_weight is one of such a block. Of the depth's, the last
// block may have 32.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/gemm_shape.hpp"
#include "geometry/window.hpp"

namespace catalog::cuda {

using conv::Direction;

// As GemmShape wants it.
template <class Row>
struct ConvTraits : Row {
    static constexpr bool a_along = Row::direction != Direction::bwd_weight;
    static constexpr bool b_along = Row::direction == Direction::forward;
    static constexpr int tile_k = 64, warp_tile_m = 64, warp_tile_n = Row::tile_n, cluster_m = 1;
    static constexpr auto scales = Scales::no;
    // As many stages as fit into the 227 KiB of a block, beside a piece of C for each warpgroup.
    static constexpr int piece_rows = Row::wave_n > 1 ? std::min(Row::tile_m, 64) : 64;
    static constexpr int pieces = Row::wave_m * Row::wave_n / 4 * piece_rows * 256;
    static constexpr int num_stages = (232448 - 1024 - 512 - pieces) / (128 * (Row::tile_m + Row::tile_n));
};

template <class Row>
using ConvShape = GemmShape<ConvTraits<Row>>;

inline constexpr int block_channels = 64;
inline constexpr int half_block = block_channels / 2;

}  // namespace catalog::cuda
