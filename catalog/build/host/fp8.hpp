// The 8-bit element types of OCP: e4m3fn (no infinity, NaN 0x7f) and e5m2 (the upper byte of fp16).
#pragma once

#include <type_traits>

#include "dtype.hpp"

namespace catalog::host {

struct fp8 {
    std::uint8_t bits;
};

struct bf8 {
    std::uint8_t bits;
};

inline Bits select(Bits condition, Bits yes, Bits no) { return (condition & yes) | (~condition & no); }

inline Float load(const bf8* from) {
    fp16 halves[lanes];
    store_bits(halves, load_unsigned(from) << 8);
    return load(halves);
}

// The bits of e4m3 numbers as those of fp16 numbers, which are 2^8 too small, including subnormal ones. `bits` have the
// sign at the top and the other bits as fp16 has them; only those of a NaN carry into the upper half of the exponents.
template <class Bits16>
inline Bits16 small_halves(Bits16 bits) { return bits | ((bits + 0x80) & 0x4000); }

inline Float load(const fp8* from) {
    const HalfBits bits = load_unsigned(from);
    fp16 halves[lanes];
#if defined(__F16C__)
    store_bits(halves, small_halves((HalfBits)((Shorts)(bits << 8) >> 1) & 0xbfff));  // the sign was there twice
#else
    store_bits(halves, small_halves((bits & 0x80) << 8 | (bits & 0x7f) << 7));
#endif
    return load(halves) * 256.0f;
}

// How a row of elements is read as floats, `vectors` at a time, which are multiplied by `factor` when they are used.
template <class T>
struct FloatReader {
    static constexpr int vectors = 1;
    static constexpr float factor = 1;

    static void load(const T* from, Float (&to)[vectors]) {
        to[0] = host::load(from);
#if defined(__AVX__) && !defined(__AVX512F__)
        // Otherwise g++ reads a vector of floats again for each row that it is multiplied by.
        if constexpr (std::is_same_v<T, float>) asm("" : "+x"(to[0]));
#endif
    }
};

#if !defined(CATALOG_SVE)

template <>
struct FloatReader<fp8> {
    static constexpr int vectors = 2;
    static constexpr float factor = 256;
    typedef std::uint16_t Words __attribute__((vector_size(vector_bytes)));

    static void load(const fp8* from, Float (&to)[vectors]) {
#if defined(__F16C__)
        const Words numbers = (Words)load_signed_pairs(from) << 7 & 0xbf80;
#else
        typedef std::uint8_t Bytes __attribute__((vector_size(vector_bytes / 2)));
        Bytes bytes;
        std::memcpy(&bytes, from, sizeof bytes);
        const Words bits = __builtin_convertvector(bytes, Words), numbers = (bits & 0x80) << 8 | (bits & 0x7f) << 7;
#endif
        const Words small = small_halves(numbers);
        fp16 halves[2 * lanes];
        std::memcpy(halves, &small, sizeof halves);
        to[0] = host::load(halves);
        to[1] = host::load(halves + lanes);
    }
};

#endif

// Rounds to nearest even; numbers that are too large become the largest one, as in CK Tile. Normal numbers keep
// `mantissa` bits; below 2^min_exponent the spacing is that of the smallest normal numbers.
template <int mantissa, int bias>
inline Bits narrow(Float x, float largest, std::uint32_t nan) {
    constexpr int shift = 23 - mantissa, min_exponent = 1 - bias;
    const Bits bits = (Bits)x, sign = bits >> 31 << 7, magnitude = bits & 0x7fffffff;
    const Float size = (Float)magnitude;
    const Float clamped = size > largest ? splat(largest) : size;

    const Bits normal_bits = (Bits)clamped;
    const Bits rounded = normal_bits + ((1u << (shift - 1)) - 1) + (normal_bits >> shift & 1);
    const Bits normal = (rounded >> shift) - ((127u - bias) << mantissa);

    // Adding this number leaves the multiples of the smallest subnormal number in the low mantissa bits.
    const float magic = static_cast<float>(1u << (23 - mantissa)) * (1.0f / static_cast<float>(1u << -min_exponent));
    const Bits subnormal = (Bits)(clamped + magic) - (Bits)splat(magic);

    const Bits is_small = (Bits)(clamped < 1.0f / static_cast<float>(1u << -min_exponent));
    const Bits is_nan = (Bits)(magnitude > 0x7f800000);
    return sign | select(is_nan, Bits{} + nan, select(is_small, subnormal, normal));
}

inline void store(fp8* to, Float x) { store_bytes(to, narrow<3, 7>(x, 448.0f, 0x7f)); }
inline void store(bf8* to, Float x) { store_bytes(to, narrow<2, 15>(x, 57344.0f, 0x7e)); }

}  // namespace catalog::host
