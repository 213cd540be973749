// Forward and backward data of narrow groups.
#pragma once

#include "narrow_call.hpp"

namespace catalog::cuda {

// Where the weight has what output channel `to` of the launch takes from channel `from` of its group: the filter of an
// output channel of the convolution, and an element in it. In backward data the launch's output channels are the
// convolution's input channels.
template <class Row>
__device__ __forceinline__ int narrow_filter(const NarrowCall& call, int to, int from) {
    return Row::direction == Direction::forward ? to : to / call.of_group * call.of_group + from;
}

template <class Row>
__device__ __forceinline__ int narrow_place_in_filter(const NarrowCall& call, int to, int from, int element) {
    return element * call.of_group + (Row::direction == Direction::forward ? from : to % call.of_group);
}

// Rounded results of the patch from shared memory to the result: 8 channels of a position at a time.
template <class Row>
__device__ __forceinline__ void narrow_store(const NarrowCall& call, std::uint32_t shared, const NarrowPatch& patch,
                                             int first_channel) {
    using T = typename Row::dtype;
    const int eight = static_cast<int>(threadIdx.x) % 8, channel = first_channel + 8 * eight;
    if (channel >= call.channels) return;
    T* const result = static_cast<T*>(call.result) + patch.image * call.stride_result + channel;
    const int width = call.segments * narrow_run;
    NarrowWalk walk(width, static_cast<int>(threadIdx.x) / 8, narrow_threads / 8);
    for (int i = static_cast<int>(threadIdx.x) / 8; i < call.rows * width; i += narrow_threads / 8, walk.next()) {
        const int y = patch.row + walk.row, x = patch.column + walk.column;
        if (y >= call.height.count || x >= call.width.count) continue;
        std::uint32_t r[4];
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(shared + narrow_place(i, eight)));
        const int place = (call.height.first + call.height.spread * y) * call.result_width + call.width.first +
                          call.width.spread * x;  // a launch counts at most 2^30
        T* const to = result + static_cast<std::int64_t>(place) * call.channels;
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

// The filters of a block's channels in shared memory, each with 16 bytes more where that puts neighbours into different
// banks.
__host__ __device__ __forceinline__ int narrow_filter_bytes(int elements, int of_group) {
    const int bytes = elements * of_group * 2;
    return bytes + (bytes / 16 % 2 == 0 ? 16 : 0);
}

__device__ __forceinline__ void narrow_load_filters(std::uint32_t target, const NarrowCall& call, int first_channel) {
    const auto* const weight = static_cast<const std::uint16_t*>(call.weight);
    const int pitch = narrow_filter_bytes(call.elements, call.of_group), pieces = call.elements * call.of_group / 8;
    NarrowWalk walk(pieces, static_cast<int>(threadIdx.x), narrow_threads);
    for (; walk.row < narrow_channels; walk.next()) {
        const bool exists = first_channel + walk.row < call.channels;
        const std::int64_t place = exists ? (first_channel + walk.row) * call.stride_weight + 8 * walk.column : 0;
        copy_async(target + walk.row * pitch + 16 * walk.column, weight + place, exists);
    }
}

__device__ __forceinline__ std::uint32_t narrow_read(std::uint32_t address) {
    std::uint32_t value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address));
    return value;
}

__device__ __forceinline__ std::uint32_t narrow_read_half(std::uint32_t address) {
    std::uint16_t value;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address));
    return value;
}

