// Backward weight of narrow groups.
#pragma once

#include "narrow_call.hpp"

namespace catalog::cuda {

// What a warp sums: for each two items, elements of the filter and 8 channels of the images each, a matrix of them by 8
// output channels. Lanes keep four sums of it each, in shared memory.
__host__ __device__ __forceinline__ int narrow_pairs(int taps, int of_group) {
    const int eights = of_group < 8 ? 1 : of_group / 8;
    return (taps * eights + 1) / 2;
}

// Grid: 64 channels, parts of the patches.
template <class Row>
__global__ __launch_bounds__(narrow_threads, 1) void narrow_gradients(const __grid_constant__ NarrowCall call) {
    using T = typename Row::dtype;
    extern __shared__ __align__(128) char memory[];
    const int block = static_cast<int>(blockIdx.x) % call.blocks, part = static_cast<int>(blockIdx.x) / call.blocks;
    const int images_bytes = call.loaded_height * call.pitch * 128, across = call.segments * narrow_run;
    const std::uint32_t images = shared_address(memory), gradient = images + images_bytes;
    constexpr int shares = narrow_threads / 256;  // warps that share 8 channels: their pairs take turns
    const int warp = static_cast<int>(threadIdx.x) / 32 % 8, share = static_cast<int>(threadIdx.x) / 256;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int eights = call.of_group < 8 ? 1 : call.of_group / 8, first_eight = warp / eights * eights;
    const int items = call.height.taps * call.width.taps * eights, pairs = (items + 1) / 2;
    auto* const sums = reinterpret_cast<float4*>(memory + images_bytes + call.rows * across * 128) + warp * pairs * 32;
    for (int pair = share; pair < pairs; pair += shares) sums[pair * 32 + lane] = make_float4(0, 0, 0, 0);

    const int matrix = lane / 8, patches = call.images_count * call.patches_down * call.patches_across;
    for (int index = part; index < patches; index += call.parts) {
        const NarrowPatch patch(call, index);
        __syncthreads();  // the patch before was read
        narrow_load_images(images, call, patch, block * narrow_channels);
        narrow_load(gradient, call.gradient, patch.image * call.stride_gradient, call.gradient_channels,
                    block * narrow_channels, patch.row, patch.column, call.rows, across, across, call.gradient_height,
                    call.gradient_width);
        copy_commit();
        copy_wait<0>();
        __syncthreads();
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
            const int item = min(2 * pair + matrix % 2, items - 1), tap = item / eights;
            const int tap_row = tap / call.width.taps, tap_column = tap - tap_row * call.width.taps;
            const int eight = first_eight + item - tap * eights;
            const int position = narrow_tap(call, tap_row, tap_column) + (lane % 8 + 8 * (matrix / 2)) * call.width.step;
            const std::uint32_t first = images + narrow_place(position, eight);
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
    }
    auto* const out = reinterpret_cast<float4*>(call.sums) +
                      ((static_cast<std::int64_t>(part) * call.blocks + block) * 8 + warp) * pairs * 32;
    for (int pair = share; pair < pairs; pair += shares) out[pair * 32 + lane] = sums[pair * 32 + lane];
}

// Adds the sums of all parts, in order, and rounds them. Grid: all of a part's, by 256.
template <class Row>
__global__ __launch_bounds__(narrow_threads) void narrow_add_parts(const __grid_constant__ NarrowCall call) {
    using T = typename Row::dtype;
    const int eights = call.of_group < 8 ? 1 : call.of_group / 8, taps = call.height.taps * call.width.taps;
    const int items = taps * eights, pairs = (items + 1) / 2;
    const int all = call.blocks * 8 * pairs * 32;
    const int index = static_cast<int>(blockIdx.x) * narrow_threads + static_cast<int>(threadIdx.x);
    if (index >= all) return;
    float sum[4] = {};
#pragma unroll 4
    for (int part = 0; part < call.parts; ++part) {
        const float4 x = reinterpret_cast<const float4*>(call.sums)[static_cast<std::int64_t>(part) * all + index];
        sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
    }
    const int lane = index % 32, pair = index / 32 % pairs, eight_out = index / 32 / pairs;
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
