// Matrix products of a warpgroup (wgmma): D (64 x n, float32 registers) += A (64 x 16) B (16 x n). With elements of 8
// bits, A is 64 x 32 and B 32 x n; sums of int8 are int32.
//
// A lies in shared memory, or in registers in the layout of an accumulator whose pairs of columns are packed: of its
// 64 x 16 elements a thread holds row lane / 4 + 16 * warp (registers 0 and 2) and the row 8 below it (1 and 3), in the
// columns 2 * (lane % 4) and the next (0 and 1) and those 8 further (2 and 3). An accumulator's element i is in column
// i / 4 * 8 + 2 * (lane % 4) + i % 2 and row lane / 4 + 8 * (i / 2 % 2) + 16 * warp.
//
// Operands in shared memory are panels: rows of 128 bytes, 64 elements of 16 bits, swizzled as TMA does it for 128
// bytes, the panel aligned to 1024 bytes. Major::k: the panel's columns are the depth; Major::mn: its rows are. Rows of
// the former may also have 64 or 32 bytes, swizzled as TMA does it for as many.
//
// With elements of 8 bits, registers 0 and 1 of A hold the columns 4 * (lane % 4) to 4 * (lane % 4) + 3 of those rows,
// and 2 and 3 the columns 16 further.
#pragma once

#include <cstdint>
#include <type_traits>

#include "dtype.hpp"

