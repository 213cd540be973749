// Element types of tensors, and how a vector of them becomes float32 and back (round to nearest even).
#pragma once

#include "vector.hpp"

#if defined(__F16C__)
#include <immintrin.h>
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

#if defined(__AVX512F__)

// maskz, because g++ 12 warns about the undefined vector inside the plain forms.
inline Float load(const fp16* from) { return _mm512_maskz_cvtph_ps(0xffff, load_bits<__m256i>(from)); }
inline void store(fp16* to, Float x) {
    store_bits(to, _mm512_maskz_cvtps_ph(0xffff, x, _MM_FROUND_TO_NEAREST_INT));
}

// Compilers convert half a vector at a time.
inline Bits widen(HalfBits x) { return (Bits)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)x); }
inline HalfBits narrow(Bits x) { return (HalfBits)_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)x); }

#elif defined(__F16C__)

inline Float load(const fp16* from) { return _mm256_cvtph_ps(load_bits<__m128i>(from)); }
inline void store(fp16* to, Float x) { store_bits(to, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }

#else

typedef __fp16 Half __attribute__((vector_size(vector_bytes / 2)));

inline Float load(const fp16* from) { return __builtin_convertvector(load_bits<Half>(from), Float); }
inline void store(fp16* to, Float x) { store_bits(to, __builtin_convertvector(x, Half)); }

#endif

#if !defined(__AVX512F__)
inline HalfBits narrow(Bits x) { return __builtin_convertvector(x, HalfBits); }
#if defined(__AVX2__)
inline Bits widen(HalfBits x) { return (Bits)_mm256_cvtepu16_epi32((__m128i)x); }
#else
inline Bits widen(HalfBits x) { return __builtin_convertvector(x, Bits); }
#endif
#endif

inline Float load(const bf16* from) { return (Float)(widen(load_bits<HalfBits>(from)) << 16); }

inline void store(bf16* to, Float x) {
    const Bits bits = (Bits)x;
    const Bits rounded = bits + 0x7fff + (bits >> 16 & 1);
    const Bits quiet_nan = bits | 0x400000;  // rounding could carry a NaN into infinity
    const Bits kept = x == x ? rounded : quiet_nan;
    store_bits(to, narrow(kept >> 16));
}

// The first `count` elements, zeros behind them; `from` may end there.
template <class T>
inline Float load_first(const T* from, std::int64_t count) {
    if (count >= lanes) return load(from);
    T buffer[lanes] = {};
    if (count > 0) std::memcpy(buffer, from, count * sizeof(T));
    return load(buffer);
}

template <class T>
inline void store_first(T* to, Float x, std::int64_t count) {
    if (count >= lanes) return store(to, x);
    T buffer[lanes];
    store(buffer, x);
    std::memcpy(to, buffer, count * sizeof(T));
}

}  // namespace catalog::host
