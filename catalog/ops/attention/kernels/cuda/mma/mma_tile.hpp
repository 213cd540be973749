// Products of one warp: rows of a tile of Q with keys in shared memory, and their weights with values. See kv_copy.hpp
// for how tiles lie in shared memory.
#pragma once

#include <type_traits>

#include "kv_vectors.hpp"

namespace catalog::cuda {

// Whether four warps multiply together (wgmma) instead of each for itself.
template <class Row>
inline constexpr bool by_warpgroup = false;

// How a block of a row's kernel is divided: `waves_n` groups of `waves_m` warps. The warps of a group have rows of
// their own and share the keys that they copy and attend to; the groups divide the keys of each tile.
template <class Row>
struct MmaShape {
    static constexpr int hdim_q = Row::hdim_q, hdim_v = Row::hdim_v, stages = Row::num_stages;
    static constexpr int waves_m = Row::wave_m0, waves_n = Row::wave_n0, threads = 32 * waves_m * waves_n;
    static constexpr int rows = Row::tile_m0 / waves_m;    // of a warp
    static constexpr int atoms = rows / 16;
    static constexpr int keys = Row::tile_n0 / waves_n;    // of a group
    static constexpr int copied = keys / waves_m;          // keys that one warp copies
    static constexpr int panel_rows = by_warpgroup<Row> ? keys : 0;  // see piece_offset
    static constexpr int blocks = Row::block_per_cu > 0 ? Row::block_per_cu : 1;

    static constexpr int q_bytes = Row::tile_m0 * hdim_q * 2, k_bytes = keys * hdim_q * 2, v_bytes = keys * hdim_v * 2;
    static constexpr int group_bytes = stages * (k_bytes + v_bytes);

    // Results of the groups, to be merged: rows of O, then maxima and sums.
    static constexpr int merge_rows = waves_n * Row::tile_m0;
    static constexpr int merge_bytes = waves_n > 1 ? merge_rows * (hdim_v + 2) * 4 : 0;
    static constexpr int streamed_bytes = q_bytes + waves_n * group_bytes;
    static constexpr int shared_bytes = streamed_bytes > merge_bytes ? streamed_bytes : merge_bytes;

    // Registers of a thread for O, scores and Q: where they are few, Q is read from shared memory once.
    static constexpr bool q_in_registers = atoms * (hdim_v / 2 + keys / 2 + hdim_q / 4) <= 160;

    using KCopy = std::conditional_t<is_vectorized<Row>, KeyVectors<Row, hdim_q, copied, waves_m, Row::pad_d>,
                                     KvCopy<Row, hdim_q, copied, waves_m, Row::pad_d, panel_rows>>;
    using VCopy = std::conditional_t<is_vectorized<Row>, ValueVectors<Row, hdim_v, copied, waves_m, Row::pad_dv>,
                                     KvCopy<Row, hdim_v, copied, waves_m, Row::pad_dv, panel_rows>>;

    static_assert(rows % 16 == 0 && keys % 16 == 0 && keys % waves_m == 0 && stages >= 1 && hdim_v <= hdim_q);
    static_assert(shared_bytes <= 227 * 1024);
};

// A thread's place in its block: its lane, its warp's number among those of the group, and the group's. For `zero` see
// zero_of.
template <class Row>
struct MmaThread {
    int lane, warp_m, warp_n;

    __device__ __forceinline__ explicit MmaThread(int zero) {
        const int thread = static_cast<int>(threadIdx.x) + zero;
        lane = thread % 32;
        warp_m = thread / 32 % MmaShape<Row>::waves_m;
        warp_n = MmaShape<Row>::waves_n > 1 ? thread / 32 / MmaShape<Row>::waves_m : 0;
    }

    // The row of elements 2 half and 2 half + 1 of the warp's 16 rows number m; see MmaTile.
    __device__ __forceinline__ int row(int m, int half) const {
        return warp_m * MmaShape<Row>::rows + 16 * m + 8 * half + lane / 4;
    }
};

// Where a lane finds its rows of 8 x 8 matrices in one tile. Steps along the head dim change bits 5 and 6 of the
// address, which the permutation of pieces occupies too, and then the address by 128.
template <int hdim>
class MatrixRows {
   public:
    // The lane's row of the first 16 rows, and its piece of the first two.
    __device__ __forceinline__ MatrixRows(std::uint32_t tile, int row, int piece)
        : address(tile + piece_offset<hdim>(row, piece)) {}

    // In the 16 rows from `first_row` on, the 16 columns from 16 * step on.
    __device__ __forceinline__ std::uint32_t at(int first_row, int step) const {
        return (address ^ (step % 4 << 5)) + first_row * (hdim * 2) + step / 4 * 128;
    }

