// One launch of an implicit product, described: tensor maps, positions, tiles. Host code, and what kernels read.
#pragma once

#include <algorithm>
#include <cstdint>

#include "conv_shape.hpp"
#include "cuda/block.hpp"
#include "cuda/divisor.hpp"
#include "cuda/im2col.hpp"

namespace catalog::cuda {

// Positions of the result that meet the same elements of the filter: all of it, or, of bwd_data with strides, those with
// the same remainders. Axes are in TMA's order, the width first.
template <int axes>
struct ConvPhase {
    CUtensorMap images, half_images;     // over which the filter moves; its boxes of 32 channels
    Divisor count[axes]; // positions of an image
    int lower[axes], step[axes];         // position i is at lower + step * i in the images
    int taps[axes], apart[axes];         // tap j lies apart * j further
    int first_tap[axes], tap_step[axes]; // and is element first_tap + tap_step * j of the filter
    int origin[axes], spread[axes];      // position i is at origin + spread * i in the result
    int rows;                            // of C
    int steps, whole_steps;              // of the depth: all, and those before the ones of 32 channels
    int first_tile;
};

inline constexpr int most_phases = 8;  // of a launch

// Numbers that warps need to begin lie together in front: each line of parameters is fetched from memory when a block
// first reads it.
template <int axes>
struct ConvCall {
    int phase_count, tiles, splits;
    Divisor tiles_n, of_groups, of_tiles, of_splits;  // of numbers of tiles, of their parts, and of steps
    int groups, rows, columns;        // of a group; rows of bwd_weight only
    int channels, blocks;             // from group to group of the images, and pieces of 64 of these channels
    int filter_columns;               // of a load of the filter
    int gradient_channels;            // the same of `gradient`
    int filter[axes];
    bool in_cluster;                  // the parts of a tile are the blocks of a cluster
    bool plain;                       // TMA can store the result
    bool aligned;                     // rows of the images are multiples of 32 bytes
    bool vectors, pairs;              // elements of the result can be written eight, or two at a time
    int extents[axes];                // of the result's images
    void* result;
    float* sums;                      // of the parts of the depth, where these are no blocks of a cluster
    std::int64_t stride_result;       // between images, or the filters of output channels
    ConvPhase<axes> phases[most_phases];
    CUtensorMap weight, half_weight;  // (channel, element, filter, group)
    CUtensorMap gradient;             // bwd_weight: of the output
    CUtensorMap out;
};

// Images, or the filters of output channels, as the kernel reads them: `channels` of each group, `volume` positions.
struct ConvTensor {
    const void* data;
    std::int64_t count, stride, channels, all_channels;
    const std::int32_t* extents;  // depth, height, width
};

// Boxes of that many channels at `box` positions.
template <class T, int axes>
inline bool describe_images(CUtensorMap& map, const ConvTensor& images, const int (&lower)[axes],
                            const int (&step)[axes], const Divisor (&count)[axes], int channels, int box) {
    std::uint64_t extents[axes + 2], strides[axes + 1], stride = images.all_channels * sizeof(T);
    int upper[axes];
    extents[0] = images.all_channels;
    for (int i = 0; i < axes; ++i) {
        const int extent = images.extents[conv::axes - 1 - i];
        extents[i + 1] = extent;
        strides[i] = stride;
        stride *= extent;
        const std::int64_t last = lower[i] + std::int64_t{step[i]} * (std::int64_t{count[i].divisor} - 1);
        if (last != static_cast<int>(last)) return false;
        upper[i] = static_cast<int>(last) - (extent - 1);
    }
    extents[axes + 1] = images.count;
    strides[axes] = images.count > 1 ? images.stride * sizeof(T) : (stride + 15) / 16 * 16;
    return make_im2col_map<T, axes>(map, images.data, extents, strides, lower, upper, step, channels, box);
}

// A window of the result. False: it meets no element of the filter.
template <int axes>
inline bool describe_window(ConvPhase<axes>& phase, const conv::Window& window) {
    bool meets = true;
    for (int i = 0; i < axes; ++i) {
        const conv::Axis& axis = window.axis[conv::axes - 1 - i];
        const bool back = axis.apart < 0;  // offsets are not negative, so that the last tap comes first
        const std::int64_t turned = back ? axis.taps - 1 : 0;
        phase.count[i] = Divisor(axis.count);
        phase.lower[i] = static_cast<int>(axis.origin + turned * axis.apart);
        phase.step[i] = static_cast<int>(axis.stride);
        phase.taps[i] = static_cast<int>(axis.taps);
        phase.apart[i] = static_cast<int>(back ? -axis.apart : axis.apart);
        phase.first_tap[i] = static_cast<int>(axis.tap + turned * axis.tap_step);
        phase.tap_step[i] = static_cast<int>(back ? -axis.tap_step : axis.tap_step);
        phase.origin[i] = static_cast<int>(axis.first);
        phase.spread[i] = static_cast<int>(axis.step);
        meets = meets && axis.taps > 0;
    }
    return meets;
}

// The same with its images, but without its rows, tiles and steps of depth. `halves`: a last block of 32 channels is
// gathered. False: TMA cannot reach that far.
template <class T, int axes>
inline bool describe_phase(ConvPhase<axes>& phase, const conv::Window& window, const ConvTensor& images, bool halves,
                           int box) {
    if (!describe_window(phase, window)) return true;
    for (int i = 0; i < axes; ++i)
        if ((window.axis[conv::axes - 1 - i].taps - 1) * phase.apart[i] > Im2colLimits<axes>::offset) return false;
    const auto describe = [&](CUtensorMap& map, int channels) {
        return describe_images<T, axes>(map, images, phase.lower, phase.step, phase.count, channels, box);
    };
    return describe(phase.images, block_channels) && (!halves || describe(phase.half_images, half_block));
}

inline constexpr int most_cluster_blocks = 8;  // that every GPU can run

// How many clusters run at a time: one lies within a part of the GPU, whose processors it rarely divides. As of an H100.
inline std::int64_t clusters_at_a_time(std::int64_t blocks, int processors) {
    constexpr std::int64_t of_132[most_cluster_blocks + 1] = {0, 132, 66, 39, 30, 22, 17, 15, 15};
    return std::max<std::int64_t>(1, of_132[blocks] * processors / 132);
}

// The parts of the depth for which the time is least, in microseconds: each wave of tiles does its steps, of which `share`
// is not in vain. All blocks together wait for the L2 cache, longer if rows of the images are no multiple of 32 bytes. The
// blocks of a cluster add the sums of their parts; those of more parts are written and read once, by another kernel. Tiles
// that are computed as their transpose have no parts.
template <class Row>
inline int choose_splits(std::int64_t tiles, std::int64_t steps, double share, bool aligned, int processors) {
    if constexpr (ConvShape<Row>::swapped) return 1;
    constexpr double area = Row::tile_m * Row::tile_n;
    constexpr double groups = ConvShape<Row>::groups;
    constexpr double read = Row::tile_m * (64 + Row::tile_n) / 64.0;  // from shared memory
    constexpr bool weighs = Row::direction == Direction::bwd_weight;
    const double loads = (Row::tile_m + Row::tile_n) * (weighs || aligned ? 1 : 3.12);
    const double step = weighs ? 0.1208 + std::max({0.0000126 * area, 0.00088 * loads, 0.0006 * read})
                               : 0.03081 + std::max({0.00001892 * area, 0.0003011 * loads, 0.0008957 * read});
    constexpr double fixed = weighs ? 0.645 + 0.0000396 * area / groups : 0.8292 + 0.0001489 * area / groups;
    constexpr double launch = weighs ? 8.7 : 4.07, of_part_in_memory = weighs ? 0.1 : 0.06548;
    constexpr double of_sum = weighs ? 0.0000021 : 0.0000004505, of_part = weighs ? 1.0 : 0.2822, next_cluster = 3.4;
    constexpr double shared = weighs ? 1.24 + 0.0000944 * area / groups : 3.389 + 0.00001822 * area / groups;
    const double of_block = (weighs ? 0.0000109 : 0.000009743) * loads;  // of a step, by the L2 cache
    const auto time = [&](std::int64_t splits) {
        const std::int64_t blocks = tiles * splits;
        const bool waits = !weighs || (blocks <= processors && splits <= most_cluster_blocks);
        const double busy = waits ? static_cast<double>(std::min<std::int64_t>(blocks, processors)) : 0;
        const double part = fixed + static_cast<double>(parts(steps, splits)) * share * std::max(step, of_block * busy);
        if (splits > 1 && splits <= most_cluster_blocks) {
            const double waves = static_cast<double>(parts(tiles, clusters_at_a_time(splits, processors)));
            const double adding = shared + of_part * static_cast<double>(splits);
            return waves * (part + adding) + (waves - 1) * next_cluster;
        }
        const double waves = static_cast<double>(parts(blocks, processors));
        const double in_memory = launch + of_part_in_memory * static_cast<double>(splits) +
                                 of_sum * area * static_cast<double>(blocks);
        return waves * part + (splits > 1 ? in_memory : 0);
    };
    constexpr std::int64_t most = 64;
    std::int64_t best = 1;
    for (std::int64_t splits = 2; splits <= std::min(steps, most) && tiles * (splits - 1) < 4 * processors; ++splits)
        if (time(splits) < time(best)) best = splits;
    return static_cast<int>(best);
}

}  // namespace catalog::cuda
