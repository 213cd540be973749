// Forward and backward data of narrow groups.
#pragma once

#include "narrow_call.hpp"

namespace catalog::cuda {

// The element of the weight that output channel `to` of the launch takes from channel `from` of its group. In backward
// data the launch's output channels are the convolution's input channels.
template <class Row>
__device__ __forceinline__ const std::uint16_t* narrow_weight(const NarrowCall& call, int to, int from, int element) {
    const auto* const weight = static_cast<const std::uint16_t*>(call.weight);
    const int in_group = to % call.of_group, group = to - in_group;
    constexpr bool forward = Row::direction == Direction::forward;
    return weight + (forward ? to : group + from) * call.stride_weight + element * call.of_group +
           (forward ? from : in_group);
}

// Rounded results of the patch from shared memory to the result: 8 channels of a position at a time.
template <class Row>
__device__ __forceinline__ void narrow_store(const NarrowCall& call, std::uint32_t shared, const NarrowPatch& patch,
                                             int first_channel) {
    using T = typename Row::dtype;
    const int eight = static_cast<int>(threadIdx.x) % 8, channel = first_channel + 8 * eight;
    if (channel >= call.channels) return;
    const int width = call.segments * narrow_run;
    for (int i = static_cast<int>(threadIdx.x) / 8; i < call.rows * width; i += narrow_threads / 8) {
        const int row = i / width, column = i - row * width, y = patch.row + row, x = patch.column + column;
        if (y >= call.height.count || x >= call.width.count) continue;
        std::uint32_t r[4];
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(shared + narrow_place(i, eight)));
        const std::int64_t place = static_cast<std::int64_t>(call.height.first + call.height.spread * y) *
                                       call.result_width +
                                   call.width.first + call.width.spread * x;
        T* const to = static_cast<T*>(call.result) + patch.image * call.stride_result + place * call.channels + channel;
        if (call.vectors) {
            *reinterpret_cast<uint4*>(to) = make_uint4(r[0], r[1], r[2], r[3]);
        } else {
            auto* const bits = reinterpret_cast<std::uint16_t*>(to);
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if (channel + j < call.channels) bits[j] = static_cast<std::uint16_t>(r[j / 2] >> (j % 2 * 16));
        }
    }
}

// Groups of 8, 16 or 32 channels, by matrix instructions of 16 positions and 8 output channels; the depth is 16 input
// channels of one element of the filter, or 8 of each of two.
template <class Row>
__global__ __launch_bounds__(narrow_threads) void narrow_images_mma(const __grid_constant__ NarrowCall call) {
    using T = typename Row::dtype;
    extern __shared__ __align__(128) char memory[];
    const std::uint32_t shared = shared_address(memory);
    const int block = static_cast<int>(blockIdx.x) % call.blocks;
    const NarrowPatch patch(call, static_cast<int>(blockIdx.x) / call.blocks);
    narrow_load_images(shared, call, patch, block * narrow_channels);
    copy_commit();

    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int matrix = lane / 8, eights = call.of_group / 8, items = call.height.taps * call.width.taps * eights;
    const int channel = block * narrow_channels + warp * 8 + lane / 4, first_eight = warp / eights * eights;
    // A run's positions of this lane's matrix row, and from run to run.
    const int position = (lane % 8 + 8 * (matrix % 2)) * call.width.step;
    float sums[narrow_runs][4] = {};
    copy_wait<0>();
    __syncthreads();
    for (int item = 0; item < items; item += 2) {
        // Matrices 0 and 1 are of the first item, 2 and 3 of the second.
        const auto split = [&](int index, int& row, int& column, int& eight) {
            const int tap = index / eights;
            eight = index - tap * eights;
            row = tap / call.width.taps;
            column = tap - row * call.width.taps;
        };
        int row, column, eight;
        std::uint32_t b[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            b[i] = 0;
            if (item + i >= items || channel >= call.channels) continue;
            split(item + i, row, column, eight);
            const int element = narrow_element(call, row, column), from = 8 * eight + lane % 4 * 2;
            b[i] = narrow_pair(narrow_weight<Row>(call, channel, from, element),
                               narrow_weight<Row>(call, channel, from + 1, element));
        }
        const bool second = matrix >= 2 && item + 1 < items;
        split(item + (second ? 1 : 0), row, column, eight);
        const std::uint32_t first = shared + narrow_place(position + narrow_tap(call, row, column), first_eight + eight);
        // An odd item has no second one: its factor must be zero whatever the images are.
        const bool absent = item + 1 >= items;
#pragma unroll
        for (int run = 0; run < narrow_runs; ++run) {
            if (run >= call.rows * call.segments) break;
            std::uint32_t a[4];
            load_matrices(first + run * call.run_step * 128, a);
            if (absent) a[2] = a[3] = 0;
            mma_16x8x16<T>(sums[run], a, b[0], b[1]);
        }
    }
    __syncthreads();
#pragma unroll
    for (int run = 0; run < narrow_runs; ++run) {
        if (run >= call.rows * call.segments) break;
        const int at = run * narrow_run + lane / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared + narrow_place(at + 8 * half, warp) + lane % 4 * 4),
                         "r"(pack<T>(sums[run][2 * half], sums[run][2 * half + 1]))
                         : "memory");
    }
    __syncthreads();
    narrow_store<Row>(call, shared, patch, block * narrow_channels);
}

