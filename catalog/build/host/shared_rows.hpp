// Products of rows that share vectors. A lane holds a row and a place along the depth: with R rows, a vector has
// lanes / R units of a column of B, once for each row, and the units of A that belong to them. So each column has one
// vector of sums.
#pragma once

#include <algorithm>

#include "lines.hpp"
#include "streams.hpp"

namespace catalog::host {

// A vector with the same `units` units in turn, read from memory.
template <class Unit, int units>
inline auto repeated(const void* from) {
    using Vector = typename Units<Unit>::Vector;
    Vector vector;
    if constexpr (units == lanes) {
        std::memcpy(&vector, from, sizeof vector);
#if defined(__AVX512F__)
    } else if constexpr (units == 8) {
        asm("vbroadcastf32x8 %1, %0" : "=v"(vector) : "m"(*static_cast<const char(*)[32]>(from)));
    } else if constexpr (units == 4) {
        asm("vbroadcastf32x4 %1, %0" : "=v"(vector) : "m"(*static_cast<const char(*)[16]>(from)));
    } else if constexpr (units == 2) {
        asm("vbroadcastsd %1, %0" : "=v"(vector) : "m"(*static_cast<const char(*)[8]>(from)));
#elif defined(__AVX__)
    } else if constexpr (units == 4) {
        asm("vbroadcastf128 %1, %0" : "=x"(vector) : "m"(*static_cast<const char(*)[16]>(from)));
    } else if constexpr (units == 2) {
        asm("vbroadcastsd %1, %0" : "=x"(vector) : "m"(*static_cast<const char(*)[8]>(from)));
#endif
    } else if constexpr (units == 1) {
        std::uint32_t unit;
        std::memcpy(&unit, from, sizeof unit);
        vector = (Vector)(Bits{} + unit);
    } else {
        std::uint32_t all[lanes];
        for (int lane = 0; lane < lanes; lane += units) std::memcpy(all + lane, from, units * sizeof *all);
        std::memcpy(&vector, all, sizeof vector);
    }
    return vector;
}

// Copies a row's units to where the vectors that `rows` rows share have them; `depth` is in units, whole vectors.
template <int rows, class Unit>
inline void share_vectors(const Unit* from, int row, int depth, Unit* to) {
    constexpr int piece = lanes / rows;
    for (int k = 0; k < depth; k += piece) std::memcpy(to + k * rows + row * piece, from + k, piece * sizeof(Unit));
}

// Of as many vectors as there are lanes, each with the sums of `rows` rows, lanes / rows neighbours a row: the first
// `rows` become the totals of a row each. Each round makes the lowest bit of the lane's number one of the vector's, or
// adds over it, and the lowest bit of the vector's number the highest one of the lane's.
template <int rows, int count = lanes, int rounds = lanes>
inline void sum_shared(Float (&x)[lanes]) {
    if constexpr (rounds > 1) {
        constexpr bool adds = count > rows;
        Float odd[count / 2 + 1];
#pragma GCC unroll 16
        for (int i = 0; i < count / 2; ++i) {
            odd[i] = permute<OddLanes>(x[2 * i], x[2 * i + 1]);
            x[i] = permute<EvenLanes>(x[2 * i], x[2 * i + 1]);
            if (adds) x[i] += odd[i];
        }
        if constexpr (!adds) {
#pragma GCC unroll 16
            for (int i = 0; i < count / 2; ++i) x[count / 2 + i] = odd[i];
        }
        sum_shared<rows, adds ? count / 2 : count, rounds / 2>(x);
    }
}

// c[r * ldc + j] = a[r] . b[first + j] for `rows` rows of A, which share vectors, and as many rows of B as there are
// lanes. Rows after `last` are read as `last`, so that no tail code is needed; their products are not used. The depth
// is in elements of B, whole reads of it. As many lines are prefetched of `next` as are read of B.
template <int rows, int ldc, class Unit, class B, class Ahead>
__attribute__((noinline)) inline void multiply_shared(const Unit* a, B b, int first, int last, int depth, Ahead& next,
                                                      float* c) {
    using Element = std::remove_const_t<std::remove_pointer_t<decltype(b[0])>>;
    using Reader = DepthReader<Unit, Element>;
    constexpr int piece = lanes / rows, factors = Units<Unit>::depth, read = Reader::vectors, step = lanes * factors;
    static_assert(rows == 1 || Reader::is_stored, "parts of vectors are read from memory");
    const Element* row[lanes];
    for (int j = 0; j < lanes; ++j) row[j] = b[std::min(first + j, last)];
    Ahead ahead = next;  // in registers
    Float sums[lanes] = {};
    for (int k = 0; k < depth; k += read * step, a += read * rows * lanes) {
        if constexpr (rows == 1) {
            typename Units<Unit>::Vector of_a[read];
            for (int v = 0; v < read; ++v) of_a[v] = load(a + v * lanes);
#pragma GCC unroll 16
            for (int j = 0; j < lanes; ++j) {
                ahead.ask();
                typename Units<Unit>::Vector of_b[read];
                Reader::load(row[j] + k, read * step, of_b);
                for (int v = 0; v < read; ++v) Units<Unit>::multiply_add(sums[j], of_a[v], of_b[v]);
            }
        } else {
            ahead.ask_lines(lanes);
            constexpr int together = std::max(rows / 2, 1);  // pieces for which the address of a row is loaded once
#pragma GCC unroll 16
            for (int i = 0; i < rows; i += together) {
                typename Units<Unit>::Vector of_a[together];
                for (int t = 0; t < together; ++t) of_a[t] = load(a + (i + t) * lanes);
#pragma GCC unroll 16
                for (int j = 0; j < lanes; ++j)
#pragma GCC unroll 16
                    for (int t = 0; t < together; ++t)
                        Units<Unit>::multiply_add(sums[j], of_a[t],
                                                  repeated<Unit, piece>(row[j] + k + (i + t) * piece * factors));
            }
        }
    }
    next = ahead;
    sum_shared<rows>(sums);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) store(c + r * ldc, sums[r]);
}

}  // namespace catalog::host
