// The first stage of the backward: D, the sums of dO times O over a row.
#pragma once

#include "backward.hpp"

namespace catalog::ck {

template <class Row>
struct Family {
    using Args = fmha_bwd_args;
    using Types = BackwardTypes<Row>;
    using Traits = ck_tile::TileFmhaBwdOGradDotOTraits<Pads<Row>::s, Pads<Row>::dv, Row::block_per_cu>;
    using Problem = ck_tile::BlockFmhaBwdOGradDotOPipelineProblem<
        typename Types::ODataType, typename Types::OGradDataType, typename Types::DDataType, Row::tile_m0, Row::hdim_v,
        Row::group, Traits>;
    using Kernel = ck_tile::FmhaBwdOGradDotOKernel<ck_tile::BlockFmhaBwdOGradDotO<Problem>>;

    static void run(const ck_tile::stream_config& to, const Args& args) {
        Headers::enqueue<Kernel>(to, fmha_bwd_dot_do_o_create_kargs_and_grids<Kernel>(args));
    }
};

}  // namespace catalog::ck
