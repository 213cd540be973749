// Clusters: blocks that run at the same time and reach each other's shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace catalog::cuda {

__device__ __forceinline__ std::uint32_t cluster_rank() {
    std::uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Until all threads of all blocks of the cluster are here; what they wrote before can be read after.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// The same place in the shared memory of the block `rank`.
__device__ __forceinline__ std::uint32_t shared_address_of(std::uint32_t address, std::uint32_t rank) {
    std::uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// `address` and `barrier` are those of shared_address_of().
__device__ __forceinline__ float4 load_remote(std::uint32_t address) {
    float4 value;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

__device__ __forceinline__ float load_remote_float(std::uint32_t address) {
    float value;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
}

__device__ __forceinline__ void barrier_arrive_remote(std::uint32_t barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Into every block of `mask`, at the same place; each one's barrier at the place of `barrier` counts the bytes.
__device__ __forceinline__ void tma_load_multicast(std::uint32_t target, const CUtensorMap* map, std::uint32_t barrier,
                                                   std::uint16_t mask, int x0, int x1, int x2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(target),
        "l"(map), "r"(barrier), "h"(mask), "r"(x0), "r"(x1), "r"(x2)
        : "memory");
}

}  // namespace catalog::cuda
