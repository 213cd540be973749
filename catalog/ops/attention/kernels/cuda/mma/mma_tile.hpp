// Products of one warp: rows of a tile of Q with keys in shared memory, and their weights with values.
#pragma once

#include "cuda/lanes.hpp"
#include "mma_queries.hpp"

namespace catalog::cuda {

// Elements of 8 bits are loaded as pairs, and multiplied as fp16, which represents all their numbers. Pairs of V are two
// columns of one key, so even and odd columns of every 16 are multiplied apart: see order_columns(). In vectorized pages
// they are two keys of one column.
template <class Row>
class MmaTile {
    using Stored = typename Row::dtype;
    using T = std::conditional_t<has_bytes<Row>, fp16, Stored>;
    using Shape = MmaShape<Row>;
    static constexpr int atoms = Shape::atoms, keys = Shape::keys;
    static constexpr int bytes = has_bytes<Row>;
    static constexpr bool fours = LaneKeys<Row>::fours;
    using KeyRows = MatrixRows<Row::hdim_q * Shape::element>;
    using ValueRows = MatrixRows<Row::hdim_v * Shape::element>;
    using Queries = MmaQueries<Row>;

   public:
    // Element c of s[m][n]: row 16 m + 8 (c / 2) + lane / 4, the key c % 2 of the lane's two in column n, 8 n + 2 (lane % 4)
    // unless LaneKeys says otherwise; of O alike.
    float s[atoms][keys / 8][4];
    float o[atoms][Row::hdim_v / 8][4];

    // `q`: the tile's first row.
    __device__ __forceinline__ explicit MmaTile(std::uint32_t q) : queries(q) {
#pragma unroll
        for (int m = 0; m < atoms; ++m)
#pragma unroll
            for (int n = 0; n < Row::hdim_v / 8; ++n)
#pragma unroll
                for (int c = 0; c < 4; ++c) o[m][n][c] = 0.0f;
    }

    // Q has arrived.
    __device__ __forceinline__ void load_queries() { queries.load(); }

    __device__ __forceinline__ void multiply_q_k(std::uint32_t k, int zero) {
#pragma unroll
        for (int m = 0; m < atoms; ++m)
#pragma unroll
            for (int n = 0; n < keys / 8; ++n)
#pragma unroll
                for (int c = 0; c < 4; ++c) s[m][n][c] = 0.0f;
        const int lane = MmaThread<Row>(zero).lane;
        const KeyRows k_rows(k, lane % 8 + lane / 16 * 8, lane / 8 % 2);
        queries.for_steps(zero, [&](int step, const typename Queries::Step& of_step) {
            multiply_step(k_rows, step, of_step);
        });
        queries.restore(s);
    }

    // O += s * V
    __device__ __forceinline__ void multiply_p_v(std::uint32_t v, int zero) {
        const int lane = MmaThread<Row>(zero).lane;
        const auto v_rows = rows_of_v(v, lane);
#pragma unroll
        for (int step = 0; step < keys / 16; ++step) {
            std::uint32_t weights[atoms][4];
#pragma unroll
            for (int m = 0; m < atoms; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* pair = s[m][2 * step + i / 2] + i % 2 * 2;
                    weights[m][i] = pack<T>(pair[0], pair[1]);
                }
#pragma unroll
            for (int n = 0; n < Row::hdim_v * Shape::element / 32; ++n) {
                std::uint32_t values[4];
                if constexpr (is_vectorized<Row>)
                    load_matrices(v_rows.at(16 * step, n), values);
                else
                    load_matrices_transposed(v_rows.at(16 * step, n), values);
                if constexpr (fours) {
                    add_columns(weights, values, n);
                    continue;
                }
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    std::uint32_t of_keys[2] = {values[2 * half], values[2 * half + 1]}, odd[2];
                    if constexpr (bytes) {
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            const std::uint32_t columns = __byte_perm(of_keys[i], 0, 0x3120);
                            of_keys[i] = widen<Stored>(columns);
                            odd[i] = widen<Stored>(columns >> 16);
                        }
#pragma unroll
                        for (int m = 0; m < atoms; ++m)
                            mma_16x8x16<T>(o[m][4 * n + 2 * half + 1], weights[m], odd[0], odd[1]);
                    }
#pragma unroll
                    for (int m = 0; m < atoms; ++m)
                        mma_16x8x16<T>(o[m][(2 * n + half) * (1 + bytes)], weights[m], of_keys[0], of_keys[1]);
                }
            }
        }
    }

    // Once all values are added. Of every 16 columns a lane has 4 (lane % 4) and the next three: two pairs, of which it
    // keeps one and trades the other, twice.
    __device__ __forceinline__ void order_columns() {
        if constexpr (bytes && !fours) {
            const bool odd_lane = threadIdx.x & 1, high_lane = (threadIdx.x & 2) != 0;
#pragma unroll
            for (int m = 0; m < atoms; ++m)
#pragma unroll
                for (int n = 0; n < Row::hdim_v / 8; n += 2)
#pragma unroll
                    for (int c = 0; c < 4; c += 2) {
                        float (&even)[4] = o[m][n], (&odd)[4] = o[m][n + 1];
                        const float second = even[c + 1];
                        even[c + 1] = odd[c];
                        odd[c] = second;
#pragma unroll
                        for (int i = c; i < c + 2; ++i) {
                            trade(even[i], odd[i], odd_lane, 1);
                            trade(even[i], odd[i], high_lane, 2);
                        }
                    }
        }
    }

   private:
    static __device__ __forceinline__ auto rows_of_v(std::uint32_t v, int lane) {
        if constexpr (is_vectorized<Row>)
            return MatrixColumns<Row::hdim_v, in_vector<Row>>(v, lane);
        else
            return ValueRows(v, lane % 16, lane / 16);
    }

    // The weights of 16 keys times their values in the columns from 32 n on.
    __device__ __forceinline__ void add_columns(const std::uint32_t (&weights)[atoms][4],
                                                const std::uint32_t (&values)[4], int n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const std::uint32_t first = widen<Stored>(values[i]), second = widen<Stored>(values[i] >> 16);
#pragma unroll
            for (int m = 0; m < atoms; ++m) mma_16x8x16<T>(o[m][4 * n + i], weights[m], first, second);
        }
    }

    __device__ __forceinline__ void multiply_step(const KeyRows& k_rows, int step,
                                                  const typename Queries::Step& of_step) {
#pragma unroll
        for (int n = 0; n < keys / 16; ++n) {
            std::uint32_t rows[4];
            load_matrices(k_rows.at(16 * n, step), rows);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const std::uint32_t of_keys[2] = {rows[2 * half], rows[2 * half + 1]};
                if constexpr (bytes) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const std::uint32_t first = widen<Stored>(of_keys[i]), second = widen<Stored>(of_keys[i] >> 16);
#pragma unroll
                        for (int m = 0; m < atoms; ++m)
                            mma_16x8x16<T>(s[m][2 * n + half], of_step[i * bytes][m], first, second);
                    }
                } else {
#pragma unroll
                    for (int m = 0; m < atoms; ++m)
                        mma_16x8x16<T>(s[m][2 * n + half], of_step[0][m], of_keys[0], of_keys[1]);
                }
            }
        }
    }

    Queries queries;
};

}  // namespace catalog::cuda
