// The product of few rows with a B whose columns are contiguous. A lane holds a row and a place along the depth: with R
// rows, a vector has lanes / R units of a column of B, once for each row, and the units of A that belong to them. So each
// column has one vector of sums, and each vector of A is used for a whole group of columns.
//
// 16 registers do not hold the vectors of A beside these sums. There, a vector has units of one row, and a unit of B is
// multiplied by all rows as soon as it is read.
#pragma once

#include <algorithm>
#include <cstdint>

#include "host/lines.hpp"
#include "host/panels.hpp"
#include "host/shared_rows.hpp"
#include "scales.hpp"

namespace catalog::host {

// The least number of lanes that `rows` rows can share evenly: the next power of two.
constexpr int rows_in_lanes(int rows) {
    int held = 1;
    while (held < rows) held *= 2;
    return held;
}

// Whether a vector of A has units of several rows.
inline constexpr bool rows_share_vectors = vector_registers > 16;

// Whether products of one row ask for the memory that they will read. With AVX-512, CPUs prefetch whole columns themselves,
// and read them more slowly if asked to, unless much is multiplied meanwhile. Measured on a Zen 5.
#if defined(__AVX512F__)
inline constexpr bool prefetches_row = false;
#else
inline constexpr bool prefetches_row = true;
#endif

// Each lane that begins `span` lanes becomes their sum.
template <int span, class Vector>
inline Vector sum_of_spans(Vector x) {
    if constexpr (span > 1) {
        x += (Vector)permute<Rotate<span / 2>>((Float)x, (Float)x);
        return sum_of_spans<span / 2>(x);
    }
    return x;
}

// Up to `lanes` rows of A in the order in which they are multiplied, and what the offset of B adds to their sums.
template <class Unit>
struct RowsOfA {
    using Vector = typename Units<Unit>::Sum;

    Unit* units;
    int rows;
    Vector start;

    // Packs `count` rows, and zeros up to a multiple of `whole` in the depth. Their units are in the order of the vectors:
    // for each `lanes` units of the depth, a vector for each piece of it, in which rows follow each other, or one for each
    // row.
    template <bool along, class T>
    void pack(Factor<along, T> from, int count, std::int64_t depth, int whole) {
        constexpr int step = lanes * Units<Unit>::depth;
        rows = rows_in_lanes(count);
        start = Vector{};
        Unit* to = units;
        for (std::int64_t k = 0; k < (depth + whole - 1) / whole * whole; k += step, to += rows * lanes) {
            alignas(vector_bytes) Unit block[lanes * lanes];
            const int packed = k < depth ? count : 0;
            pack_rows<Unit>(from.from(0, k), packed, std::min<std::int64_t>(step, depth - k), block, lanes);
            for (int row = packed; row < rows; ++row) store(block + row * lanes, typename Units<Unit>::Vector{});
            copy_pieces<lanes>(block, to);
            if constexpr (offset_of<Unit> != 0)
                for (int i = 0; i < rows; ++i)
                    Units<Unit>::multiply_add(start, load(to + i * lanes), Bits{} + offset_of<Unit>);
        }
        start = Vector{} - start;
    }

   private:
    // `held` is the number of rows, once it is found: then pieces have a known size.
    template <int held>
    void copy_pieces(const Unit* block, Unit* to) const {
        if constexpr (held > 1)
            if (rows < held) return copy_pieces<held / 2>(block, to);
        constexpr int piece = rows_share_vectors ? lanes / held : lanes;
        for (int row = 0; row < held; ++row)
            for (int i = 0; i < lanes / piece; ++i)
                std::memcpy(to + i * lanes + row * piece, block + row * lanes + i * piece, piece * sizeof(Unit));
    }
};

// Successive blocks of the depth: the scale of each lane's row, the scale of all columns, and where sums start.
template <class Unit>
struct BlocksOfDepth {
    using Vector = typename Units<Unit>::Sum;

    const float *of_lanes, *of_columns;
    const std::int32_t* starts;  // as RowsOfA has them, of units with an offset

    Float factor() const { return load(of_lanes) * *of_columns; }
    Vector start() const {
        if constexpr (offset_of<Unit> != 0)
            return load(starts);
        else
            return Vector{};
    }
    void next() {
        of_lanes += lanes;
        of_columns += 1;
        if constexpr (offset_of<Unit> != 0) starts += lanes;
    }
};

// The products of all rows with a group of columns of B to some depth, which is added to the sums of each column.
template <class Unit, class T>
class ColumnsOfB {
    using Sums = typename Units<Unit>::Sum;
    using Reader = DepthReader<Unit, T>;
    static constexpr int step = lanes * Units<Unit>::depth, read = Reader::vectors;

