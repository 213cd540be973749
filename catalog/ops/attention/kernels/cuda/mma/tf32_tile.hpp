// What MmaTile does, for elements of 32 bits: tensor cores multiply them in two parts, see tf32.hpp.
#pragma once

#include "mma_queries.hpp"

namespace catalog::cuda {

// As ValueRows, in a tile of values of vectorized pages, which have both keys of a column together: see ValueVectors.
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
    static constexpr int atoms = Shape::atoms, keys = Shape::keys, hdim_v = Row::hdim_v;
    static constexpr int together = 4;  // columns of eight whose values are multiplied alternately: none waits for the last one
    using KeyRows = MatrixRows<Row::hdim_q * Shape::element>;
    using Values = std::conditional_t<is_vectorized<Row>, ValuePairs<hdim_v>, ValueRows<hdim_v>>;
    using Queries = MmaQueries<Row>;

   public:
    // As in MmaTile.
    float s[atoms][keys / 8][4];
    float o[atoms][hdim_v / 8][4];

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

    // O += s * V; s is lost.
    __device__ __forceinline__ void multiply_p_v(std::uint32_t v, int zero) {
        const Values rows(v, MmaThread<Row>(zero).lane);
#pragma unroll 1
        for (int first_key = 0; first_key < keys; first_key += 8 * steps) {
#pragma unroll
            for (int step = 0; step < steps; ++step) add_values(rows, first_key + 8 * step, step);
            shift_weights();
        }
    }

   private:
    // Steps of P V that are unrolled. Without a loop around them all values would be loaded early, and later copies started,
    // for which there are no registers.
    static constexpr int steps = keys * hdim_v < 2048 ? keys / 8 : 256 / hdim_v;
    static_assert(keys / 8 % steps == 0);

    // So that the next weights are always the first ones: a loop cannot count registers.
    __device__ __forceinline__ void shift_weights() {
#pragma unroll
        for (int m = 0; m < atoms; ++m)
#pragma unroll
            for (int n = 0; n + steps < keys / 8; ++n)
#pragma unroll
                for (int c = 0; c < 4; ++c) s[m][n][c] = s[m][n + steps][c];
    }

    // Those of eight keys, whose weights are s[m][n].
    __device__ __forceinline__ void add_values(const Values& rows, int first_key, int n) {
        TwoTf32<4> weights[atoms];
#pragma unroll
        for (int m = 0; m < atoms; ++m) {
            std::uint32_t bits[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) bits[i] = __float_as_uint(s[m][n][i % 2 * 2 + i / 2]);
            weights[m] = TwoTf32<4>(bits);
        }
#pragma unroll
        for (int column = 0; column < hdim_v / 8; column += together) {
            TwoTf32<2> values[together];
#pragma unroll
            for (int i = 0; i < together; ++i) values[i] = rows.load(first_key, column + i);
#pragma unroll
            for (int m = 0; m < atoms; ++m) add_products(o[m] + column, weights[m], values);
        }
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
