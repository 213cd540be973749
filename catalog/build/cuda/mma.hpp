// Instructions of Ampere that Hopper has too: mma.sync, and copies into shared memory that do not wait (cp.async).
#pragma once

#include <cstdint>
#include <type_traits>

#include "hopper.hpp"

namespace catalog::cuda {

// Elements of a and b are 16 bits wide, two in a register. c (16 x 8) += a (16 x 16) * b (16 x 8).
template <class T>
__device__ __forceinline__ void mma_16x8x16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                            std::uint32_t b1) {
    if constexpr (std::is_same_v<T, bf16>)
        asm(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c (16 x 8) += a (16 x 8) * b (8 x 8).
template <class T>
__device__ __forceinline__ void mma_16x8x8(float (&c)[4], const std::uint32_t (&a)[2], std::uint32_t b) {
    if constexpr (std::is_same_v<T, bf16>)
        asm(
            "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(b));
    else
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(b));
}

// Copies the first `bytes` of 16, and writes zeros for the others, which are not read. The L2 fetches the whole line of
// 128 bytes.
__device__ __forceinline__ void copy_async_first(std::uint32_t target, const void* source, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(bytes)
                 : "memory");
}

// All 16 of them, or none.
__device__ __forceinline__ void copy_async(std::uint32_t target, const void* source, bool exists) {
    copy_async_first(target, source, exists ? 16 : 0);
}

// Copies 4 bytes, or writes zeros.
__device__ __forceinline__ void copy_async_word(std::uint32_t target, const void* source, bool exists) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source), "r"(exists ? 4 : 0)
                 : "memory");
}

// Copies of this thread so far form a group.
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// The barrier counts an arrival of this thread when its copies so far are there.
__device__ __forceinline__ void copy_arrive(std::uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Until all groups of this thread but `pending` are there.
template <int pending>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// 0, which the compiler does not know, as `number` could be negative. What is made to depend on a loop's variable like
// that is computed where it is needed, and occupies no register in the rest of the loop.
__device__ __forceinline__ int zero_of(int number) { return number >> 31; }

// Two numbers of 8 bits in the low half of a register, as fp16. E5M2 is its upper byte.
template <class T>
__device__ __forceinline__ std::uint32_t widen(std::uint32_t pair) {
    static_assert(std::is_same_v<T, fp8> || std::is_same_v<T, bf8>);
    if constexpr (std::is_same_v<T, bf8>) return __byte_perm(pair, 0, 0x1404);
    std::uint32_t widened;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(widened) : "h"(static_cast<std::uint16_t>(pair)));
    return widened;
}

}  // namespace catalog::cuda
