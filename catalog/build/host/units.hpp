// Units: the factors of a product that one 32-bit lane holds, neighbours along the depth. A unit is one float, two
// factors of 16 bits, or four of 8.
//
// Instructions that only some CPUs of the target have are written in assembly, so that one library runs on all of them;
// is_supported() of a unit tells whether this CPU has them. Another such instruction is another unit. AMX multiplies
// panels of units in tiles: tiles.hpp.
#pragma once

#include "fp8.hpp"

namespace catalog::host {

// Whether some CPUs of the target multiply pairs of bf16.
#if defined(__AVX512F__) || defined(__aarch64__)
#define CATALOG_BRAIN_PAIRS 1
#endif

// Two bf16, which AVX512-BF16 and BFDOT multiply. They take subnormal factors for zero.
struct BrainPair {
    std::uint32_t bits;
};

// Two fp16, which AMX-FP16 multiplies.
struct HalfPair {
    std::uint32_t bits;
};

// One fp16 as the sum of two bf16, an upper part and a lower one: 8 significant bits and 3 make 11, so the sum is exact. The
// parts are apart: of 32 factors along the depth, 16 pairs of upper parts come first, then 16 pairs of lower ones.
struct SplitHalf {
    std::uint32_t bits;
};

// Two int16; `dot`: the CPU has AVX512-VNNI.
template <bool dot>
struct WordPair {
    std::uint32_t bits;
};

// Four int8, which AMX and SDOT multiply.
struct ByteQuad {
    std::uint32_t bits;
};

// Of each unit: `depth` is how many factors it has, `Vector` holds a unit in each lane, `Sum` the sums of their products;
// multiply_add adds a product to each lane. Assembly takes a copy of the sum: an array with an element that is an operand
// stays in memory where g++ inlines the loop.
template <class Unit>
struct Units;

template <>
struct Units<float> {
    static constexpr int depth = 1;
    using Vector = Float;
    using Sum = Float;

    static void multiply_add(Sum& sum, float a, Vector b) { sum += a * b; }
    static void multiply_add(Sum& sum, Vector a, Vector b) { sum += a * b; }
};

template <class OfPairs, class SumOfPairs>
struct PairUnits {
    static constexpr int depth = 2;
    using Vector = Bits;
    using Sum = SumOfPairs;

    template <class Pair>
    static void multiply_add(Sum& sum, Pair a, Vector b) {
        OfPairs::multiply_add(sum, Vector{} + a.bits, b);
    }
};

template <>
struct Units<WordPair<false>> : PairUnits<Units<WordPair<false>>, Ints> {
    using PairUnits::multiply_add;
    static void multiply_add(Sum& sum, Vector a, Vector b) {
#if defined(__AVX2__)
        Ints products;
        asm("vpmaddwd %2, %1, %0" : "=v"(products) : "v"(b), "v"(a));
        sum += products;
#else
        sum += ((Ints)(a << 16) >> 16) * ((Ints)(b << 16) >> 16) + ((Ints)a >> 16) * ((Ints)b >> 16);
#endif
    }
};

#if defined(CATALOG_BRAIN_PAIRS)
typedef std::uint16_t Words __attribute__((vector_size(vector_bytes)));
#endif

#if defined(__AVX512F__)

// A vector whose upper half is not defined.
inline Words as_lower_half(HalfBits x) {
#if defined(__clang__)
    return __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, -1, -1, -1, -1, -1, -1, -1,
                                   -1, -1, -1, -1, -1, -1, -1, -1, -1);
#else
    typedef int HalfInts __attribute__((vector_size(vector_bytes / 2)));
    return (Words)__builtin_ia32_si512_256si((HalfInts)x);
#endif
}

template <>
struct Units<BrainPair> : PairUnits<Units<BrainPair>, Float> {
    using PairUnits::multiply_add;
    static bool is_supported() { return __builtin_cpu_supports("avx512bf16"); }
    static void multiply_add(Sum& sum, Vector a, Vector b) {
        Sum next = sum;
        asm("vdpbf16ps %2, %1, %0" : "+v"(next) : "v"(b), "v"(a));
        sum = next;
    }

