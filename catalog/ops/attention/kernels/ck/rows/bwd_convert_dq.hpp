// The last stage of the backward: dQ from its partial sums.
#pragma once

#include "backward.hpp"

namespace catalog::ck {

template <class Row>
struct Family {
    using Args = fmha_bwd_args;
    using Types = BackwardTypes<Row>;
    using Traits = ck_tile::TileFmhaBwdConvertQGradTraits<Pads<Row>::s, Pads<Row>::d, Row::block_per_cu>;
    static constexpr ck_tile::index_t threads = 256;
    using Problem = ck_tile::BlockFmhaBwdConvertQGradPipelineProblem<
        typename Types::AccDataType, typename Types::QGradDataType, threads, Row::tile_m0, Row::tile_n0, Row::hdim_q,
        Row::group, Row::deterministic, Traits>;
    using Kernel = ck_tile::FmhaBwdConvertQGradKernel<ck_tile::BlockFmhaBwdConvertQGrad<Problem>>;

    static void run(const ck_tile::stream_config& to, const Args& args) {
        Headers::enqueue<Kernel>(to, fmha_bwd_convert_dq_create_kargs_and_grids<Kernel>(args));
    }
};

}  // namespace catalog::ck