// Groups of `width` channels, fewer than 8: a lane computes 8 channels of a position. Matrix instructions would multiply
// channels of other groups by zero, and those may be infinite.
template <class Row, int width>
__global__ __launch_bounds__(narrow_threads, 2) void narrow_images_fma(const __grid_constant__ NarrowCall call) {
    using T = typename Row::dtype;
    extern __shared__ __align__(128) char memory[];
    const std::uint32_t shared = shared_address(memory);
    const int block = static_cast<int>(blockIdx.x) % call.blocks, first_channel = block * narrow_channels;
    const NarrowPatch patch(call, static_cast<int>(blockIdx.x) / call.blocks);
    narrow_load_images(shared, call, patch, first_channel);
    copy_commit();
    // The weights as floats: for each element and channel of a group, those of 64 output channels.
    auto* const weights = reinterpret_cast<float*>(memory + call.loaded_height * call.pitch * 128);
    const int taps = call.height.taps * call.width.taps;
    for (int i = static_cast<int>(threadIdx.x); i < taps * width * narrow_channels; i += narrow_threads) {
        const int to = first_channel + i % narrow_channels, item = i / narrow_channels, tap = item / width;
        const int row = tap / call.width.taps, column = tap - row * call.width.taps;
        weights[i] = 0;
        if (to < call.channels)
            weights[i] = static_cast<float>(*reinterpret_cast<const T*>(
                narrow_weight<Row>(call, to, item - tap * width, narrow_element(call, row, column))));
    }
    copy_wait<0>();
    __syncthreads();

    const int eight = static_cast<int>(threadIdx.x) % 8, across = call.segments * narrow_run;
    constexpr int count = narrow_run * narrow_runs * 8 / narrow_threads;  // positions of a lane
    std::uint32_t rounded[count][4];
#pragma unroll
    for (int k = 0; k < count; ++k) {
        const int i = static_cast<int>(threadIdx.x) / 8 + k * (narrow_threads / 8);
        if (i >= call.rows * across) break;
        const int down = i / across;
        const int first = down * call.height.step * call.pitch + (i - down * across) * call.width.step;
        float sums[8] = {};
        int tap = 0;
        for (int row = 0; row < call.height.taps; ++row)
            for (int column = 0; column < call.width.taps; ++column, ++tap) {
                std::uint32_t r[4];
                asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                             : "r"(shared + narrow_place(first + narrow_tap(call, row, column), eight)));
                alignas(16) T x[8];
                *reinterpret_cast<uint4*>(x) = make_uint4(r[0], r[1], r[2], r[3]);
#pragma unroll
                for (int from = 0; from < width; ++from) {
                    const auto* const w = reinterpret_cast<const float4*>(
                        weights + (tap * width + from) * narrow_channels + 8 * eight);
                    const float4 low = w[0], high = w[1];
                    const float of[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
                    for (int j = 0; j < 8; ++j) sums[j] += of[j] * static_cast<float>(x[j / width * width + from]);
                }
            }
#pragma unroll
        for (int j = 0; j < 4; ++j) rounded[k][j] = pack<T>(sums[2 * j], sums[2 * j + 1]);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < count; ++k) {
        const int i = static_cast<int>(threadIdx.x) / 8 + k * (narrow_threads / 8);
        if (i < call.rows * across)
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared + narrow_place(i, eight)),
                         "r"(rounded[k][0]), "r"(rounded[k][1]), "r"(rounded[k][2]), "r"(rounded[k][3])
                         : "memory");
    }
    __syncthreads();
    narrow_store<Row>(call, shared, patch, first_channel);
}

}  // namespace catalog::cuda
