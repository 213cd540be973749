// B as units, straight from a tensor that is read once: several vectors at a time where that takes fewer instructions.
#pragma once

#include <utility>

#include "units.hpp"

namespace catalog::host {

// What is added to every factor of B, in each byte of a unit.
template <class Unit>
inline constexpr std::uint32_t offset_of = 0;

#if defined(__AVX512F__)

// Four int8, those of B with an offset of 128, which AVX512-VNNI multiplies.
struct OffsetQuad {
    std::uint32_t bits;
};

template <>
inline constexpr std::uint32_t offset_of<OffsetQuad> = 0x80808080;

template <>
struct Units<OffsetQuad> : PairUnits<Units<OffsetQuad>, Ints> {
    using PairUnits::multiply_add;
    static constexpr int depth = 4;
    static void multiply_add(Sum& sum, Vector a, Vector b) {
        Sum next = sum;
        asm("vpdpbusd %2, %1, %0" : "+v"(next) : "v"(b), "v"(a));
        sum = next;
    }
};

#endif

// The units that are best for a B that is read once, of those that are best for panels of it.
template <class Unit>
struct Streamed {
    using type = Unit;
};

#if defined(__AVX512F__)
template <>
struct Streamed<WordPair<true>> {
    using type = OffsetQuad;
};
#endif

// Units along the depth. `is_stored`: the tensor holds them as they are multiplied.
template <class Unit, class T>
struct DepthReader {
    static constexpr int vectors = 1;
    static constexpr bool is_stored = Units<Unit>::depth * sizeof(T) == sizeof(Unit) && offset_of<Unit> == 0;
    using Vector = typename Units<Unit>::Vector;

    // `count` elements, then zeros.
    static void load(const T* from, std::int64_t count, Vector (&to)[vectors]) {
        to[0] = load_along<Unit>(from, count);
        if constexpr (offset_of<Unit> != 0) to[0] ^= offset_of<Unit>;
    }
};

// Units of columns: a row of units is as many rows of elements, `stride` apart, as a unit has factors.
template <class Unit, class T>
struct RowReader {
    static constexpr int vectors = 1;
    using Vector = typename Units<Unit>::Vector;

    static void load(const T* from, std::int64_t stride, Vector (&to)[vectors]) {
        to[0] = load_across<Unit>(from, stride, Units<Unit>::depth, lanes);
        if constexpr (offset_of<Unit> != 0) to[0] ^= offset_of<Unit>;
    }
};

#if defined(__AVX512F__)

typedef std::uint8_t AllBytes __attribute__((vector_size(vector_bytes)));
typedef std::uint64_t Quads __attribute__((vector_size(vector_bytes)));

// Element i of the result is element Pattern::at(i) of the concatenation of a and b.
template <class Pattern, class Vector, int... element>
inline Vector shuffled(Vector a, Vector b, std::integer_sequence<int, element...>) {
#if __has_builtin(__builtin_shufflevector)
    return __builtin_shufflevector(a, b, Pattern::at(element)...);
#else  // g++ 11
    return __builtin_shuffle(a, b, Vector{static_cast<decltype(a[0] + 0)>(Pattern::at(element))...});
#endif
}

template <class Pattern, class Vector>
inline Vector shuffled(Vector a, Vector b) {
    return shuffled<Pattern>(a, b, std::make_integer_sequence<int, sizeof(Vector) / sizeof(a[0])>{});
}

// In each 128 bits, the elements of the lower or upper halves of two vectors of `count` elements take turns.
template <int count, bool upper>
struct TakeTurns {
    static constexpr int in_part = count / 4;
    static constexpr int at(int i) {
        return i / in_part * in_part + i % in_part / 2 + upper * in_part / 2 + i % 2 * count;
    }
};

// Before and after elements take turns twice, and once: so they end up in order.
struct InOrderAfterTwo {
    static constexpr int at(int i) { return i % 4 * 4 + i / 4; }
};
struct InOrderAfterOne {
    static constexpr int at(int i) { return i / 2 + i % 2 * 4; }
};

template <bool upper, class Vector>
inline Vector take_turns(Vector a, Vector b) {
    return shuffled<TakeTurns<sizeof(Vector) / sizeof(a[0]), upper>>(a, b);
}

// Two rows of 16-bit factors as pairs.
struct LowerPairs {
    static constexpr int at(int i) { return i / 2 + i % 2 * 2 * lanes; }
};
struct UpperPairs {
    static constexpr int at(int i) { return lanes + LowerPairs::at(i); }
};

template <>
struct RowReader<BrainPair, bf16> {
    static constexpr int vectors = 2;

    static void load(const bf16* from, std::int64_t stride, Bits (&to)[vectors]) {
        Words rows[2];
        for (int row = 0; row < 2; ++row) std::memcpy(rows + row, from + row * stride, sizeof *rows);
        to[0] = (Bits)shuffled<LowerPairs>(rows[0], rows[1]);
        to[1] = (Bits)shuffled<UpperPairs>(rows[0], rows[1]);
    }
};

// Four vectors of units of four bytes, of which each vector has two: `lower` and `upper` ones of 64 columns.
inline void join_words(Words lower_a, Words lower_b, Words upper_a, Words upper_b, Bits (&to)[4]) {
    to[0] = (Bits)take_turns<false>(lower_a, lower_b);
    to[1] = (Bits)take_turns<true>(lower_a, lower_b);
    to[2] = (Bits)take_turns<false>(upper_a, upper_b);
    to[3] = (Bits)take_turns<true>(upper_a, upper_b);
}

// 64 columns of a row, in the order for taking turns twice.
inline AllBytes load_columns(const void* from) {
    Bits bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return (AllBytes)shuffled<InOrderAfterTwo>(bytes, bytes);
}

template <>
struct RowReader<OffsetQuad, std::int8_t> {
    static constexpr int vectors = 4;