namespace catalog::cuda {

enum class Major { k, mn };

inline constexpr int panel_columns = 64;
inline constexpr int panel_row_bytes = 128;

// What the hardware reads of an operand in shared memory. `first` is the address of its first row. The depth advances
// by 16 elements: for Major::k 32 bytes, up to the panel's end; for Major::mn 16 rows, 2048 bytes. `panel_bytes` is the
// distance of panels along the other axis, where Major::mn needs more than one.
template <Major major, int row_bytes = panel_row_bytes>
__device__ __forceinline__ std::uint64_t describe_panel(std::uint32_t first, std::uint32_t panel_bytes = 16) {
    static_assert(row_bytes == panel_row_bytes || ((row_bytes == 64 || row_bytes == 32) && major == Major::k));
    constexpr std::uint64_t swizzle = (row_bytes == 32 ? 3ull : row_bytes == 64 ? 2ull : 1ull) << 62;
    constexpr std::uint64_t stride_of_8_rows = (8ull * row_bytes >> 4) << 32;
    const std::uint64_t leading = major == Major::mn ? static_cast<std::uint64_t>(panel_bytes >> 4) << 16 : 1ull << 16;
    return swizzle | stride_of_8_rows | leading | ((first & 0x3ffff) >> 4);
}

// A descriptor of what lies `bytes` further.
__device__ __forceinline__ std::uint64_t advance(std::uint64_t descriptor, std::uint32_t bytes) {
    return descriptor + (bytes >> 4);
}

// Before the first product, and after registers of A or D were written by anything else.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most `pending` committed groups are unfinished.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Keeps the compiler from moving accesses to accumulators across this point.
template <int count>
__device__ __forceinline__ void pin(float (&registers)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

template <int count>
__device__ __forceinline__ void pin(std::uint32_t (&registers)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

template <int count>
__device__ __forceinline__ void pin(std::int32_t (&registers)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// The registers' values are no longer needed: a product overwrites them. The compiler, which cannot know that from a
// product's operands, would keep them until then, and serialize products where registers are short.
template <int count>
__device__ __forceinline__ void forget(float (&registers)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "=f"(registers[i]));
}

// Operands 0 to n / 2 - 1 of the instruction are the accumulators.
#define CATALOG_R4 "%0, %1, %2, %3"
#define CATALOG_R8 CATALOG_R4 ", %4, %5, %6, %7"
#define CATALOG_R16 CATALOG_R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define CATALOG_R24 CATALOG_R16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define CATALOG_R32 CATALOG_R24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define CATALOG_R40 CATALOG_R32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define CATALOG_R48 CATALOG_R40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define CATALOG_R56 CATALOG_R48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define CATALOG_R64 CATALOG_R56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define CATALOG_R72 CATALOG_R64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define CATALOG_R80 CATALOG_R72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define CATALOG_R88 CATALOG_R80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define CATALOG_R96 CATALOG_R88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define CATALOG_R104 CATALOG_R96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define CATALOG_R112 CATALOG_R104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define CATALOG_R120 CATALOG_R112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define CATALOG_R128 CATALOG_R120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define CATALOG_D4(c, d, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define CATALOG_D8(c, d, i) CATALOG_D4(c, d, i), CATALOG_D4(c, d, i + 4)
#define CATALOG_D16(c, d, i) CATALOG_D8(c, d, i), CATALOG_D8(c, d, i + 8)
#define CATALOG_D24(c, d, i) CATALOG_D16(c, d, i), CATALOG_D8(c, d, i + 16)
#define CATALOG_D32(c, d, i) CATALOG_D24(c, d, i), CATALOG_D8(c, d, i + 24)
#define CATALOG_D40(c, d, i) CATALOG_D32(c, d, i), CATALOG_D8(c, d, i + 32)
#define CATALOG_D48(c, d, i) CATALOG_D40(c, d, i), CATALOG_D8(c, d, i + 40)
#define CATALOG_D56(c, d, i) CATALOG_D48(c, d, i), CATALOG_D8(c, d, i + 48)
#define CATALOG_D64(c, d, i) CATALOG_D56(c, d, i), CATALOG_D8(c, d, i + 56)
#define CATALOG_D72(c, d, i) CATALOG_D64(c, d, i), CATALOG_D8(c, d, i + 64)
#define CATALOG_D80(c, d, i) CATALOG_D72(c, d, i), CATALOG_D8(c, d, i + 72)
#define CATALOG_D88(c, d, i) CATALOG_D80(c, d, i), CATALOG_D8(c, d, i + 80)
#define CATALOG_D96(c, d, i) CATALOG_D88(c, d, i), CATALOG_D8(c, d, i + 88)
#define CATALOG_D104(c, d, i) CATALOG_D96(c, d, i), CATALOG_D8(c, d, i + 96)
#define CATALOG_D112(c, d, i) CATALOG_D104(c, d, i), CATALOG_D8(c, d, i + 104)
#define CATALOG_D120(c, d, i) CATALOG_D112(c, d, i), CATALOG_D8(c, d, i + 112)
#define CATALOG_D128(c, d, i) CATALOG_D120(c, d, i), CATALOG_D8(c, d, i + 120)

// Only the pass for the GPU compiles the instructions; the host's would read a quarter of a megabyte of them.
#ifdef __CUDA_ARCH__
#define CATALOG_EMIT(...) asm volatile(__VA_ARGS__)
#else
#define CATALOG_EMIT(...)
#endif

#define CATALOG_WGMMA_SHARED(type, n, half, ia, ib, ip, ita, itb)                                                    \
    CATALOG_EMIT("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ip ", 0;\n"                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" CATALOG_R##half "}, %" #ia     \
                 ", %" #ib ", p, 1, 1, %" #ita ", %" #itb ";\n}"                                                     \
                 : CATALOG_D##half("+f", d, 0)                                                                       \
                 : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(transposed_a), "n"(transposed_b))

#define CATALOG_WGMMA_REGISTERS(type, n, half, i0, i1, i2, i3, ib, ip, itb)                                          \
    CATALOG_EMIT("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ip ", 0;\n"                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" CATALOG_R##half "}, {%" #i0    \
                 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #ib ", p, 1, 1, %" #itb ";\n}"                                 \
                 : CATALOG_D##half("+f", d, 0)                                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),            \
                   "n"(transposed_b))

#define CATALOG_WGMMA_BYTES_REGISTERS(types, n, half, i0, i1, i2, i3, ib, ip)                                        \
    CATALOG_EMIT("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ip ", 0;\n"                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32." types " {" CATALOG_R##half "}, {%" #i0 ", %" #i1  \
                 ", %" #i2 ", %" #i3 "}, %" #ib ", p, 1, 1;\n}"                                                      \
                 : CATALOG_D##half("+f", d, 0)                                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)))

// Elements of 8 bits: a slice of the depth has 32 of them, and both operands are Major::k.
#define CATALOG_WGMMA_BYTES(types, scales, constraint, n, half, ia, ib, ip)                                          \
    CATALOG_EMIT("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ip ", 0;\n"                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k32." types " {" CATALOG_R##half "}, %" #ia ", %" #ib       \
                 ", p" scales ";\n}"                                                                                 \
                 : CATALOG_D##half(constraint, d, 0)                                                                 \
                 : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)))

// wgmma<T, major of B, major of A>(d, a, b, accumulate); without `accumulate` D is overwritten. The number of columns
// follows from the size of d. Asynchronous: see wgmma_fence, wgmma_commit, wgmma_wait.
#define CATALOG_WGMMA(n, half, i0, i1, i2, i3, i4, i5, i6)                                                           \
    template <class T, Major major_b = Major::k, Major major_a = Major::k>                                           \
    __device__ __forceinline__ void wgmma(float(&d)[half], std::uint64_t a, std::uint64_t b, bool accumulate) {      \
        constexpr int transposed_a = major_a == Major::mn, transposed_b = major_b == Major::mn;                      \
        if constexpr (std::is_same_v<T, fp8>)                                                                        \
            CATALOG_WGMMA_BYTES("f32.e4m3.e4m3", ", 1, 1", "+f", n, half, i0, i1, i2);                               \
        else if constexpr (std::is_same_v<T, bf8>)                                                                   \
            CATALOG_WGMMA_BYTES("f32.e5m2.e5m2", ", 1, 1", "+f", n, half, i0, i1, i2);                               \
        else if constexpr (std::is_same_v<T, bf16>)                                                                  \
            CATALOG_WGMMA_SHARED("bf16", n, half, i0, i1, i2, i3, i4);                                               \
        else                                                                                                         \
            CATALOG_WGMMA_SHARED("f16", n, half, i0, i1, i2, i3, i4);                                                \
    }                                                                                                                \
    template <class T, Major major_b = Major::k, Major major_a = Major::k>                                           \
    __device__ __forceinline__ void wgmma(std::int32_t(&d)[half], std::uint64_t a, std::uint64_t b,                  \
                                          bool accumulate) {                                                         \
        static_assert(std::is_same_v<T, int8> && major_a == Major::k && major_b == Major::k);                        \
        CATALOG_WGMMA_BYTES("s32.s8.s8", "", "+r", n, half, i0, i1, i2);                                             \
    }                                                                                                                \
    template <class T, Major major_b = Major::k>                                                                     \
    __device__ __forceinline__ void wgmma(float(&d)[half], const std::uint32_t(&a)[4], std::uint64_t b,              \
                                          bool accumulate) {                                                         \
        constexpr int transposed_b = major_b == Major::mn;                                                           \
        if constexpr (std::is_same_v<T, fp8>)                                                                        \
            CATALOG_WGMMA_BYTES_REGISTERS("e4m3.e4m3", n, half, i0, i1, i2, i3, i4, i5);                             \
        else if constexpr (std::is_same_v<T, bf8>)                                                                   \
            CATALOG_WGMMA_BYTES_REGISTERS("e5m2.e5m2", n, half, i0, i1, i2, i3, i4, i5);                             \
        else if constexpr (std::is_same_v<T, bf16>)                                                                  \
            CATALOG_WGMMA_REGISTERS("bf16", n, half, i0, i1, i2, i3, i4, i5, i6);                                    \
        else                                                                                                         \
            CATALOG_WGMMA_REGISTERS("f16", n, half, i0, i1, i2, i3, i4, i5, i6);                                     \
    }

CATALOG_WGMMA(8, 4, 4, 5, 6, 7, 8, 9, 10)
CATALOG_WGMMA(16, 8, 8, 9, 10, 11, 12, 13, 14)
CATALOG_WGMMA(32, 16, 16, 17, 18, 19, 20, 21, 22)
CATALOG_WGMMA(48, 24, 24, 25, 26, 27, 28, 29, 30)
CATALOG_WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
CATALOG_WGMMA(80, 40, 40, 41, 42, 43, 44, 45, 46)
CATALOG_WGMMA(96, 48, 48, 49, 50, 51, 52, 53, 54)
CATALOG_WGMMA(112, 56, 56, 57, 58, 59, 60, 61, 62)
CATALOG_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70)
CATALOG_WGMMA(144, 72, 72, 73, 74, 75, 76, 77, 78)
CATALOG_WGMMA(160, 80, 80, 81, 82, 83, 84, 85, 86)
CATALOG_WGMMA(176, 88, 88, 89, 90, 91, 92, 93, 94)
CATALOG_WGMMA(192, 96, 96, 97, 98, 99, 100, 101, 102)
CATALOG_WGMMA(208, 104, 104, 105, 106, 107, 108, 109, 110)
CATALOG_WGMMA(224, 112, 112, 113, 114, 115, 116, 117, 118)
CATALOG_WGMMA(240, 120, 120, 121, 122, 123, 124, 125, 126)
CATALOG_WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134)

