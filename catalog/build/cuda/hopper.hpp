// Hopper's instructions beside wgmma: barriers in shared memory, TMA, named barriers, register budgets.
//
// Addresses in shared memory are 32 bits wide: shared_address() of a pointer. Barriers are 8 bytes.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "dtype.hpp"

namespace catalog::cuda {

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- Barriers in shared memory. A phase ends when `arrivals` threads have arrived and the bytes expected are there.

__device__ __forceinline__ void barrier_init(std::uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After barrier_init, by the threads that did it; a __syncthreads() follows.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(std::uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival of a warp, behind what its lanes have done.
__device__ __forceinline__ void warp_arrive(std::uint32_t barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// An arrival at a barrier anywhere in the cluster; `barrier` is that of shared_address_of(). Orders nothing but what tensor
// cores have read: with the cluster's scope, it would wait for all memory accesses of the thread, for about 1000 cycles.
__device__ __forceinline__ void barrier_arrive_remote(std::uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and makes the phase wait for that number of bytes more.
__device__ __forceinline__ void barrier_arrive_expect(std::uint32_t barrier, std::uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ bool barrier_try_wait(std::uint32_t barrier, std::uint32_t parity) {
    std::uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

// Whether it is over already: barrier_try_wait() may wait for a while.
__device__ __forceinline__ bool barrier_test(std::uint32_t barrier, std::uint32_t parity) {
    std::uint32_t done;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done != 0;
}

// Until the phase of that parity is over; phases count 0, 1, 0, ...: of a fresh barrier, parity 1 is over.
__device__ __forceinline__ void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
    while (!barrier_try_wait(barrier, parity)) {
    }
}

// ---- Named barriers, 0 to 15; 0 is that of __syncthreads(). `threads` are all that sync or arrive, whole warps.

__device__ __forceinline__ void named_barrier_sync(int name, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int name, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// ---- Register budgets of a warpgroup, multiples of 8 from 24 to 240.

template <int registers>
__device__ __forceinline__ void release_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void claim_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

// ---- Shared memory that threads have written, before tensor cores or TMA read it: by each writer, then a barrier, or
// after the barrier by each reader. A writer's fence waits for its stores, a reader's need not.

__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same of the device's memory.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// A number that the compiler takes for another one each time: what depends on it is computed where it is needed, and
// occupies no register in the rest of a loop.
__device__ __forceinline__ int computed_here(int number) {
    asm volatile("" : "+r"(number));
    return number;
}
__device__ __forceinline__ std::int64_t computed_here(std::int64_t number) {
    asm volatile("" : "+l"(number));
    return number;
}

// ---- Counters in the device's memory, by which blocks wait for each other.

__device__ __forceinline__ std::int32_t load_acquire(const std::int32_t* counter) {
    std::int32_t value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    return value;
}

__device__ __forceinline__ void store_release(std::int32_t* counter, std::int32_t count) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(counter), "r"(count) : "memory");
}

__device__ __forceinline__ void add_release(std::int32_t* counter, std::int32_t count) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(count) : "memory");
}

// ---- TMA. Coordinates count elements, the innermost axis first; what lies outside of the tensor reads as zeros and is
// not written. By one thread. The map is a __grid_constant__ parameter of the kernel.

__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tma_load(std::uint32_t target, const CUtensorMap* map, std::uint32_t barrier, int x0,
                                         int x1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            target),
        "l"(map), "r"(barrier), "r"(x0), "r"(x1)
        : "memory");
}

__device__ __forceinline__ void tma_load(std::uint32_t target, const CUtensorMap* map, std::uint32_t barrier, int x0,
                                         int x1, int x2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
            "r"(target),
        "l"(map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2)
        : "memory");
}

__device__ __forceinline__ void tma_load(std::uint32_t target, const CUtensorMap* map, std::uint32_t barrier, int x0,
                                         int x1, int x2, int x3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(target),
        "l"(map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
        : "memory");
}

__device__ __forceinline__ void tma_load(std::uint32_t target, const CUtensorMap* map, std::uint32_t barrier, int x0,
                                         int x1, int x2, int x3, int x4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(target),
        "l"(map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
        : "memory");
}

// To the same place in the shared memory of several blocks of the cluster, bit i of `blocks` for block i. Each block's own
// barrier counts the bytes.
__device__ __forceinline__ void tma_load_multicast(std::uint32_t target, const CUtensorMap* map, std::uint32_t barrier,
                                                   std::uint16_t blocks, int x0, int x1, int x2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(target),
        "l"(map), "r"(barrier), "h"(blocks), "r"(x0), "r"(x1), "r"(x2)
        : "memory");
}

__device__ __forceinline__ void tma_store(const CUtensorMap* map, std::uint32_t source, int x0, int x1) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(source),
                 "r"(x0), "r"(x1)
                 : "memory");
}

__device__ __forceinline__ void tma_store(const CUtensorMap* map, std::uint32_t source, int x0, int x1, int x2) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(source), "r"(x0), "r"(x1), "r"(x2)
                 : "memory");
}