   private:
    std::uint32_t address;
};

// The same, transposed, in a tile of values of vectorized pages; see ValueVectors.
template <int hdim>
class MatrixColumns {
   public:
    __device__ __forceinline__ MatrixColumns(std::uint32_t tile, int lane)
        : address(tile + (lane / 8 % 2 * hdim + lane / 16 * 8 + lane % 8) * 16) {}

    // Of the 16 rows from `first_row` on, the 16 columns from 16 * step on.
    __device__ __forceinline__ std::uint32_t at(int first_row, int step) const {
        return address + (first_row / 8 * hdim + 16 * step) * 16;
    }

   private:
    std::uint32_t address;
};

template <class Row>
class MmaTile {
    using T = typename Row::dtype;
    using Shape = MmaShape<Row>;
    static constexpr int atoms = Shape::atoms, keys = Shape::keys;

   public:
    // Element c of s[m][n]: row 16 m + 8 (c / 2) + lane / 4, key 8 n + 2 (lane % 4) + c % 2; of O alike.
    float s[atoms][keys / 8][4];
    float o[atoms][Row::hdim_v / 8][4];

    // `q`: the tile's first row.
    __device__ __forceinline__ explicit MmaTile(std::uint32_t q) : q(q) {
#pragma unroll
        for (int m = 0; m < atoms; ++m)
#pragma unroll
            for (int n = 0; n < Row::hdim_v / 8; ++n)
#pragma unroll
                for (int c = 0; c < 4; ++c) o[m][n][c] = 0.0f;
    }

    // Q has arrived.
    __device__ __forceinline__ void load_queries() {
        if constexpr (Shape::q_in_registers) {
            const MatrixRows<Row::hdim_q> q_rows = rows_of_q(0);
#pragma unroll
            for (int step = 0; step < Row::hdim_q / 16; ++step) load_queries(q_rows, step, held[step]);
        }
    }

    __device__ __forceinline__ void multiply_q_k(std::uint32_t k, int zero) {
#pragma unroll
        for (int m = 0; m < atoms; ++m)
#pragma unroll
            for (int n = 0; n < keys / 8; ++n)
#pragma unroll
                for (int c = 0; c < 4; ++c) s[m][n][c] = 0.0f;
        const int lane = MmaThread<Row>(zero).lane;
        const MatrixRows<Row::hdim_q> q_rows = rows_of_q(zero), k_rows(k, lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
        for (int step = 0; step < Row::hdim_q / 16; ++step) {
            if constexpr (Shape::q_in_registers) {
                multiply_step(k_rows, step, held[step]);
            } else {
                std::uint32_t queries[atoms][4];
                load_queries(q_rows, step, queries);
                multiply_step(k_rows, step, queries);
            }
        }
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
            for (int n = 0; n < Row::hdim_v / 16; ++n) {
                std::uint32_t values[4];
                if constexpr (is_vectorized<Row>)
                    load_matrices(v_rows.at(16 * step, n), values);
                else
                    load_matrices_transposed(v_rows.at(16 * step, n), values);
#pragma unroll
                for (int m = 0; m < atoms; ++m) {
                    mma_16x8x16<T>(o[m][2 * n], weights[m], values[0], values[1]);
                    mma_16x8x16<T>(o[m][2 * n + 1], weights[m], values[2], values[3]);
                }
            }
        }
    }

   private:
    __device__ __forceinline__ MatrixRows<Row::hdim_q> rows_of_q(int zero) const {
        const MmaThread<Row> thread(zero);
        return {q, thread.warp_m * Shape::rows + thread.lane % 16, thread.lane / 16};
    }

    static __device__ __forceinline__ auto rows_of_v(std::uint32_t v, int lane) {
        if constexpr (is_vectorized<Row>)
            return MatrixColumns<Row::hdim_v>(v, lane);
        else
            return MatrixRows<Row::hdim_v>(v, lane % 16, lane / 16);
    }

    static __device__ __forceinline__ void load_queries(const MatrixRows<Row::hdim_q>& q_rows, int step,
                                                        std::uint32_t (&queries)[atoms][4]) {
#pragma unroll
        for (int m = 0; m < atoms; ++m) load_matrices(q_rows.at(16 * m, step), queries[m]);
    }

    __device__ __forceinline__ void multiply_step(const MatrixRows<Row::hdim_q>& k_rows, int step,
                                                  const std::uint32_t (&queries)[atoms][4]) {
#pragma unroll
        for (int n = 0; n < keys / 16; ++n) {
            std::uint32_t rows[4];
            load_matrices(k_rows.at(16 * n, step), rows);
#pragma unroll
            for (int m = 0; m < atoms; ++m) {
                mma_16x8x16<T>(s[m][2 * n], queries[m], rows[0], rows[1]);
                mma_16x8x16<T>(s[m][2 * n + 1], queries[m], rows[2], rows[3]);
            }
        }
    }

    const std::uint32_t q;
    std::uint32_t held[Shape::q_in_registers ? Row::hdim_q / 16 : 1][atoms][4];
};

}  // namespace catalog::cuda