    // As bf16, rounded to nearest even; numbers below the smallest normal one become zero.
    static HalfBits narrow(Sum sum) {
        HalfBits halves;
        asm("vcvtneps2bf16 %1, %t0" : "=v"(halves) : "v"(sum));
        return halves;
    }

    // Pairs of an element of `low` and the same one of `high`.
    static Vector across(HalfBits low, HalfBits high);

    // The lower half of a vector; the upper half is not defined.
    static Vector load_half(const BrainPair* from) {
        HalfBits half;
        std::memcpy(&half, from, sizeof half);
        return (Vector)as_lower_half(half);
    }
};

// Neighbours as pairs, those of `low` first, rounded to nearest even; numbers below the smallest normal one become zero.
inline Bits brain_pairs(Float low, Float high) {
    Bits pairs;
    asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(pairs) : "v"(high), "v"(low));
    return pairs;
}

template <>
struct Units<WordPair<true>> : PairUnits<Units<WordPair<true>>, Ints> {
    using PairUnits::multiply_add;
    static bool is_supported() { return __builtin_cpu_supports("avx512vnni"); }
    static void multiply_add(Sum& sum, Vector a, Vector b) {
        Sum next = sum;
        asm("vpdpwssd %2, %1, %0" : "+v"(next) : "v"(b), "v"(a));
        sum = next;
    }
};

// The unit in which vectors multiply int8 best.
using IntegerUnit = WordPair<true>;

#elif defined(__aarch64__)

template <>
struct Units<BrainPair> {
    static constexpr int depth = 2;
    using Vector = Bits;
    using Sum = Float;

    static bool is_supported() { return has_bf16(); }
    static void multiply_add(Sum& sum, BrainPair a, Vector b) { dot_pairs(sum, a.bits, b); }
    static void multiply_add(Sum& sum, Vector a, Vector b) { dot_pairs(sum, a, b); }
};

using IntegerUnit = ByteQuad;

#else

using IntegerUnit = WordPair<false>;

#endif

// For AMX, there is no product of vectors of these.
template <>
struct Units<HalfPair> {
    static constexpr int depth = 2;
    using Vector = Bits;
    using Sum = Float;
};

template <>
struct Units<SplitHalf> {
    static constexpr int depth = 1;
    using Vector = Bits;
    using Sum = Float;
};

template <>
struct Units<ByteQuad> {
    static constexpr int depth = 4;
    using Vector = Bits;
    using Sum = Ints;

#if defined(__aarch64__)
    static bool is_supported() { return has_dotprod(); }
    static void multiply_add(Sum& sum, ByteQuad a, Vector b) { dot_bytes(sum, a.bits, b); }
    static void multiply_add(Sum& sum, Vector a, Vector b) { dot_bytes(sum, a, b); }
#endif
};

// Whether this CPU makes bf16 of 8-bit floats as fast as it multiplies them: on x86 it looks bytes up in tables of 128.
#if defined(__AVX512F__)
inline bool has_byte_tables() { return __builtin_cpu_supports("avx512vbmi"); }
#else
inline bool has_byte_tables() { return true; }
#endif

#if defined(CATALOG_BRAIN_PAIRS)

// Words of `even`, from the one at `first` on, in the even places and as many of `odd` in the odd ones.
template <int first, int apart, int... word>
inline Bits interleave(Words even, Words odd, std::integer_sequence<int, word...>) {
#if __has_builtin(__builtin_shufflevector)
    return (Bits)__builtin_shufflevector(even, odd, first + word / 2 + word % 2 * apart...);
#else  // g++ 11
    return (Bits)__builtin_shuffle(even, odd, Words{static_cast<std::uint16_t>(first + word / 2 + word % 2 * apart)...});
#endif
}