    static void load(const std::int8_t* from, std::int64_t stride, Bits (&to)[vectors]) {
        AllBytes rows[4];
        for (int row = 0; row < 4; ++row)
            rows[row] = (AllBytes)((Bits)load_columns(from + row * stride) ^ offset_of<OffsetQuad>);
        join_words((Words)take_turns<false>(rows[0], rows[1]), (Words)take_turns<false>(rows[2], rows[3]),
                   (Words)take_turns<true>(rows[0], rows[1]), (Words)take_turns<true>(rows[2], rows[3]), to);
    }
};

// The bytes of the bf16 that equal the 8-bit floats from 0, with as many bits of mantissa, by the lower seven bits.
template <int mantissa, bool has_infinity>
struct BrainBytes {
    std::uint8_t low[128], high[128];

    static constexpr std::uint32_t bits_of(std::uint32_t code) {
        constexpr std::uint32_t one = 1u << mantissa, largest = 127 >> mantissa, bias = largest / 2;
        std::uint32_t exponent = code >> mantissa, fraction = code % one;
        if (has_infinity && exponent == largest) return fraction ? 0x7fc0 : 0x7f80;
        if (code == 127) return 0x7fc0;
        if (code == 0) return 0;
        exponent += 127 - bias;
        if (code < one)  // below the normal numbers
            for (++exponent; fraction < one; fraction *= 2) --exponent;
        return exponent << 7 | fraction % one << (7 - mantissa);
    }

    constexpr BrainBytes() : low(), high() {
        for (int code = 0; code < 128; ++code) {
            low[code] = static_cast<std::uint8_t>(bits_of(code));
            high[code] = static_cast<std::uint8_t>(bits_of(code) >> 8);
        }
    }
};

template <class T>
inline constexpr BrainBytes<3, false> brain_bytes;
template <>
inline constexpr BrainBytes<2, true> brain_bytes<bf8>;

inline AllBytes look_up(AllBytes index, const std::uint8_t (&table)[128]) {
    AllBytes halves[2];
    std::memcpy(halves, table, sizeof halves);
    asm("vpermi2b %2, %1, %0" : "+v"(index) : "v"(halves[0]), "v"(halves[1]));
    return index;
}

// The lower and the upper bytes of 64 floats of 8 bits as bf16.
template <class T>
struct BrainHalves {
    AllBytes low, high;

    explicit BrainHalves(AllBytes codes)
        : low(look_up(codes, brain_bytes<T>.low)), high(look_up(codes, brain_bytes<T>.high) | (codes & 0x80)) {}

    template <bool upper>
    Words joined() const {
        return (Words)take_turns<upper>(low, high);
    }
};

// Reads floats of 8 bits, four vectors at a time. Needs has_byte_tables().
template <class T>
struct FloatReaderOfTables {
    static constexpr int vectors = 4;
    static constexpr float factor = 1;

    static void load(const T* from, Float (&to)[vectors]) {
        const BrainHalves<T> halves(load_columns(from));
        const Words lower = halves.template joined<false>(), upper = halves.template joined<true>(), zeros{};
        to[0] = (Float)take_turns<false>(zeros, lower);
        to[1] = (Float)take_turns<true>(zeros, lower);
        to[2] = (Float)take_turns<false>(zeros, upper);
        to[3] = (Float)take_turns<true>(zeros, upper);
    }
};

template <class T>
struct DepthReaderOfTables {
    static constexpr int vectors = 2;
    static constexpr bool is_stored = false;

    static void load(const T* from, std::int64_t count, Bits (&to)[vectors]) {
        constexpr int all = 4 * lanes;
        T buffer[all];
        if (count < all) {
            std::memset(static_cast<void*>(buffer), 0, sizeof buffer);
            if (count > 0) std::memcpy(static_cast<void*>(buffer), from, count);
            from = buffer;
        }
        Quads codes;
        std::memcpy(&codes, from, sizeof codes);
        const BrainHalves<T> halves((AllBytes)shuffled<InOrderAfterOne>(codes, codes));
        to[0] = (Bits)halves.template joined<false>();
        to[1] = (Bits)halves.template joined<true>();
    }
};

template <class T>
struct RowReaderOfTables {
    static constexpr int vectors = 4;

    static void load(const T* from, std::int64_t stride, Bits (&to)[vectors]) {
        const BrainHalves<T> first(load_columns(from)), second(load_columns(from + stride));
        join_words(first.template joined<false>(), second.template joined<false>(), first.template joined<true>(),
                   second.template joined<true>(), to);
    }
};

template <>
struct DepthReader<BrainPair, fp8> : DepthReaderOfTables<fp8> {};
template <>
struct DepthReader<BrainPair, bf8> : DepthReaderOfTables<bf8> {};
template <>
struct RowReader<BrainPair, fp8> : RowReaderOfTables<fp8> {};
template <>
struct RowReader<BrainPair, bf8> : RowReaderOfTables<bf8> {};

#endif

}  // namespace catalog::host
