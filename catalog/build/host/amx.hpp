// AMX: tiles of 16 rows of 64 bytes in registers, and products of tiles of units.
//
// Assembly, as in units.hpp: whether this CPU has AMX and the process may use it is known only at run time. Compilers use
// no tile registers of their own accord, so no clobbers need to be declared.
#pragma once

#if !defined(CATALOG_AMX_EMULATED)  // tests define the same interface in software

#if defined(__linux__) && defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstddef>
#include <cstdint>

namespace catalog::host::amx {

// Linux grants the state of tiles to a process that asks for it, for all its threads and children. Asked once; false: this
// CPU or this kernel has no AMX, or a thread's signal stack is too small for its state.
inline bool is_permitted() {
#if defined(__linux__) && defined(__x86_64__)
    constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool permitted = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
    return permitted;
#else
    return false;
#endif
}

// Whether this CPU multiplies pairs of fp16 in tiles, AMX-FP16.
inline bool multiplies_halves() {
#if defined(__linux__) && defined(__x86_64__)
    constexpr unsigned features = 7, more = 1, amx_fp16 = 1u << 21;
    static const bool has = [] {
        unsigned a = 0, b = 0, c = 0, d = 0;
        return __get_cpuid_count(features, more, &a, &b, &c, &d) && (a & amx_fp16);
    }();
    return has;
#else
    return false;
#endif
}

// Configures the tile registers of the thread, and leaves none configured: a context switch saves tiles in use, and
// other libraries expect none.
class Tiles {
   public:
    Tiles() {
        struct alignas(64) {
            std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
            std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } config;
        static_assert(sizeof config == 64);
        asm volatile("ldtilecfg %0" : : "m"(config));
    }
    ~Tiles() { asm volatile("tilerelease"); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

template <int tile>
inline void clear() {
    asm volatile("tilezero %%tmm%c0" : : "i"(tile));
}

// Row r of the tile is the 64 bytes at `from + r * stride`, in bytes. `passes`: its lines need not stay in the L1 cache.
template <int tile, bool passes = false>
inline void load(const void* from, std::size_t stride) {
    if constexpr (passes)
        asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(tile) : "memory");
    else
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(tile) : "memory");
}

template <int tile>
inline void store(void* to, std::size_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(tile) : "memory");
}

// C += A B: A has 16 rows of 16 pairs, row k of B the pairs k of 16 columns, C floats. Subnormal numbers count as zero.
template <int c, int a, int b>
inline void multiply_add_pairs() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
}

// The same for pairs of fp16, of which subnormal ones count. As bytes of `tdpfp16ps`, which older assemblers do not know.
template <int c, int a, int b>
inline void multiply_add_half_pairs() {
    asm volatile(".byte 0xc4, 0xe2, %c0, 0x5c, %c1" : : "i"(0x7b ^ b << 3), "i"(0xc0 | c << 3 | a));
}

// The same for four int8 in place of each pair; C is int32.
template <int c, int a, int b>
inline void multiply_add_bytes() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
}

}  // namespace catalog::host::amx

#endif
