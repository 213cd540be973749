// How the rows and keys of a tile are divided among the warps of a block, and where lanes find them in shared memory: see
// kv_copy.hpp for how tiles lie there.
#pragma once

#include <type_traits>

#include "kv_vectors.hpp"

namespace catalog::cuda {

// Whether four warps multiply together (wgmma) instead of each for itself.
template <class Row>
inline constexpr bool by_warpgroup = false;

// Whether the factors of keys and values are those of their page, or of a block of keys.
template <class Row>
inline constexpr bool has_key_factors = Row::qscale == Qscale::kv_blockscale || Row::qscale == Qscale::blockscale;

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

    static constexpr int element = sizeof(typename Row::dtype);  // of K and V
    static constexpr int q_row_bytes = hdim_q * sizeof(QueryElement<Row>), k_bytes = keys * hdim_q * element;
    static constexpr int v_bytes = keys * hdim_v * element;
    // Rows of Q make way for those of O, unless they have 32 bits.
    static constexpr bool stages_o = sizeof(typename Row::otype) < 4;
    static constexpr int o_row_bytes = stages_o ? hdim_v * sizeof(typename Row::otype) : 0;
    static constexpr int staged_row_bytes = waves_n == 1 && o_row_bytes > q_row_bytes ? o_row_bytes : q_row_bytes;
    static constexpr int q_bytes = Row::tile_m0 * staged_row_bytes;
    static constexpr int k_stage_bytes = k_bytes + (has_key_factors<Row> ? 2 * keys * 4 : 0);  // see KeyFactors
    static constexpr int group_bytes = stages * (k_stage_bytes + v_bytes);

    // Results of the groups, to be merged: rows of O, then maxima and sums.
    static constexpr int merge_rows = waves_n * Row::tile_m0;
    static constexpr int merge_bytes = waves_n > 1 ? merge_rows * (hdim_v + 2) * 4 : 0;
    static constexpr int streamed_bytes = q_bytes + waves_n * group_bytes;
    static constexpr int shared_bytes = streamed_bytes > merge_bytes ? streamed_bytes : merge_bytes;

    // Registers of a thread for O, scores and Q: where they are few, Q is read from shared memory once. Numbers of 32 bits
    // would take four times as many, as they are multiplied in two parts.
    static constexpr bool q_in_registers =
        sizeof(QueryElement<Row>) < 4 && atoms * (hdim_v / 2 + keys / 2 + hdim_q / 4) <= 160;

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

// As MatrixRows, transposed, in a tile of values of vectorized pages, which have x tokens of a column together: see
// ValueVectors. Of 16, four matrices are those of 32 columns.
template <int hdim, int x>
class MatrixColumns {
   public:
    __device__ __forceinline__ MatrixColumns(std::uint32_t tile, int lane)
        : address(tile + (x == 16 ? lane : lane / 8 % 2 * hdim + lane / 16 * 8 + lane % 8) * 16) {}

    // Of the 16 rows from `first_row` on, the 2 x columns from 2 * x * step on.
    __device__ __forceinline__ std::uint32_t at(int first_row, int step) const {
        return address + (first_row / x * hdim + 2 * x * step) * 16;
    }

   private:
    std::uint32_t address;
};

}  // namespace catalog::cuda
