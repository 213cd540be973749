// Element types of tensors, and how a vector of them becomes float32 and back (round to nearest even).
#pragma once

#include "vector.hpp"
#if defined(CATALOG_SVE)
#include "sve.hpp"
#elif defined(__aarch64__)
#include "neon.hpp"
#endif

namespace catalog::host {

struct fp16 {
    std::uint16_t bits;
};

struct bf16 {
    std::uint16_t bits;
};

inline Float load(const float* from) { return load_bits<Float>(from); }
inline void store(float* to, Float x) { store_bits(to, x); }
inline Ints load(const std::int32_t* from) { return load_bits<Ints>(from); }
inline void store(std::int32_t* to, Ints x) { store_bits(to, x); }

#if defined(__F16C__)

// Compiler builtins, not <immintrin.h>: reading that header would take a fifth of a row's compile time.
typedef short Shorts __attribute__((vector_size(vector_bytes / 2)));

inline constexpr int to_nearest = 0, current_rounding = 4;
inline constexpr std::uint16_t all_lanes = 0xffff;

#elif !defined(__aarch64__)

typedef __fp16 Half __attribute__((vector_size(vector_bytes / 2)));

#endif

#if defined(__AVX512F__)

inline Float load(const fp16* from) {
    return __builtin_ia32_vcvtph2ps512_mask(load_bits<Shorts>(from), Float{}, all_lanes, current_rounding);
}
inline void store(fp16* to, Float x) {
    store_bits(to, __builtin_ia32_vcvtps2ph512_mask(x, to_nearest, Shorts{}, all_lanes));
}

#elif defined(__F16C__)

inline Float load(const fp16* from) { return __builtin_ia32_vcvtph2ps256(load_bits<Shorts>(from)); }
inline void store(fp16* to, Float x) { store_bits(to, __builtin_ia32_vcvtps2ph256(x, to_nearest)); }

#elif defined(__aarch64__)

inline Float load(const fp16* from) { return widen_floats(load_bits<HalfBits>(from)); }
inline void store(fp16* to, Float x) { store_bits(to, narrow_floats(x)); }

#else

inline Float load(const fp16* from) { return __builtin_convertvector(load_bits<Half>(from), Float); }
inline void store(fp16* to, Float x) { store_bits(to, __builtin_convertvector(x, Half)); }

#endif

// Without the explicit instruction, g++ converts half a vector at a time.
#if defined(__AVX512F__) && !defined(__clang__)
inline Bits widen(HalfBits x) { return (Bits)__builtin_ia32_pmovzxwd512_mask((Shorts)x, Ints{}, all_lanes); }
inline HalfBits narrow(Bits x) { return (HalfBits)__builtin_ia32_pmovdw512_mask((Ints)x, Shorts{}, all_lanes); }
#elif defined(__AVX2__) && !defined(__clang__)
inline Bits widen(HalfBits x) { return (Bits)__builtin_ia32_pmovzxwd256((Shorts)x); }
inline HalfBits narrow(Bits x) { return __builtin_convertvector(x, HalfBits); }
#elif !defined(__aarch64__)
inline Bits widen(HalfBits x) { return __builtin_convertvector(x, Bits); }
inline HalfBits narrow(Bits x) { return __builtin_convertvector(x, HalfBits); }
#endif

#if !defined(__aarch64__)

// As the upper half of each lane.
inline Bits widen_upwards(HalfBits x) { return widen(x) << 16; }

typedef std::uint8_t ByteBits __attribute__((vector_size(vector_bytes / 4)));
typedef std::int8_t SignedBytes __attribute__((vector_size(vector_bytes / 4)));

#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__clang__)
// Eight bytes in the lower half of a vector. Written there as bytes, they would be slow to load.
inline auto load_eight(const void* from) {
    typedef char Chars __attribute__((vector_size(16)));
    typedef std::int64_t Pair __attribute__((vector_size(16)));
    std::int64_t bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return (Chars)Pair{bytes, 0};
}
#define CATALOG_LOADS_EIGHT 1
#endif

// A vector of bytes.
inline HalfBits load_unsigned(const void* from) {
#if defined(CATALOG_LOADS_EIGHT)
    return (HalfBits)__builtin_ia32_pmovzxbw128(load_eight(from));
#else
    ByteBits bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, HalfBits);
#endif
}
inline Ints load_signed(const void* from) {
// Otherwise g++ extends one byte after the other.
#if defined(CATALOG_LOADS_EIGHT)
    return (Ints)__builtin_ia32_pmovsxbd256(load_eight(from));
#elif defined(__AVX512F__) && !defined(__clang__)
    typedef char Chars __attribute__((vector_size(16)));
    Chars bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return __builtin_ia32_pmovsxbd512_mask(bytes, Ints{}, all_lanes);
#else
    SignedBytes bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, Ints);
