// Forward over a K/V cache in pages.
#pragma once

#include "forward.hpp"

namespace catalog::ck {

template <class Row>
struct Family {
    using Args = fmha_fwd_pagedkv_args;
    using Types = ForwardTypes<Row>;
    using Traits = ck_tile::TileFmhaFwdPagedKVTraits<Pads<Row>::s, Pads<Row>::sk, Pads<Row>::d, Pads<Row>::dv,
                                                     Row::logits, Row::bias, false, Row::lse, Row::paged_kv,
                                                     Row::descaled, Row::block_per_cu, Row::skip_min_seqlen_q>;
    using Problem = ck_tile::BlockFmhaFwdPagedKVPipelineProblem<
        typename Types::QDataType, typename Types::KDataType, typename Types::VDataType, typename Types::SaccDataType,
        typename Types::SMPLComputeDataType, typename Types::BiasDataType, typename Types::LSEDataType,
        typename Types::PDataType, typename Types::OaccDataType, typename Types::ODataType, ForwardShape<Row>,
        Row::group, ForwardVariant<Row>, typename Row::Mask, Traits>;
    using Kernel = ck_tile::FmhaFwdPagedKVKernel<typename Row::template Pipeline<Problem>, StoreOutput<Row>>;

    static void run(const ck_tile::stream_config& to, const Args& args) {
        Headers::enqueue<Kernel>(to, fmha_fwd_pagedkv_create_kargs_and_grids<Kernel>(args));
    }
};

}  // namespace catalog::ck