#undef CATALOG_WGMMA
#undef CATALOG_EMIT
#undef CATALOG_WGMMA_REGISTERS
#undef CATALOG_WGMMA_SHARED
#undef CATALOG_WGMMA_BYTES
#undef CATALOG_WGMMA_BYTES_REGISTERS
#undef CATALOG_D4
#undef CATALOG_R4
#undef CATALOG_D8
#undef CATALOG_R8
#undef CATALOG_D16
#undef CATALOG_R16
#undef CATALOG_D24
#undef CATALOG_R24
#undef CATALOG_D32
#undef CATALOG_R32
#undef CATALOG_D40
#undef CATALOG_R40
#undef CATALOG_D48
#undef CATALOG_R48
#undef CATALOG_D56
#undef CATALOG_R56
#undef CATALOG_D64
#undef CATALOG_R64
#undef CATALOG_D72
#undef CATALOG_R72
#undef CATALOG_D80
#undef CATALOG_R80
#undef CATALOG_D88
#undef CATALOG_R88
#undef CATALOG_D96
#undef CATALOG_R96
#undef CATALOG_D104
#undef CATALOG_R104
#undef CATALOG_D112
#undef CATALOG_R112
#undef CATALOG_D120
#undef CATALOG_R120
#undef CATALOG_D128
#undef CATALOG_R128

}  // namespace catalog::cuda
