// New keys and values into a K/V cache, with RoPE.
#pragma once

#include "forward.hpp"

namespace catalog::ck {

template <class Row>
struct Family {
    using Args = fmha_fwd_appendkv_args;
    using Types = ForwardTypes<Row>;
    using Traits = ck_tile::TileFmhaFwdAppendKVTraits<Pads<Row>::s, Pads<Row>::sk, Pads<Row>::d, Pads<Row>::dv,
                                                      Row::block_per_cu>;
    using Problem = ck_tile::BlockFmhaFwdAppendKVPipelineProblem<
        typename Types::QDataType, typename Types::KDataType, typename Types::VDataType, Row::tile_m0, Row::tile_n0,
        Row::tile_k0, Row::tile_n1, Row::v_in_rows, Row::rope, Row::paged_kv, Traits>;
    using Kernel = ck_tile::FmhaFwdAppendKVKernel<ck_tile::BlockFmhaFwdAppendKVPipeline<Problem>>;

    static void run(const ck_tile::stream_config& to, const Args& args) {
        Headers::enqueue<Kernel>(to, fmha_fwd_appendkv_create_kargs_and_grids<Kernel>(args));
    }
};

}  // namespace catalog::ck
