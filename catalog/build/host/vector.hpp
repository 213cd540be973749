// The widest float vector of the target, as a compiler vector type: one source for AVX-512, AVX2, NEON and SVE.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace catalog::host {

#if defined(__ARM_FEATURE_SVE_BITS) && __ARM_FEATURE_SVE_BITS > 0
#define CATALOG_SVE 1  // with vectors of a fixed length
#endif

#if defined(__AVX512F__)
inline constexpr int vector_bytes = 64;
#elif defined(CATALOG_SVE)
inline constexpr int vector_bytes = __ARM_FEATURE_SVE_BITS / 8;
#elif defined(__AVX__)
inline constexpr int vector_bytes = 32;
#else
inline constexpr int vector_bytes = 16;
#endif

inline constexpr int lanes = vector_bytes / static_cast<int>(sizeof(float));

#if defined(__AVX__) && !defined(__AVX512F__)
inline constexpr int vector_registers = 16;
#else
inline constexpr int vector_registers = 32;
#endif

typedef float Float __attribute__((vector_size(vector_bytes)));
typedef int Ints __attribute__((vector_size(vector_bytes)));
typedef std::uint32_t Bits __attribute__((vector_size(vector_bytes)));
#if defined(CATALOG_SVE)
typedef Bits HalfBits;  // in the lower halves of lanes: what loads widens, what stores narrows
inline Bits load_halves(const void* from);
inline void store_halves(void* to, Bits halves);
#else
typedef std::uint16_t HalfBits __attribute__((vector_size(vector_bytes / 2)));
#endif

constexpr int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// memcpy, because tensors are aligned only to their element.
template <class Vector, class Element>
inline Vector load_bits(const Element* from) {
#if defined(CATALOG_SVE)
    if constexpr (sizeof(Element) == 2)
        return load_halves(from);
    else
#endif
    {
        static_assert(sizeof(Vector) == lanes * sizeof(Element));
        Vector vector;
        std::memcpy(&vector, from, sizeof vector);
        return vector;
    }
}

template <class Vector, class Element>
inline void store_bits(Element* to, Vector vector) {
#if defined(CATALOG_SVE)
    if constexpr (sizeof(Element) == 2)
        store_halves(to, vector);
    else
#endif
    {
        static_assert(sizeof(Vector) == lanes * sizeof(Element));
        std::memcpy(to, &vector, sizeof vector);
    }
}

inline Float splat(float value) { return value - Float{}; }  // minus preserves -0.0f

inline Float as_float(Float x) { return x; }
inline Float as_float(Ints x) { return __builtin_convertvector(x, Float); }

inline Float max(Float a, Float b) { return a > b ? a : b; }

// `x`, but 0 where the condition holds. Of a choice, g++ for Arm would negate the condition, in eight instructions.
#if defined(__aarch64__)
inline Float zero_where(Ints condition, Float x) { return (Float)((Bits)x & ~(Bits)condition); }
#else
inline Float zero_where(Ints condition, Float x) { return condition ? Float{} : x; }
#endif

// Lane i of the result is lane Pattern::at(i) of the concatenation of a and b.
template <class Pattern, int... lane>
inline Float permute(Float a, Float b, std::integer_sequence<int, lane...>) {
#if __has_builtin(__builtin_shufflevector)
    return __builtin_shufflevector(a, b, Pattern::at(lane)...);
#else  // g++ 11
    return __builtin_shuffle(a, b, Bits{Pattern::at(lane)...});
#endif
}

template <class Pattern>
inline Float permute(Float a, Float b) {
    return permute<Pattern>(a, b, std::make_integer_sequence<int, lanes>{});
}

// The lower and the upper halves of each part of two vectors, interleaved.
template <int part = lanes>
struct InterleaveLow {
    static constexpr unsigned at(int lane) { return lane / part * part + lane % part / 2 + lane % 2 * lanes; }
};

template <int part = lanes>
struct InterleaveHigh {
    static constexpr unsigned at(int lane) { return part / 2 + InterleaveLow<part>::at(lane); }
};

struct EvenLanes {
    static constexpr unsigned at(int lane) { return 2 * lane; }
};

struct OddLanes {
    static constexpr unsigned at(int lane) { return 2 * lane + 1; }
};

template <int by>
struct Rotate {
    static constexpr unsigned at(int lane) { return (lane + by) % lanes; }
};

template <int span = lanes / 2>
inline float reduce_max(Float x) {
    x = max(x, permute<Rotate<span>>(x, x));
    if constexpr (span > 1) return reduce_max<span / 2>(x);
    return x[0];
}

template <int span = lanes / 2, class Vector>
inline auto reduce_sum(Vector x) {
    x += (Vector)permute<Rotate<span>>((Float)x, (Float)x);
    if constexpr (span > 1)
        return reduce_sum<span / 2>(x);
    else
        return x[0];
}

// Interleaving two halves rotates the (row, lane) address by one bit; log2(lanes) steps exchange row and lane.
template <int round = 1>
inline void transpose(Float (&rows)[lanes]) {
    Float next[lanes];
#pragma GCC unroll 16
    for (int i = 0; i < lanes / 2; ++i) {
        next[2 * i] = permute<InterleaveLow<>>(rows[i], rows[i + lanes / 2]);
        next[2 * i + 1] = permute<InterleaveHigh<>>(rows[i], rows[i + lanes / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i) rows[i] = next[i];
    if constexpr (2 * round < lanes) transpose<2 * round>(rows);
}

// The lanes that one instruction interleaves: with AVX, those of 128 bits.
#if defined(__AVX__)
inline constexpr int interleaved_lanes = 4;
#else
inline constexpr int interleaved_lanes = lanes;
#endif

// Lane i of the result is the sum of the lanes of x[i]; x is overwritten. Each round adds the interleaved halves of the
// first and of the second half of the vectors, so the sums end up in order. The first rounds stay within the lanes that
// one instruction interleaves: until each part has as many sums as lanes, all parts have sums of the same vectors.
template <int count = lanes>
inline Float sum_each(Float (&x)[lanes]) {
    constexpr int part = 2 * lanes / count <= interleaved_lanes ? interleaved_lanes : lanes;
#pragma GCC unroll 16
    for (int i = 0; i < count / 2; ++i)
        x[i] = permute<InterleaveLow<part>>(x[i], x[i + count / 2]) +
               permute<InterleaveHigh<part>>(x[i], x[i + count / 2]);
    if constexpr (count > 2) return sum_each<count / 2>(x);
    return x[0];
}

// Of functions that do nothing but prefetch, g++ leaves out the calls.
#define CATALOG_PREFETCH __attribute__((always_inline)) inline void

CATALOG_PREFETCH prefetch(const void* from) { __builtin_prefetch(from); }

// For memory that is read later than the CPU's own prefetching looks ahead: into the second cache. Prefetched into the
// first one, lines would wait for the same few buffers as the kernel's own loads.
CATALOG_PREFETCH prefetch_later(const void* from) { __builtin_prefetch(from, 0, 2); }

// The same for memory that is read once: past that cache, if prefetches_once(). Measured on a Zen 5: keys and values are
// read 5 to 25 % faster.
CATALOG_PREFETCH prefetch_past(const void* from) { __builtin_prefetch(from, 0, 0); }

inline bool prefetches_once() {
#if defined(__AVX512F__)
    return __builtin_cpu_is("amd");
#else
    return false;
#endif
}

CATALOG_PREFETCH prefetch_once(const void* from) {
    if (prefetches_once()) return prefetch_past(from);
    prefetch_later(from);
}

#undef CATALOG_PREFETCH

}  // namespace catalog::host