// Groups of 8, 16 or 32 channels, by matrix instructions of 16 positions and 8 output channels; the depth is 16 input
// channels of one element of the filter, or 8 of each of two.
template <class Row>
__global__ __launch_bounds__(narrow_threads, 2) void narrow_images_mma(const __grid_constant__ NarrowCall call) {
    using T = typename Row::dtype;
    extern __shared__ __align__(128) char memory[];
    const std::uint32_t shared = shared_address(memory), filters = shared + call.loaded_height * call.pitch * 128;
    const int block = static_cast<int>(blockIdx.x) % call.blocks;
    const NarrowPatch patch(call, static_cast<int>(blockIdx.x) / call.blocks);
    narrow_load_images(shared, call, patch, block * narrow_channels);
    narrow_load_filters(filters, call, block * narrow_channels);
    copy_commit();

    constexpr int runs = narrow_runs / (narrow_threads / 256);  // of a warp
    const int warp = static_cast<int>(threadIdx.x) / 32 % 8, lane = static_cast<int>(threadIdx.x) % 32;
    const int first_run = static_cast<int>(threadIdx.x) / 256 * runs, last_run = call.rows * call.segments - first_run;
    const int matrix = lane / 8, eights = narrow_eights(call.of_group);
    const int items = call.height.taps * call.width.taps * eights;
    const int pitch = narrow_filter_bytes(call.elements, call.of_group);
    const auto weight_of = [&](int to, int from, int element) {
        return narrow_filter<Row>(call, to, from) * pitch + 2 * narrow_place_in_filter<Row>(call, to, from, element);
    };
    auto* const table = reinterpret_cast<NarrowItem*>(memory + filters - shared + narrow_channels * pitch);
    narrow_items(table, call, [&](int element, int eight) { return weight_of(0, 8 * eight, element); });
    // A run's positions of this lane's matrix row; of the first item, the weights of this lane's matrix column.
    const int position = first_run * call.run_step + (lane % 8 + 8 * (matrix % 2)) * call.width.step;
    const int first_eight = warp / eights * eights;
    const std::uint32_t weights = filters + weight_of(warp * 8 + lane / 4, lane % 4 * 2, 0);
    const auto weights_at = [&](int offset) {
        if constexpr (Row::direction == Direction::forward) return narrow_read(weights + offset);
        return narrow_read_half(weights + offset) | narrow_read_half(weights + offset + pitch) << 16;
    };
    float sums[runs][4] = {};
    copy_wait<0>();
    __syncthreads();
    // Matrices 0 and 1 are of the first item, 2 and 3 of the second. Where there is none, its factors are zeros, whatever
    // the images are.
    const auto multiply = [&](const NarrowItem& one, const NarrowItem& two, auto both) {
        const std::uint32_t b0 = weights_at(one.weight), b1 = both ? weights_at(two.weight) : 0;
        const NarrowItem& mine = matrix < 2 ? one : two;
        const std::uint32_t first = shared + narrow_place(position + mine.position(), first_eight + mine.eight());
#pragma unroll
        for (int run = 0; run < runs; ++run) {
            if (run >= last_run) break;
            std::uint32_t a[4];
            load_matrices(first + run * call.run_step * 128, a);
            if constexpr (!both) a[2] = a[3] = 0;
            mma_16x8x16<T>(sums[run], a, b0, b1);
        }
    };
    int item = 0;
    for (; item + 1 < items; item += 2) multiply(table[item], table[item + 1], std::true_type{});
    if (item < items) multiply(table[item], table[item], std::false_type{});
    __syncthreads();
#pragma unroll
    for (int run = 0; run < runs; ++run) {
        if (run >= last_run) break;
        const int at = (first_run + run) * narrow_run + lane / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared + narrow_place(at + 8 * half, warp) + lane % 4 * 4),
                         "r"(pack<T>(sums[run][2 * half], sums[run][2 * half + 1]))
                         : "memory");
    }
    __syncthreads();
    narrow_store<Row>(call, shared, patch, block * narrow_channels);
}

// Groups of `width` channels, fewer than 8: a lane computes 8 channels of some positions. Matrix instructions would
// multiply channels of other groups by zero, and those may be infinite.
template <class Row, int width>
__global__ __launch_bounds__(narrow_threads, width == 1 ? 2 : 1) void narrow_images_fma(const __grid_constant__ NarrowCall call) {
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
        const int row = tap / call.width.taps, column = tap - row * call.width.taps, from = item - tap * width;
        weights[i] = 0;
        if (to < call.channels)
            weights[i] = static_cast<float>(static_cast<const T*>(
                call.weight)[narrow_filter<Row>(call, to, from) * call.stride_weight +
                             narrow_place_in_filter<Row>(call, to, from, narrow_element(call, row, column))]);
    }
    copy_wait<0>();
    __syncthreads();

    const int eight = static_cast<int>(threadIdx.x) % 8, across = call.segments * narrow_run;
    constexpr int count = narrow_run * narrow_runs * 8 / narrow_threads;  // positions of a lane
    const auto position = [&](int k) { return static_cast<int>(threadIdx.x) / 8 + k * (narrow_threads / 8); };
    int first[count];
    float sums[count][8] = {};
    NarrowWalk walk(across, position(0), narrow_threads / 8);
#pragma unroll
    for (int k = 0; k < count; ++k, walk.next())
        first[k] = min(walk.row, call.rows - 1) * call.height.step * call.pitch + walk.column * call.width.step;
    int tap = 0;
    for (int row = 0; row < call.height.taps; ++row)
        for (int column = 0; column < call.width.taps; ++column, ++tap) {
            const int moved = narrow_tap(call, row, column);
            alignas(16) float of[width][8];
#pragma unroll
            for (int from = 0; from < width; ++from) {
                const auto* const w =
                    reinterpret_cast<const float4*>(weights + (tap * width + from) * narrow_channels + 8 * eight);
                *reinterpret_cast<float4*>(of[from]) = w[0], *reinterpret_cast<float4*>(of[from] + 4) = w[1];
            }
#pragma unroll
            for (int k = 0; k < count; ++k) {
                std::uint32_t r[4];
                asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                             : "r"(shared + narrow_place(first[k] + moved, eight)));
                alignas(16) T x[8];
                *reinterpret_cast<uint4*>(x) = make_uint4(r[0], r[1], r[2], r[3]);
#pragma unroll
                for (int j = 0; j < 8; ++j)
#pragma unroll
                    for (int from = 0; from < width; ++from)
                        sums[k][j] += of[from][j] * static_cast<float>(x[j / width * width + from]);
            }
        }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < count; ++k)
        if (position(k) < call.rows * across)
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared + narrow_place(position(k), eight)),
                         "r"(pack<T>(sums[k][0], sums[k][1])), "r"(pack<T>(sums[k][2], sums[k][3])),
                         "r"(pack<T>(sums[k][4], sums[k][5])), "r"(pack<T>(sums[k][6], sums[k][7]))
                         : "memory");
    __syncthreads();
    narrow_store<Row>(call, shared, patch, first_channel);
}

}  // namespace catalog::cuda
