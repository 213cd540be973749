// What follows from the traits of a row of pipeline sm90_halo, and which patches of positions its blocks compute.
//
// A block computes a patch of lines of positions at a time. What the filter meets, the patch with its halo, lies in shared
// memory once for all elements of the filter: a row of 64 channels for each element of the images, line after line. Those
// that one element of the filter meets are the same rows, some rows further on, and operands of wgmma may begin at any
// row. Lines are as long there as with their halo, so a few rows of the product, those between the end of a line and the
// begin of the next one, are computed in vain.
//
// Where a row has two wave groups, each computes tiles of its own, so that one multiplies while the other stores; the
// filter then stays in shared memory, for all tiles of the block.
#pragma once

#include "conv_call.hpp"
#include "cuda/ring.hpp"
#include "cuda/wgmma.hpp"

namespace catalog::cuda {

template <class Row>
struct HaloShape : AwaitInit<32 * Row::wave_m * Row::num_wave_groups> {
    using T = typename Row::dtype;
    static constexpr bool along = Row::direction == Direction::forward;  // the filter lies along the depth
    static constexpr Major major_q = along ? Major::k : Major::mn;
    // Teams of warpgroups, each of which computes a tile.
    static constexpr int teams = Row::num_wave_groups, groups = Row::wave_m / 4, team = 128 * groups;
    static constexpr int blocks_p = Row::tile_m / groups / 64;
    static constexpr int computing = team * teams, threads = 128 + computing;
    static constexpr bool keeps_filter = teams > 1;

    // A stage is a patch with its halo, or 64 of the depth of the filter at one of its elements.
    static constexpr int patch_rows = teams > 1 ? 232 : 384, patch_bytes = patch_rows * panel_row_bytes;
    static constexpr int columns = std::min(Row::tile_n, 64);  // of a load of the filter, and of a store
    static constexpr int filter_panel = (along ? columns : 64) * panel_row_bytes;
    static constexpr int filter_bytes = Row::tile_n / columns * filter_panel;
    static constexpr int out_row = columns * static_cast<int>(sizeof(T)), out_bytes = Row::tile_m * out_row;
    static constexpr int patches = 2;  // of a team
    static constexpr int filters = (232448 - 1024 - 512 - teams * (patches * patch_bytes + out_bytes)) / filter_bytes;

    // Offsets in bytes from a base that is aligned to 1024.
    static constexpr int alignment = 1024;
    static constexpr int filters_at = teams * patches * patch_bytes, out = filters_at + filters * filter_bytes;
    static constexpr int barriers = out + teams * out_bytes, bytes = barriers + 16 * (teams * patches + filters);

    using Sums = float[blocks_p][Row::tile_n / 2];

    static_assert(Row::wave_n == 1 && teams <= 2 && Row::tile_m == 64 * groups * blocks_p && Row::tile_n % columns == 0);
    static_assert(filters >= 3 && bytes + alignment <= 232448);

    // Stages by their barriers.
    static __device__ __forceinline__ std::uint32_t full_patch(std::uint32_t base, int team, int stage) {
        return base + barriers + 16 * (team * patches + stage);
    }
    static __device__ __forceinline__ std::uint32_t full_filter(std::uint32_t base, int stage) {
        return full_patch(base, teams, stage);
    }
    static __device__ __forceinline__ std::uint32_t empty(std::uint32_t full) { return full + 8; }

    static __device__ __forceinline__ std::uint32_t patch(std::uint32_t base, int team, int stage) {
        return base + (team * patches + stage) * patch_bytes;
    }

    // By one thread of a warp.
    static __device__ __forceinline__ void init(std::uint32_t base) {
        for (int i = 0; i < teams * patches + filters; ++i) {
            barrier_init(full_patch(base, 0, i), 1);
            barrier_init(empty(full_patch(base, 0, i)), 4 * groups);  // what all teams read is not written anew
        }
        barrier_init_fence();
    }
};

// A launch, of one phase: boxes of its images are patches with their halo, boxes of its result are patches.
template <int axes>
struct HaloCall : ConvCall<axes> {
    int patch[axes];  // positions of a patch along each axis: one line, several lines, one plane
    Divisor across[axes];  // patches of an image
    int pitch;         // rows of a line with its halo
    int planes;        // elements of the filter along the depth: each meets other lines
    int in_plane;      // elements of each of these
    int box_rows;      // of a patch with its halo
};

inline constexpr int longest = 256;  // axis of a box
inline constexpr int shortest = 8;   // line of a patch, unless images have shorter ones

// The patches that are fewest, of at most `most` rows with what is computed in vain and of `rows` with their halo. False:
// not even a short line fits.
template <int axes>
inline bool choose_patch(HaloCall<axes>& call, int most, int rows) {
    const ConvPhase<axes>& phase = call.phases[0];
    const auto halo = [&](int i) { return i < axes ? (phase.taps[i] - 1) * std::int64_t{phase.apart[i]} : 0; };
    const std::int64_t width = phase.count[0].divisor, height = axes > 1 ? phase.count[axes > 1].divisor : 1;
    std::int64_t fewest = 0;
    for (std::int64_t lines = 1; lines <= std::min<std::int64_t>(height, longest - halo(1)); ++lines) {
        const std::int64_t pitch = std::min({(most + halo(0)) / lines, rows / (lines + halo(1)), std::int64_t{longest}});
        const std::int64_t line = std::min(pitch - halo(0), width);
        if (line < std::min<std::int64_t>(shortest, width)) break;
        const std::int64_t across = parts(width, line), down = parts(height, lines);
        if (fewest > 0 && across * down >= fewest) continue;
        fewest = across * down;
        const std::int64_t patch[2] = {parts(width, across), parts(height, down)}, number[2] = {across, down};
        for (int i = 0; i < axes; ++i) {
            call.patch[i] = i < 2 ? static_cast<int>(patch[i]) : 1;
            call.across[i] = i < 2 ? Divisor(number[i]) : phase.count[i];
        }
        call.pitch = static_cast<int>(patch[0] + halo(0));
        call.box_rows = static_cast<int>(call.pitch * (patch[1] + halo(1)));
    }
    return fewest > 0;
}

}  // namespace catalog::cuda
