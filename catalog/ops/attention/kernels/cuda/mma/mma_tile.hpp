// Products of one warp: rows of a tile of Q with keys in shared memory, and their weights with values. See kv_copy.hpp
// for how tiles lie in shared memory.
#pragma once

#include <type_traits>

#include "cuda/lanes.hpp"
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

    static constexpr int element = sizeof(typename Row::dtype);
    static constexpr int q_row_bytes = hdim_q * element, k_bytes = keys * hdim_q * element;
    static constexpr int v_bytes = keys * hdim_v * element;
    // Rows of Q make way for those of O, of 16 bits.
    static constexpr int staged_row_bytes = waves_n == 1 && hdim_v * 2 > q_row_bytes ? hdim_v * 2 : q_row_bytes;
    static constexpr int q_bytes = Row::tile_m0 * staged_row_bytes;
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

// Where a lane finds its rows of 8 x 8 matrices of 16 bits in one tile. Steps along the head dim change bits 5 and 6 of
// the address, which the permutation of pieces occupies too, and then the address by 128; or bit 5, and then by 64.
template <int row_bytes>
class MatrixRows {
    static constexpr int steps = row_bytes % 128 == 0 ? 4 : 2;

   public:
    // The lane's row of the first 16 rows, and its piece of the first two.
    __device__ __forceinline__ MatrixRows(std::uint32_t tile, int row, int piece)
        : address(tile + piece_offset<row_bytes>(row, piece)) {}

    // In the 16 rows from `first_row` on, the 32 bytes from 32 * step on.
    __device__ __forceinline__ std::uint32_t at(int first_row, int step) const {
        return (address ^ (step % steps << 5)) + first_row * row_bytes + step / steps * (32 * steps);
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

// Elements of 8 bits are loaded as pairs, and multiplied as fp16, which represents every fp8 number. Q and K have their
// columns in the same order, though not in that of memory. Pairs of V are two columns of one key, so even and odd
// columns of every 16 are multiplied apart: see order_columns().
template <class Row>
class MmaTile {
    using T = std::conditional_t<has_bytes<Row>, fp16, typename Row::dtype>;
    using Shape = MmaShape<Row>;
    static constexpr int atoms = Shape::atoms, keys = Shape::keys;
    static constexpr int bytes = Shape::element == 1, q_steps = Row::hdim_q * Shape::element / 32;
    using QueryRows = MatrixRows<Shape::q_row_bytes>;
    using ValueRows = MatrixRows<Row::hdim_v * Shape::element>;
    using Queries = std::uint32_t[1 + bytes][atoms][4];  // of one step

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
            const QueryRows q_rows = rows_of_q(0);
#pragma unroll
            for (int step = 0; step < q_steps; ++step) load_queries(q_rows, step, held[step]);
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
        const QueryRows q_rows = rows_of_q(zero), k_rows(k, lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
        for (int step = 0; step < q_steps; ++step) {
            if constexpr (Shape::q_in_registers) {
                multiply_step(k_rows, step, held[step]);
            } else {
                Queries queries;
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
            for (int n = 0; n < Row::hdim_v * Shape::element / 32; ++n) {
                std::uint32_t values[4];
                if constexpr (is_vectorized<Row>)
                    load_matrices(v_rows.at(16 * step, n), values);
                else
                    load_matrices_transposed(v_rows.at(16 * step, n), values);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    std::uint32_t of_keys[2] = {values[2 * half], values[2 * half + 1]}, odd[2];
                    if constexpr (bytes) {
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            const std::uint32_t columns = __byte_perm(of_keys[i], 0, 0x3120);
                            of_keys[i] = widen_fp8(columns);
                            odd[i] = widen_fp8(columns >> 16);
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
        if constexpr (bytes) {
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
    __device__ __forceinline__ QueryRows rows_of_q(int zero) const {
        const MmaThread<Row> thread(zero);
        return {q, thread.warp_m * Shape::rows + thread.lane % 16, thread.lane / 16};
    }

    static __device__ __forceinline__ auto rows_of_v(std::uint32_t v, int lane) {
        if constexpr (is_vectorized<Row>)
            return MatrixColumns<Row::hdim_v>(v, lane);
        else
            return ValueRows(v, lane % 16, lane / 16);
    }

    static __device__ __forceinline__ void load_queries(const QueryRows& q_rows, int step, Queries& queries) {
#pragma unroll
        for (int m = 0; m < atoms; ++m) {
            load_matrices(q_rows.at(16 * m, step), queries[0][m]);
            if constexpr (bytes) {
                // Rows 0 to 7 and 8 to 15, of 16 columns and of the next 16.
                const std::uint32_t (&loaded)[4] = queries[0][m];
                const std::uint32_t rows[4] = {loaded[0], loaded[1], loaded[2], loaded[3]};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    queries[i / 2 * bytes][m][i % 2] = widen_fp8(rows[i]);
                    queries[i / 2 * bytes][m][2 + i % 2] = widen_fp8(rows[i] >> 16);
                }
            }
        }
    }

    __device__ __forceinline__ void multiply_step(const QueryRows& k_rows, int step, const Queries& queries) {
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
                        const std::uint32_t first = widen_fp8(of_keys[i]), second = widen_fp8(of_keys[i] >> 16);
#pragma unroll
                        for (int m = 0; m < atoms; ++m)
                            mma_16x8x16<T>(s[m][2 * n + half], queries[i * bytes][m], first, second);
                    }
                } else {
#pragma unroll
                    for (int m = 0; m < atoms; ++m)
                        mma_16x8x16<T>(s[m][2 * n + half], queries[0][m], of_keys[0], of_keys[1]);
                }
            }
        }
    }

    const std::uint32_t q;
    Queries held[Shape::q_in_registers ? q_steps : 1];
};

}  // namespace catalog::cuda
