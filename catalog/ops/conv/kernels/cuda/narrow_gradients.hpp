// Backward weight of narrow groups.
#pragma once

#include "narrow_call.hpp"

namespace catalog::cuda {

// What a warp sums: for each two items, elements of the filter and 8 channels of the images each, a matrix of them by 8
// output channels. Lanes keep four sums of it each, in shared memory.
__host__ __device__ __forceinline__ int narrow_pairs(int taps, int of_group) {
    return (taps * narrow_eights(of_group) + 1) / 2;
}

// Grid: 64 channels, parts of the patches.
template <class Row>
__global__ __launch_bounds__(narrow_threads, 1) void narrow_gradients(const __grid_constant__ NarrowCall call) {
    using T = typename Row::dtype;
    extern __shared__ __align__(128) char memory[];
    const int block = static_cast<int>(blockIdx.x) % call.blocks, part = static_cast<int>(blockIdx.x) / call.blocks;
    const int images_bytes = call.loaded_height * call.pitch * 128, across = call.segments * narrow_run;
    const int stage_bytes = images_bytes + call.rows * across * 128;
    constexpr int shares = narrow_threads / 256;  // warps that share 8 channels: their pairs take turns
    const int warp = static_cast<int>(threadIdx.x) / 32 % 8, share = static_cast<int>(threadIdx.x) / 256;
    const int lane = static_cast<int>(threadIdx.x) % 32, matrix = lane / 8;
    const int eights = narrow_eights(call.of_group), first_eight = warp / eights * eights;
    const int items = call.height.taps * call.width.taps * eights, pairs = (items + 1) / 2;
    char* const behind = memory + call.stages * stage_bytes;
    auto* const sums = reinterpret_cast<float4*>(behind) + warp * pairs * 32;
    auto* const table = reinterpret_cast<NarrowItem*>(behind + 8 * pairs * 512);
    for (int pair = share; pair < pairs; pair += shares) sums[pair * 32 + lane] = make_float4(0, 0, 0, 0);
    narrow_items(table, call, [](int, int) { return 0; });

    const int patches = call.images_count * call.patches_down * call.patches_across;
    const auto load = [&](int index, int stage) {
        const NarrowPatch patch(call, index);
        const std::uint32_t target = shared_address(memory) + stage * stage_bytes;
        narrow_load_images(target, call, patch, block * narrow_channels);
        narrow_load(target + images_bytes, call.gradient, patch.image * call.stride_gradient, call.gradient_channels,
                    block * narrow_channels, patch.row, patch.column, call.rows, across, across, call.gradient_height,
                    call.gradient_width);
        copy_commit();
    };
    int stage = 0;
    if (part < patches) load(part, 0);
    for (int index = part; index < patches; index += call.parts) {
        // With two stages, the next patch is on its way while this one is multiplied.
        const int next = index + call.parts;
        const bool ahead = call.stages > 1 && next < patches;
        if (ahead) {
            load(next, stage ^ 1);
            copy_wait<1>();
        } else {
            copy_wait<0>();
        }
        __syncthreads();
        const NarrowPatch patch(call, index);
        const std::uint32_t images = shared_address(memory) + stage * stage_bytes, gradient = images + images_bytes;
        // Runs that exist, and which positions of the last one, or of all where they are rows: images may be infinite
        // where there is no position.
        const bool flat = call.rows == 1;
        const int left = call.width.count - patch.column;
        const int runs = flat ? min(call.segments, (left + narrow_run - 1) / narrow_run)
                              : min(call.rows, call.height.count - patch.row);
        const int exist = flat ? left - (runs - 1) * narrow_run : left, k = lane % 4 * 2;
        const auto bits_from = [&](int at) { return (at < exist ? 0xffffu : 0u) | (at + 1 < exist ? 0xffff0000u : 0u); };
        const std::uint32_t low = bits_from(k), high = bits_from(k + 8);
        std::uint32_t b[narrow_runs][2];
#pragma unroll
        for (int run = 0; run < narrow_runs; run += 2) {
            const int at = min((run + matrix / 2), call.rows * call.segments - 1) * narrow_run + lane % 8 + 8 * (matrix % 2);
            std::uint32_t r[4];
            load_matrices_transposed(gradient + narrow_place(at, warp), r);
            b[run][0] = r[0], b[run][1] = r[1], b[run + 1][0] = r[2], b[run + 1][1] = r[3];
        }
        for (int pair = share; pair < pairs; pair += shares) {
            const NarrowItem item = table[min(2 * pair + matrix % 2, items - 1)];
            const int position = item.position() + (lane % 8 + 8 * (matrix / 2)) * call.width.step;
            const std::uint32_t first = images + narrow_place(position, first_eight + item.eight());
            float sum[4] = {};
#pragma unroll
            for (int run = 0; run < narrow_runs; ++run) {
                if (run >= runs) break;
                std::uint32_t a[4];
                load_matrices_transposed(first + run * call.run_step * 128, a);
                const bool whole = flat && run + 1 < runs;
                a[0] &= whole ? ~0u : low, a[1] &= whole ? ~0u : low;
                a[2] &= whole ? ~0u : high, a[3] &= whole ? ~0u : high;
                mma_16x8x16<T>(sum, a, b[run][0], b[run][1]);
            }
            float4& total = sums[pair * 32 + lane];
            total.x += sum[0], total.y += sum[1], total.z += sum[2], total.w += sum[3];
        }
        __syncthreads();  // the patch was read
        if (call.stages > 1)
            stage ^= 1;
        else if (next < patches)
            load(next, 0);
    }
    auto* const out = reinterpret_cast<float4*>(call.sums) +
                      ((static_cast<std::int64_t>(part) * call.blocks + block) * 8 + warp) * pairs * 32;
    for (int pair = share; pair < pairs; pair += shares) out[pair * 32 + lane] = sums[pair * 32 + lane];
}

// Adds the sums of all parts, always in the same order, and rounds them. Grid: 32 sums of a part; the warps of a block
// take turns with the parts.
template <class Row>
__global__ __launch_bounds__(narrow_threads) void narrow_add_parts(const __grid_constant__ NarrowCall call) {
    using T = typename Row::dtype;
    constexpr int warps = narrow_threads / 32;
    __shared__ float4 of_warp[warps][32];
    const int eights = narrow_eights(call.of_group), items = call.height.taps * call.width.taps * eights;
    const int pairs = (items + 1) / 2, all = call.blocks * 8 * pairs * 32;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    float sum[4] = {};
    const auto add = [&](const float4& x) { sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w; };
#pragma unroll 4
    for (int part = warp; part < call.parts; part += warps)
        add(reinterpret_cast<const float4*>(call.sums)[static_cast<std::int64_t>(part) * all + blockIdx.x * 32 + lane]);
    of_warp[warp][lane] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    __syncthreads();
    if (warp != 0) return;
#pragma unroll
    for (int other = 1; other < warps; ++other) add(of_warp[other][lane]);
    const int pair = static_cast<int>(blockIdx.x) % pairs, eight_out = static_cast<int>(blockIdx.x) / pairs;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int item = 2 * pair + i / 2, in_eight = lane % 4 * 2 + i % 2, to = eight_out * 8 + in_eight;
        if (item >= items || to >= call.channels) continue;
        const int tap = item / eights, row = tap / call.width.taps, column = tap - row * call.width.taps;
        int from = (item - tap * eights) * 8 + lane / 4;
        if (call.of_group < 8) {
            if (from / call.of_group != in_eight / call.of_group) continue;  // of another group
            from %= call.of_group;
        }
        static_cast<T*>(call.result)[to * call.stride_weight + narrow_element(call, row, column) * call.of_group + from] =
            T(sum[i]);
    }
}

}  // namespace catalog::cuda
