// SVE in assembly, with vectors of a fixed length: loads and stores that widen and narrow, conversions, and dot products, of
// which those of bf16 are of some CPUs only. As neon.hpp for its users.
#pragma once

#if defined(__linux__)
#include <sys/auxv.h>
#endif

#include "vector.hpp"

namespace catalog::host {

// What assembly takes: clang++ has no registers for vectors of its own that are longer than 128 bits.
typedef __SVUint32_t Lanes __attribute__((arm_sve_vector_bits(8 * vector_bytes)));

template <class Vector>
inline __SVUint32_t in_register(Vector x) {
    return (Lanes)x;
}
inline Bits from_register(__SVUint32_t x) {
    const Lanes lanes = x;
    return (Bits)lanes;
}

// Memory that an instruction reads or writes.
template <class Element, int count = lanes>
using Span = Element[count];

// From 16 bits to lanes, and back.
inline Bits load_halves(const void* from) {
    __SVUint32_t wide;
    asm("ptrue p0.s\n\tld1h {%0.s}, p0/z, [%1]"
        : "=w"(wide)
        : "r"(from), "m"(*static_cast<const Span<std::uint16_t>*>(from))
        : "p0");
    return from_register(wide);
}
inline void store_halves(void* to, Bits halves) {
    asm("ptrue p0.s\n\tst1h {%1.s}, p0, [%2]"
        : "=m"(*static_cast<Span<std::uint16_t>*>(to))
        : "w"(in_register(halves)), "r"(to)
        : "p0");
}

// From fp16, and to it.
inline Float widen_floats(HalfBits x) {
    __SVUint32_t wide;
    asm("ptrue p0.s\n\tfcvt %0.s, p0/m, %1.h" : "=&w"(wide) : "w"(in_register(x)) : "p0");
    return (Float)from_register(wide);
}
inline HalfBits narrow_floats(Float x) {
    __SVUint32_t narrow;
    asm("ptrue p0.s\n\tfcvt %0.h, p0/m, %1.s" : "=&w"(narrow) : "w"(in_register(x)) : "p0");
    return from_register(narrow);
}

inline Bits widen(HalfBits x) { return x; }
inline HalfBits narrow(Bits x) { return x; }

// As the upper half of each lane.
inline Bits widen_upwards(HalfBits x) { return x << 16; }

// A vector of bytes.
inline HalfBits load_unsigned(const void* from) {
    __SVUint32_t wide;
    asm("ptrue p0.s\n\tld1b {%0.s}, p0/z, [%1]"
        : "=w"(wide)
        : "r"(from), "m"(*static_cast<const Span<std::uint8_t>*>(from))
        : "p0");
    return from_register(wide);
}
inline Ints load_signed(const void* from) {
    __SVUint32_t wide;
    asm("ptrue p0.s\n\tld1sb {%0.s}, p0/z, [%1]"
        : "=w"(wide)
        : "r"(from), "m"(*static_cast<const Span<std::int8_t>*>(from))
        : "p0");
    return (Ints)from_register(wide);
}
// Twice as many bytes, in 16 bits each.
inline Bits load_signed_pairs(const void* from) {
    __SVUint32_t wide;
    asm("ptrue p0.h\n\tld1sb {%0.h}, p0/z, [%1]"
        : "=w"(wide)
        : "r"(from), "m"(*static_cast<const Span<std::int8_t, 2 * lanes>*>(from))
        : "p0");
    return from_register(wide);
}
inline void store_bytes(void* to, Bits x) {
    asm("ptrue p0.s\n\tst1b {%1.s}, p0, [%2]"
        : "=m"(*static_cast<Span<std::uint8_t>*>(to))
        : "w"(in_register(x)), "r"(to)
        : "p0");
}

// Whether this CPU has BFDOT and its conversions for SVE, and SDOT, which is in all of SVE.
#if defined(__linux__)
inline bool has_bf16() { return getauxval(AT_HWCAP2) >> 12 & 1; }  // HWCAP2_SVEBF16
#else
inline bool has_bf16() { return false; }
#endif
inline bool has_dotprod() { return true; }

// Makes the assembler accept them.
#define CATALOG_DOT ".arch armv8.6-a+sve+bf16\n\t"

// Adds the dot products of the bf16 pairs of each lane, or of one pair and that of each lane.
inline void dot_pairs(Float& sum, Bits a, Bits b) {
    __SVUint32_t sums = in_register(sum);
    asm(CATALOG_DOT "bfdot %0.s, %1.h, %2.h" : "+w"(sums) : "w"(in_register(b)), "w"(in_register(a)));
    sum = (Float)from_register(sums);
}
inline void dot_pairs(Float& sum, std::uint32_t a, Bits b) { dot_pairs(sum, Bits{} + a, b); }

// Neighbours as pairs, those of `low` first, rounded to nearest even.
inline Bits brain_pairs(Float low, Float high) {
    __SVUint32_t pairs, upper;
    asm(CATALOG_DOT
        "ptrue p0.s\n\tbfcvt %0.h, p0/m, %2.s\n\tbfcvt %1.h, p0/m, %3.s\n\tuzp1 %0.h, %0.h, %1.h"
        : "=&w"(pairs), "=&w"(upper)
        : "w"(in_register(low)), "w"(in_register(high))
        : "p0");
    return from_register(pairs);
}

// The same dot products of four int8.
inline void dot_bytes(Ints& sum, Bits a, Bits b) {
    __SVUint32_t sums = in_register(sum);
    asm("sdot %0.s, %1.b, %2.b" : "+w"(sums) : "w"(in_register(b)), "w"(in_register(a)));
    sum = (Ints)from_register(sums);
}
inline void dot_bytes(Ints& sum, std::uint32_t a, Bits b) { dot_bytes(sum, Bits{} + a, b); }

}  // namespace catalog::host