   public:
    static constexpr int whole = read * step;  // elements that are read at a time

    // `ahead` is what will be multiplied later, and is prefetched. Loops for several rows do not test whether there is
    // any, which would cost more: if not, they prefetch what they read anyway.
    const T* data;
    std::int64_t stride;
    ReadAhead ahead;

    template <int rows, int columns>
    void multiply(const Unit* a, std::int64_t depth, Sums* sums) const {
        Sums sum[columns];
#pragma GCC unroll 16
        for (int c = 0; c < columns; ++c) sum[c] = sums[c];
        if constexpr (columns < 4) {
            multiply_add<rows>(a, depth, sum, nothing_ahead);  // a CPU prefetches so few columns itself
        } else {
            ReadAhead next = ahead;
            next.visit([&](auto& asker) { multiply_add<rows>(a, depth, sum, asker); });
        }
#pragma GCC unroll 16
        for (int c = 0; c < columns; ++c) sums[c] = sum[c];
    }

    // The same in blocks of the depth, whose products are multiplied by their scales before they are added.
    template <int rows, int columns>
    void multiply_scaled(const Unit* a, std::int64_t depth, BlocksOfDepth<Unit> blocks, Float* sums) const {
        constexpr int block = block_extent / Units<Unit>::depth * rows;
        Float total[columns];
#pragma GCC unroll 16
        for (int c = 0; c < columns; ++c) total[c] = sums[c];
        ReadAhead next = ahead;
        for (ColumnsOfB b = *this; depth > 0; depth -= block_extent, b.data += block_extent, a += block, blocks.next()) {
            Sums sum[columns];
#pragma GCC unroll 16
            for (int c = 0; c < columns; ++c) sum[c] = blocks.start();
            next.visit([&](auto& asker) {
                b.template multiply_add<rows>(a, std::min<std::int64_t>(depth, block_extent), sum, asker);
            });
            const Float factor = blocks.factor();
#pragma GCC unroll 16
            for (int c = 0; c < columns; ++c) total[c] += as_float(sum[c]) * factor;
        }
#pragma GCC unroll 16
        for (int c = 0; c < columns; ++c) sums[c] = total[c];
    }

   private:
    template <int rows, int columns, class Ahead>
    void multiply_add(const Unit* a, std::int64_t depth, Sums (&sum)[columns], Ahead& ahead) const {
        Ahead asked = ahead;  // in registers
        if constexpr (rows == 1) {
            std::int64_t k = 0;
            for (; k + whole <= depth; k += whole, a += read * lanes) multiply_row<columns>(a, k, whole, sum, asked);
            if (k < depth) multiply_row<columns>(a, k, depth - k, sum, asked);
        } else if constexpr (!rows_share_vectors) {
            constexpr std::int64_t in_cache = 4096 / rows * Units<Unit>::depth;  // A stays in half of a cache of 32 KiB
            for (std::int64_t k = 0; k < depth; k += in_cache, a += 4096)
                multiply_apart<rows>(a, k, std::min(depth - k, in_cache), sum, asked);
        } else {
            const std::int64_t stored = Reader::is_stored ? depth / whole * whole : 0;
            // An addition takes longer than it takes to begin one for each of a few columns, or of pairs for each of more: so
            // each has several sums.
            constexpr int turns = columns < 4 ? std::min(rows, 4) : Units<Unit>::depth > 1 && rows >= 8 ? 2 : 1;
            Sums sums[turns][columns] = {};
            for (std::int64_t k = 0; k < stored; k += step, a += rows * lanes) {
#pragma GCC unroll 16
                for (int c = 0; c < columns; ++c) {
                    const T* const from = data + c * stride + k;
                    asked.template ask<step * sizeof(T)>(from, c);
                    multiply_pieces<rows>(a, from, [&](int i) -> Sums& { return sums[i % turns][c]; });
                }
                asked.pass(columns * step * sizeof(T));
            }
#pragma GCC unroll 4
            for (int turn = 0; turn < turns; ++turn)
#pragma GCC unroll 16
                for (int c = 0; c < columns; ++c) sum[c] += sums[turn][c];
            for (std::int64_t k = stored; k < depth; k += copied * whole, a += copied * read * rows * lanes)
                multiply_copies<rows, columns>(a, k, std::min<std::int64_t>(depth - k, copied * whole), sum, asked);
        }
        ahead = asked;
    }

    static constexpr int copied = Reader::is_stored ? 1 : 4;  // how often is read before it is multiplied

