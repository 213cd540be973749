// The main stage of backward for elements of 32 bits: how a block divides its tile, and what lies where in shared memory.
//
// A block owns tile_n0 keys of one head and visits tile_m0 queries at a time, of all query heads that read the head. All
// of its warps copy and multiply.
#pragma once

#include "bwd_tile.hpp"

namespace catalog::cuda {

template <class Row>
struct BackwardTile<Row, true> {
    static constexpr int m = Row::tile_m0, n = Row::tile_n0;
    static constexpr int slices = 1, stages = 2, warps = 8, threads = 32 * warps;
    static constexpr bool divides_hdim = false, scales_ds = false, persistent = false, rotates = false;
    static constexpr bool uneven = Row::mask != Mask::none, clears_ahead = false, alternates = false;

    // Of S^T, dP^T, dV and dK a warp has 16 keys, which `key_shares` warps share: some of the queries of each, or of the
    // columns. Of dQ it has 16 queries, which `query_shares` warps share.
    static constexpr int key_groups = n / 16, key_shares = warps / key_groups;
    static constexpr int query_groups = m / 16, query_shares = warps / query_groups;
    static constexpr int columns = m / key_shares;
    static constexpr int columns_k = Row::hdim_q / key_shares, columns_v = Row::hdim_v / key_shares;
    static constexpr int columns_q = Row::hdim_q / query_shares;
    static_assert(Row::wave_m0 == key_shares && Row::wave_n0 == key_groups && Row::num_stages == stages);
    static_assert(key_groups * 16 == n && key_shares * key_groups == warps && columns * key_shares == m);
    static_assert(query_groups * 16 == m && query_shares * query_groups == warps);
    static_assert(columns == 8 || columns % 16 == 0);
    static_assert(columns_k % 16 == 0 && columns_v % 16 == 0 && columns_q % 16 == 0);

    // P^T and dS^T: a row for each key, longer than its queries, so that lanes that read eight of them find these in
    // different banks.
    static constexpr int weight_row = (m + 8) * 4;
    static constexpr int row_bytes = m * 4;  // a number for each query

    static constexpr int k_bytes = n * Row::hdim_q * 4, v_bytes = n * Row::hdim_v * 4;
    static constexpr int q_bytes = m * Row::hdim_q * 4, grad_o_bytes = m * Row::hdim_v * 4, weights_bytes = n * weight_row;
    static constexpr int k_at = 0, v_at = k_at + k_bytes, q_at = v_at + v_bytes, grad_o_at = q_at + stages * q_bytes;
    static constexpr int p_at = grad_o_at + stages * grad_o_bytes, ds_at = p_at + weights_bytes;
    static constexpr int lse_at = ds_at + weights_bytes, delta_at = lse_at + stages * row_bytes;
    static constexpr int work_bytes = Row::block_mask ? 80 : 72;
    static constexpr int work_at = delta_at + stages * row_bytes, visits_at = work_at + work_bytes;
    static constexpr int shared_bytes = visits_at + (Row::block_mask ? stages * visit_bytes : 0);
    static_assert(shared_bytes <= 232448, "a block has 227 KiB of shared memory");

    // The Visit whose tile is in a stage.
    static __device__ __forceinline__ std::uint32_t visit_at(std::uint32_t base, int stage) {
        return base + visits_at + stage * visit_bytes;
    }
};

}  // namespace catalog::cuda
