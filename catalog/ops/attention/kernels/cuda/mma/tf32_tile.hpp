// What MmaTile does, for elements of 32 bits: tensor cores multiply them in two parts, see tf32.hpp.
#pragma once

#include "cuda/tf32.hpp"
#include "mma_queries.hpp"

namespace catalog::cuda {

// Where a lane finds the values of its two keys of every eight, in the column lane / 4 of every eight. Rows 2 (lane % 4) of
// eight neighbours, and those that follow, are permuted differently: 32 lanes read from 32 banks.
template <int hdim>
class ValueRows {
    using Rows = MatrixRows<hdim * 4>;

   public:
    __device__ __forceinline__ ValueRows(std::uint32_t tile, int lane)
        : even(tile + lane / 4 % 4 * 4, lane % 4 * 2, lane / 16), odd(tile + lane / 4 % 4 * 4, lane % 4 * 2 + 1, lane / 16) {}

    // Of the eight keys from `first_key` on, in the columns from 8 n on.
    __device__ __forceinline__ TwoTf32<2> load(int first_key, int n) const {
        return TwoTf32<2>({load_word(even.at(first_key, n)), load_word(odd.at(first_key, n))});
    }

   private:
    static __device__ __forceinline__ std::uint32_t load_word(std::uint32_t address) {
        std::uint32_t word;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
        return word;
    }

    Rows even, odd;
};

// The same, in a tile of values of vectorized pages, which have both keys of a column together: see ValueVectors.
template <int hdim>
class ValuePairs {
   public:
    __device__ __forceinline__ ValuePairs(std::uint32_t tile, int lane)
        : address(tile + (lane % 4 / 2 * hdim + lane / 4) * 16 + lane % 2 * 8) {}

    __device__ __forceinline__ TwoTf32<2> load(int first_key, int n) const {
        std::uint32_t values[2];
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                     : "=r"(values[0]), "=r"(values[1])
                     : "r"(address + (first_key / 4 * hdim + 8 * n) * 16)
                     : "memory");
        return TwoTf32<2>(values);
    }

   private:
    std::uint32_t address;
};

// Matrices of 16-bit elements that are loaded as such give a lane elements of 32 bits where mma.sync wants those of TF32. Of
// the weights a lane has two neighbours of every eight keys, where mma.sync expects keys that are four apart: so do values.
template <class Row>
class Tf32Tile {
    using Shape = MmaShape<Row>;
    static constexpr int atoms = Shape::atoms, keys = Shape::keys;
    static constexpr int together = 4;  // columns of eight whose values are multiplied by turns: none waits for the last one
    using KeyRows = MatrixRows<Row::hdim_q * Shape::element>;
    using Values = std::conditional_t<is_vectorized<Row>, ValuePairs<Row::hdim_v>, ValueRows<Row::hdim_v>>;
    using Queries = MmaQueries<Row>;

   public:
    // As in MmaTile.
    float s[atoms][keys / 8][4];
    float o[atoms][Row::hdim_v / 8][4];

    // `q`: the tile's first row.
    __device__ __forceinline__ explicit Tf32Tile(std::uint32_t q) : queries(q) { clear(o); }

    // Q has arrived.
    __device__ __forceinline__ void load_queries() { queries.load(); }

    __device__ __forceinline__ void multiply_q_k(std::uint32_t k, int zero) {
        clear(s);
        const int lane = MmaThread<Row>(zero).lane;
        const KeyRows k_rows(k, lane % 8 + lane / 16 * 8, lane / 8 % 2);
        queries.for_steps(zero, [&](int step, const typename Queries::Step& of_step) {
            multiply_step(k_rows, step, of_step[0]);
        });
    }

    // O += s * V
    __device__ __forceinline__ void multiply_p_v(std::uint32_t v, int zero) {
        const Values rows(v, MmaThread<Row>(zero).lane);
#pragma unroll(unrolled)
        for (int step = 0; step < keys / 8; ++step) {
            TwoTf32<4> weights[atoms];
#pragma unroll
            for (int m = 0; m < atoms; ++m) {
                std::uint32_t bits[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) bits[i] = __float_as_uint(s[m][unrolled > 1 ? step : 0][i % 2 * 2 + i / 2]);
                weights[m] = TwoTf32<4>(bits);
            }
            if constexpr (unrolled == 1) shift_weights();
#pragma unroll
            for (int n = 0; n < Row::hdim_v / 8; n += together) {
                TwoTf32<2> values[together];
#pragma unroll
                for (int i = 0; i < together; ++i) values[i] = rows.load(8 * step, n + i);
#pragma unroll
                for (int m = 0; m < atoms; ++m) add_products(o[m] + n, weights[m], values);
            }
        }
    }

   private:
    // Steps of P V that are unrolled. Where O leaves few registers a loop keeps later work from being moved into it; then the
    // next weights are always the first ones.
    static constexpr int unrolled = Row::hdim_v > 128 ? 1 : keys / 8;

    __device__ __forceinline__ void shift_weights() {
#pragma unroll
        for (int m = 0; m < atoms; ++m)
#pragma unroll
            for (int n = 0; n + 1 < keys / 8; ++n)
#pragma unroll
                for (int c = 0; c < 4; ++c) s[m][n][c] = s[m][n + 1][c];
    }

    template <int columns>
    static __device__ __forceinline__ void clear(float (&sums)[atoms][columns][4]) {
#pragma unroll
        for (int m = 0; m < atoms; ++m)
#pragma unroll
            for (int n = 0; n < columns; ++n)
#pragma unroll
                for (int c = 0; c < 4; ++c) sums[m][n][c] = 0.0f;
    }

    __device__ __forceinline__ void multiply_step(const KeyRows& k_rows, int step,
                                                  const std::uint32_t (&of_step)[atoms][4]) {
        TwoTf32<4> q[atoms];
#pragma unroll
        for (int m = 0; m < atoms; ++m) q[m] = TwoTf32<4>(of_step[m]);
#pragma unroll
        for (int n = 0; n < keys / 8; n += 2) {
            std::uint32_t rows[4];
            load_matrices(k_rows.at(8 * n, step), rows);
            const TwoTf32<2> k[2] = {TwoTf32<2>({rows[0], rows[1]}), TwoTf32<2>({rows[2], rows[3]})};
#pragma unroll
            for (int m = 0; m < atoms; ++m) add_products(s[m] + n, q[m], k);
        }
    }

    Queries queries;
};

}  // namespace catalog::cuda