    template <int columns, class Ahead>
    void multiply_row(const Unit* a, std::int64_t k, std::int64_t count, Sums (&sum)[columns], Ahead& asked) const {
        // A compiler that knows the stride to stay the same keeps a pointer for each column, too many for the registers.
        std::int64_t stride = this->stride;
        asm("" : "+r"(stride));
        const T* from = data + k;
#pragma GCC unroll 16
        for (int c = 0; c < columns; ++c, from += stride) {
            if (prefetches_row && asked.is_any()) asked.template ask<whole * sizeof(T)>(from, c);
            typename Units<Unit>::Vector vectors[read];
            Reader::load(from, count, vectors);
#pragma GCC unroll 2
            for (int v = 0; v < read; ++v) Units<Unit>::multiply_add(sum[c], load(a + v * lanes), vectors[v]);
        }
        asked.pass(columns * whole * sizeof(T));
    }

    // Each row and column of a few has a vector of sums, whose total is added to the lane with which the row begins.
    template <int rows, int columns, class Ahead>
    void multiply_apart(const Unit* a, std::int64_t first_k, std::int64_t depth, Sums (&sum)[columns],
                        const Ahead& ahead) const {
        constexpr int piece = lanes / rows, together = std::min(piece, columns);
        for (int first = 0; first < columns; first += together) {
            Sums apart[rows][together] = {};
            const T* const from = data + first * stride + first_k;
            const std::int64_t whole_depth = depth / step * step;
            for (std::int64_t k = 0; k < whole_depth; k += step)
                multiply_step(a + k / step * rows * lanes, from + k, step, apart, ahead);
            if (whole_depth < depth)
                multiply_step(a + whole_depth / step * rows * lanes, from + whole_depth, depth - whole_depth, apart,
                              ahead);
#pragma GCC unroll 8
            for (int c = 0; c < together; ++c)
#pragma GCC unroll 8
                for (int row = 0; row < rows; ++row) sum[first + c][row * piece] += reduce_sum(apart[row][c]);
        }
    }

    template <int rows, int together, class Ahead>
    void multiply_step(const Unit* a, const T* from, std::int64_t count, Sums (&apart)[rows][together],
                       const Ahead& ahead) const {
        static_assert(read == 1 || rows_share_vectors, "a vector of B is multiplied before the next one is read");
#pragma GCC unroll 8
        for (int c = 0; c < together; ++c, from += stride) {
            ahead.template ask<step * sizeof(T)>(from, c);
            typename Units<Unit>::Vector of_b[read];
            Reader::load(from, count, of_b);
#pragma GCC unroll 8
            for (int row = 0; row < rows; ++row)
                Units<Unit>::multiply_add(apart[row][c], load(a + row * lanes), of_b[0]);
        }
    }

    // Units that the tensor does not hold are copied some time before they are multiplied: parts of a vector that was just
    // stored cannot be loaded yet.
    template <int rows, int columns, class Ahead>
    void multiply_copies(const Unit* a, std::int64_t k, std::int64_t count, Sums (&sum)[columns], Ahead& asked) const {
        alignas(vector_bytes) Unit copies[columns][copied * read * lanes];
        for (int c = 0; c < columns; ++c) {
            const T* const from = data + c * stride + k;
            for (std::int64_t at = 0; at < count; at += whole) {
                if (asked.is_any()) asked.template ask<whole * sizeof(T)>(from + at, static_cast<int>(at / whole));
                typename Units<Unit>::Vector vectors[read];
                Reader::load(from + at, count - at, vectors);
                for (int v = 0; v < read; ++v) store(copies[c] + (at / step + v) * lanes, vectors[v]);
            }
            asked.pass(copied * whole * sizeof(T));
        }
        for (std::int64_t at = 0; at < count; at += step, a += rows * lanes) {
#pragma GCC unroll 16
            for (int c = 0; c < columns; ++c)
                multiply_pieces<rows>(a, copies[c] + at / step * lanes, [&](int) -> Sums& { return sum[c]; });
        }
    }

    // Piece i of a vector of units is added to the sum that `sum_of(i)` names.
    template <int rows, class SumOfPiece>
    static void multiply_pieces(const Unit* a, const void* units, const SumOfPiece& sum_of) {
        constexpr int piece = lanes / rows;
#pragma GCC unroll 16
        for (int i = 0; i < rows; ++i)
            Units<Unit>::multiply_add(sum_of(i), load(a + i * lanes),
                                      repeated<Unit, piece>(static_cast<const char*>(units) + i * piece * sizeof(Unit)));
    }
};

}  // namespace catalog::host