__device__ __forceinline__ void tma_store(const CUtensorMap* map, std::uint32_t source, int x0, int x1, int x2,
                                          int x3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(source), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
                 : "memory");
}

__device__ __forceinline__ void tma_store(const CUtensorMap* map, std::uint32_t source, int x0, int x1, int x2, int x3,
                                          int x4) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
                 "r"(source), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
                 : "memory");
}

// The same for what nobody reads soon: it is the first to leave the L2 cache.
__device__ __forceinline__ void tma_store_once(const CUtensorMap* map, std::uint32_t source, int x0, int x1, int x2,
                                               int x3, int x4) {
    std::uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group.L2::cache_hint "
        "[%0, {%2, %3, %4, %5, %6}], [%1], %7;" ::"l"(map),
        "r"(source), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "l"(policy)
        : "memory");
}

// Adds in place of storing.
__device__ __forceinline__ void tma_reduce_add(const CUtensorMap* map, std::uint32_t source, int x0, int x1, int x2,
                                               int x3) {
    asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
                     map),
                 "r"(source), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
                 : "memory");
}

__device__ __forceinline__ void tma_reduce_add(const CUtensorMap* map, std::uint32_t source, int x0, int x1, int x2,
                                               int x3, int x4) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.bulk_group "
        "[%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
        "r"(source), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
        : "memory");
}

// Copies without a map: whole multiples of 16 bytes, aligned to 16.
__device__ __forceinline__ void bulk_load(std::uint32_t target, const void* source, std::uint32_t bytes,
                                          std::uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     target),
                 "l"(source), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Stores and reductions of this thread so far form a group.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until all groups but `pending` have read their shared memory.
template <int pending>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// Until all groups but `pending` are written.
template <int pending>
__device__ __forceinline__ void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}

// ---- Matrices of 8 x 8 16-bit elements between registers and shared memory; lane i gives the address of row i % 8 of
// matrix i / 8.

__device__ __forceinline__ void store_matrices(std::uint32_t address, std::uint32_t r0, std::uint32_t r1,
                                               std::uint32_t r2, std::uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1),
                 "r"(r2), "r"(r3)
                 : "memory");
}

// Two matrices, of which lanes 0 to 15 give the addresses.
__device__ __forceinline__ void store_matrices(std::uint32_t address, std::uint32_t r0, std::uint32_t r1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(r0), "r"(r1) : "memory");
}

__device__ __forceinline__ void store_matrices_transposed(std::uint32_t address, std::uint32_t r0, std::uint32_t r1,
                                                          std::uint32_t r2, std::uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0),
                 "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

__device__ __forceinline__ void load_matrices(std::uint32_t address, std::uint32_t (&r)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Two matrices, of which lanes 0 to 15 give the addresses.
__device__ __forceinline__ void load_matrices(std::uint32_t address, std::uint32_t (&r)[2]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(std::uint32_t address, std::uint32_t (&r)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(std::uint32_t address, std::uint32_t (&r)[2]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(address)
                 : "memory");
}

// Where TMA's swizzle of 128, 64 or 32 bytes puts byte `column` of row `row` of a panel (rows of as many bytes, aligned
// to 1024).
template <int row_bytes = 128>
__device__ __forceinline__ std::uint32_t swizzled(std::uint32_t row, std::uint32_t column) {
    static_assert(row_bytes == 128 || row_bytes == 64 || row_bytes == 32);
    constexpr std::uint32_t in_128 = 128 / row_bytes;
    return row * row_bytes + (column ^ (row / in_128 % (8 / in_128) << 4));
}

__device__ __forceinline__ void store_shared(std::uint32_t address, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ void store_shared(std::uint32_t address, const float4& x) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
}

__device__ __forceinline__ float4 load_shared(std::uint32_t address) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
}

// ---- Arithmetic.

__device__ __forceinline__ float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two numbers rounded to 16 bits, `low` in the low half.
template <class T>
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
    std::uint32_t packed;
    if constexpr (std::is_same_v<T, bf16>)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// Two numbers rounded to 8 bits, `low` in the low byte; those that are too large become the largest one.
template <class T>
__device__ __forceinline__ std::uint16_t pack_bytes(float low, float high) {
    static_assert(std::is_same_v<T, fp8> || std::is_same_v<T, bf8>);
    std::uint16_t packed;
    if constexpr (std::is_same_v<T, bf8>)
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
    else
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
    return packed;
}

// Four, the first in the low byte.
template <class T>
__device__ __forceinline__ std::uint32_t pack_bytes(float x0, float x1, float x2, float x3) {
    std::uint32_t packed;
    asm("mov.b32 %0, {%1, %2};" : "=r"(packed) : "h"(pack_bytes<T>(x0, x1)), "h"(pack_bytes<T>(x2, x3)));
    return packed;
}

}  // namespace catalog::cuda
