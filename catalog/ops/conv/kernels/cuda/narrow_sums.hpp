// Sums of the parts of a gradient of the weight, which blocks of pipeline sm90_narrow share.
#pragma once

#include <cstdint>

#include "cuda/kernel_launch.hpp"
#include "cuda/scratch.hpp"

namespace catalog::cuda {

inline constexpr int sums_threads = 512;
inline constexpr int sums_of_block = 32;

// Adds the sums of all parts, always in the same order, and rounds them: `Sums` knows how many a part has, four at a time,
// and where they belong. Grid: 32 times four of a part; the warps of a block take turns with the parts.
template <class Sums>
__global__ __launch_bounds__(sums_threads) void narrow_add_parts(const __grid_constant__ typename Sums::Call call) {
    constexpr int warps = sums_threads / 32;
    wait_for_last_kernel();
    __shared__ float4 of_warp[warps][sums_of_block];
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int all = Sums::count(call), place = static_cast<int>(blockIdx.x) * sums_of_block + lane;
    float sum[4] = {};
    const auto add = [&](const float4& x) { sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w; };
#pragma unroll 4
    for (int part = warp; part < call.parts && place < all; part += warps)
        add(reinterpret_cast<const float4*>(call.sums)[static_cast<std::int64_t>(part) * all + place]);
    of_warp[warp][lane] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    __syncthreads();
    if (warp != 0 || place >= all) return;
#pragma unroll
    for (int other = 1; other < warps; ++other) add(of_warp[other][lane]);
    Sums::store(call, place, sum);
}

// Runs launch(), whose blocks write the sums of call.parts parts, and adds them. The blocks call let_next_kernel_start().
template <class Sums, class Launch>
inline catalog_status with_parts(typename Sums::Call& call, int device, cudaStream_t stream, Launch launch) {
    const int all = Sums::count(call);
    const Scratch room(std::int64_t{all} * call.parts * static_cast<std::int64_t>(sizeof(float4)), device, stream);
    if (!room.data) return launched(), CATALOG_NO_MEMORY;
    call.sums = static_cast<float*>(room.data);
    if (const catalog_status status = launch(); status != CATALOG_OK) return status;
    const int blocks = (all + sums_of_block - 1) / sums_of_block;
    return KernelLaunch(static_cast<unsigned>(blocks), sums_threads, 0, stream, Start::early)
        .run(narrow_add_parts<Sums>, call);
}

}  // namespace catalog::cuda