#endif
}
// Twice as many bytes, in 16 bits each.
inline Bits load_signed_pairs(const void* from) {
#if defined(__AVX2__) && !defined(__clang__)
    typedef char Chars __attribute__((vector_size(vector_bytes / 2)));
    Chars bytes;
    std::memcpy(&bytes, from, sizeof bytes);
#if defined(__AVX512F__)
    typedef short AllShorts __attribute__((vector_size(vector_bytes)));
    return (Bits)__builtin_ia32_pmovsxbw512_mask(bytes, AllShorts{}, ~0u);
#else
    return (Bits)__builtin_ia32_pmovsxbw256(bytes);
#endif
#else
    typedef std::int8_t PairedBytes __attribute__((vector_size(vector_bytes / 2)));
    typedef std::int16_t PairedWords __attribute__((vector_size(vector_bytes)));
    PairedBytes bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return (Bits)__builtin_convertvector(bytes, PairedWords);
#endif
}
inline void store_bytes(void* to, Bits x) {
    const ByteBits bytes = __builtin_convertvector(x, ByteBits);
    std::memcpy(to, &bytes, sizeof bytes);
}

#endif

inline Float load(const bf16* from) { return (Float)widen_upwards(load_bits<HalfBits>(from)); }

inline void store(bf16* to, Float x) {
    const Bits bits = (Bits)x;
    const Bits rounded = bits + 0x7fff + (bits >> 16 & 1);
    const Bits quiet_nan = bits | 0x400000;  // rounding could carry a NaN into infinity
    const Bits kept = x == x ? rounded : quiet_nan;
    store_bits(to, narrow(kept >> 16));
}

#if defined(__AVX512F__) && !defined(__SANITIZE_ADDRESS__)
#define CATALOG_CHOOSES_BYTES 1  // sanitizers see calls of memcpy instead

// A bit for each of the first bytes of a vector. To load or store only these takes a fraction of the time of a call of memcpy,
// whose stores the load of a whole vector would have to wait for.
inline std::uint64_t first_bytes(std::int64_t bytes) { return bytes > 0 ? ~std::uint64_t{} >> (64 - bytes) : 0; }

template <int bytes>
struct ChosenBytes {
    typedef char Vector __attribute__((vector_size(bytes)));
    typedef char Memory[bytes];

    static void load(void* to, const void* from, std::uint64_t chosen) {
        Vector part;
        asm("vmovdqu8 %1, %0%{%2%}%{z%}" : "=v"(part) : "m"(*static_cast<const Memory*>(from)), "Yk"(chosen));
        std::memcpy(to, &part, bytes);
    }
    static void store(void* to, const void* from, std::uint64_t chosen) {
        Vector whole;
        std::memcpy(&whole, from, bytes);
        asm("vmovdqu8 %1, %0%{%2%}" : "+m"(*static_cast<Memory*>(to)) : "v"(whole), "Yk"(chosen));
    }
};

#endif

// The first `count` elements of an array that has more, followed by zeros.
template <class T, int size>
inline void read_first(T (&to)[size], const T* from, std::int64_t count) {
#if defined(CATALOG_CHOOSES_BYTES)
    ChosenBytes<sizeof to>::load(to, from, first_bytes(count * sizeof(T)));
#else
    std::memset(static_cast<void*>(to), 0, sizeof to);
    if (count > 0) std::memcpy(to, from, count * sizeof(T));
#endif
}
template <class T, int size>
inline void write_first(T* to, const T (&from)[size], std::int64_t count) {
#if defined(CATALOG_CHOOSES_BYTES)
    ChosenBytes<sizeof from>::store(to, from, first_bytes(count * sizeof(T)));
#else
    std::memcpy(to, from, count * sizeof(T));
#endif
}

// The first `count` elements, followed by zeros; `from` may end after them.
template <class T>
inline auto load_first(const T* from, std::int64_t count) {
    if (count >= lanes) return load(from);
    T buffer[lanes];
    read_first(buffer, from, count);
    return load(buffer);
}

template <class T, class Vector>
inline void store_first(T* to, Vector x, std::int64_t count) {
    if (count >= lanes) return store(to, x);
    T buffer[lanes];
    store(buffer, x);
    write_first(to, buffer, count);
}

}  // namespace catalog::host