// Pairs of the words of the lower halves, or of the upper ones.
template <bool upper>
inline Bits interleave(Words even, Words odd) {
    return interleave<upper ? lanes : 0, 2 * lanes>(even, odd, std::make_integer_sequence<int, 2 * lanes>{});
}

#if defined(__AVX512F__)
inline Bits Units<BrainPair>::across(HalfBits low, HalfBits high) {
    return interleave<0, 2 * lanes>(as_lower_half(low), as_lower_half(high), std::make_integer_sequence<int, 2 * lanes>{});
}
#endif

// Pairs of an element of `low` and the same one of `high`: two rows become units along the rows' own axis.
inline Bits brain_pairs_across(Float low, Float high) {
    const auto both = (Words)brain_pairs(low, high);
    return interleave<0, lanes>(both, both, std::make_integer_sequence<int, 2 * lanes>{});
}

#endif

template <class Pair, int = Units<Pair>::depth>
inline Bits load(const Pair* from) {
    return load_bits<Bits>(from);
}
template <class Pair, int = Units<Pair>::depth>
inline void store(Pair* to, Bits units) {
    store_bits(to, units);
}
// A vector of elements as halves of units: in the lower 16 bits of each lane. All 8-bit types fit.
inline Bits halves(const bf16* from) { return widen(load_bits<HalfBits>(from)); }
inline Bits halves(const fp16* from) { return widen(load_bits<HalfBits>(from)); }
inline Bits halves(const fp8* from) { return (Bits)load(from) >> 16; }
inline Bits halves(const bf8* from) { return (Bits)load(from) >> 16; }
inline Bits halves(const std::int8_t* from) { return (Bits)load_signed(from) & 0xffff; }

// A vector of elements as the first factors of units, whose other bits are 0.
template <class Unit, class T>
inline Bits factors_of(const T* from) {
    if constexpr (Units<Unit>::depth == 4)
        return halves(from) & 0xff;
    else
        return halves(from);
}

// Units from neighbours in one row: `count` elements, then zeros; `from` may end after them.
template <class Unit, class T>
inline typename Units<Unit>::Vector load_along(const T* from, std::int64_t count) {
    if constexpr (Units<Unit>::depth == 1) {
        return load_first(from, count);
    } else {
        constexpr int factors = Units<Unit>::depth;
        T buffer[factors * lanes];
        if (count < factors * lanes) {
            read_first(buffer, from, count);
            from = buffer;
        }
        if constexpr (factors * sizeof(T) == sizeof(Unit)) {
            Bits units;
            std::memcpy(&units, from, sizeof units);
            return units;
        } else if constexpr (std::is_same_v<T, std::int8_t>) {
            return load_signed_pairs(from);
        } else {
            std::uint16_t both[2 * lanes];
            store_bits(both, narrow(halves(from)));
            store_bits(both + lanes, narrow(halves(from + lanes)));
            Bits units;
            std::memcpy(&units, both, sizeof units);
            return units;
        }
    }
}

// Units from `depth` rows, `stride` apart, of which `rows` exist; the first `count` columns, then zeros.
template <class Unit, class T>
inline typename Units<Unit>::Vector load_across(const T* from, std::int64_t stride, std::int64_t rows,
                                                    std::int64_t count) {
    if constexpr (Units<Unit>::depth == 1) {
        return load_first(from, count);
    } else {
        const auto factor = [count](const T* row) {
            if (count >= lanes) return factors_of<Unit>(row);
            T buffer[lanes];
            read_first(buffer, row, count);
            return factors_of<Unit>(buffer);
        };
        constexpr int bits = 32 / Units<Unit>::depth;
        Bits units = factor(from);
#pragma GCC unroll 4
        for (int row = 1; row < Units<Unit>::depth; ++row)
            if (row < rows) units |= factor(from + row * stride) << row * bits;
        return units;
    }
}

}  // namespace catalog::host
