// NEON in assembly: conversions of elements, which g++ would convert one at a time, and dot products, which only some CPUs
// of the target have.
#pragma once

#if defined(__linux__)
#include <sys/auxv.h>
#endif

#include "vector.hpp"

namespace catalog::host {

// From fp16, and to it.
inline Float widen_floats(HalfBits x) {
    Float wide;
    asm("fcvtl %0.4s, %1.4h" : "=w"(wide) : "w"(x));
    return wide;
}
inline HalfBits narrow_floats(Float x) {
    HalfBits narrow;
    asm("fcvtn %0.4h, %1.4s" : "=w"(narrow) : "w"(x));
    return narrow;
}

inline Bits widen(HalfBits x) {
    Bits wide;
    asm("uxtl %0.4s, %1.4h" : "=w"(wide) : "w"(x));
    return wide;
}

inline HalfBits narrow(Bits x) { return __builtin_convertvector(x, HalfBits); }

// As the upper half of each lane.
inline Bits widen_upwards(HalfBits x) {
    Bits wide;
    asm("shll %0.4s, %1.4h, #16" : "=w"(wide) : "w"(x));
    return wide;
}

// A vector of bytes fills a quarter of a register, as a float does.
inline HalfBits load_unsigned(const void* from) {
    float bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    HalfBits wide;
    asm("uxtl %0.8h, %1.8b" : "=w"(wide) : "w"(bytes));
    return wide;
}
inline Ints load_signed(const void* from) {
    float bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    Ints wide;
    asm("sxtl %0.8h, %1.8b\n\tsxtl %0.4s, %0.4h" : "=w"(wide) : "w"(bytes));
    return wide;
}
inline void store_bytes(void* to, Bits x) {
    float bytes;
    asm("xtn %0.4h, %1.4s\n\txtn %0.8b, %0.8h" : "=w"(bytes) : "w"(x));
    std::memcpy(to, &bytes, sizeof bytes);
}

// Whether this CPU has BFDOT and its conversions, and SDOT.
#if defined(__linux__)
inline bool has_bf16() { return getauxval(AT_HWCAP2) >> 14 & 1; }    // HWCAP2_BF16
inline bool has_dotprod() { return getauxval(AT_HWCAP) >> 20 & 1; }  // HWCAP_ASIMDDP
#else
inline bool has_bf16() { return false; }
inline bool has_dotprod() { return false; }
#endif

// Makes the assembler accept them: of the ways to say so, the one that g++ and clang++ both understand.
#define CATALOG_DOT ".arch armv8.6-a+simd\n\t"

// Adds the dot products of the bf16 pairs of each lane, or of one pair and that of each lane.
inline void dot_pairs(Float& sum, Bits a, Bits b) {
    asm(CATALOG_DOT "bfdot %0.4s, %1.8h, %2.8h" : "+w"(sum) : "w"(b), "w"(a));
}
inline void dot_pairs(Float& sum, std::uint32_t a, Bits b) {
    asm(CATALOG_DOT "bfdot %0.4s, %1.8h, %2.2h[0]" : "+w"(sum) : "w"(b), "w"(a));
}

// Neighbours as pairs, those of `low` first, rounded to nearest even.
inline Bits brain_pairs(Float low, Float high) {
    Bits pairs;
    asm(CATALOG_DOT "bfcvtn %0.4h, %1.4s\n\tbfcvtn2 %0.8h, %2.4s" : "=&w"(pairs) : "w"(low), "w"(high));
    return pairs;
}

// The same dot products of four int8.
inline void dot_bytes(Ints& sum, Bits a, Bits b) {
    asm(CATALOG_DOT "sdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(b), "w"(a));
}
inline void dot_bytes(Ints& sum, std::uint32_t a, Bits b) {
    asm(CATALOG_DOT "sdot %0.4s, %1.16b, %2.4b[0]" : "+w"(sum) : "w"(b), "w"(a));
}

}  // namespace catalog::host
