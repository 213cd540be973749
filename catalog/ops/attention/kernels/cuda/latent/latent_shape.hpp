// How a block of multi-head latent attention is divided: two warpgroups have the same 64 rows of Q. Of the scores each
// computes those of half of the keys, and of O half of the columns.
#pragma once

#include "cuda/wgmma.hpp"
#include "cuda/mma/kv_copy.hpp"

namespace catalog::cuda {

// Shared memory begins with Q, then come two stages of keys, the weights of a tile, and what the warpgroups tell each other
// of the rows. Q, keys, values and weights are panels; see wgmma.hpp.
template <class Row>
struct LatentShape {
    static constexpr int hdim_q = Row::hdim_q, hdim_v = Row::hdim_v, rows = Row::tile_m0, keys = Row::tile_n0;
    static constexpr int groups = Row::wave_n0, threads = 128 * groups, warps = threads / 32;
    static constexpr int keys_of_group = keys / groups, columns_of_group = hdim_v / groups;

    static constexpr int q_panel = rows * panel_row_bytes, kv_panel = keys * panel_row_bytes;
    static constexpr int q_bytes = hdim_q / panel_columns * q_panel, stage_bytes = hdim_q / panel_columns * kv_panel;
    static constexpr int weights = q_bytes + 2 * stage_bytes, notes = weights + rows * panel_row_bytes;
    static constexpr int shared_bytes = notes + groups * rows * 4;

    using KCopy = KvCopy<Row, hdim_q, keys / warps, warps, Row::pad_d, keys>;
    using VCopy = KvCopy<Row, hdim_v, keys / warps, warps, Row::pad_dv, keys>;

    static_assert(rows == 64 && Row::wave_m0 == 4 && groups == 2 && keys == panel_columns && hdim_v <= hdim_q);
    static_assert(hdim_q % panel_columns == 0 && columns_of_group % panel_columns == 0 && columns_of_group <= 256);
    static_assert(shared_bytes <= 227 * 1024);
};

}  // namespace catalog::cuda
