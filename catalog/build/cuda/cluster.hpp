// Clusters: blocks that run at the same time and reach each other's shared memory.
#pragma once

#include <cstdint>

namespace catalog::cuda {

__device__ __forceinline__ std::uint32_t cluster_rank() {
    std::uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Waits, by whole warps, for all threads of the cluster's blocks that have not ended; what they wrote before can be read
// after.
//
// Warps that load need not come: if they went on together after what one thread does alone, the compiler would keep the
// operands of its TMA instructions in registers of threads, not of warps, and the loop that loads would be twice as long.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// That without order among accesses of memory: before a block ends whose shared memory others read, or after
// barrier_init_fence().
__device__ __forceinline__ void cluster_pass() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// The same place in the shared memory of the block `rank`.
__device__ __forceinline__ std::uint32_t shared_address_of(std::uint32_t address, std::uint32_t rank) {
    std::uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// `address` is that of shared_address_of().
__device__ __forceinline__ float4 load_remote(std::uint32_t address) {
    float4 value;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

// Asynchronous: the barrier, in the same block as `address`, counts the bytes that have arrived.
__device__ __forceinline__ void store_remote(std::uint32_t address, std::uint32_t barrier, float x0, float x1, float x2,
                                             float x3) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(address),
        "r"(barrier), "f"(x0), "f"(x1), "f"(x2), "f"(x3)
        : "memory");
}

__device__ __forceinline__ float load_remote_float(std::uint32_t address) {
    float value;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
}

}  // namespace catalog::cuda
