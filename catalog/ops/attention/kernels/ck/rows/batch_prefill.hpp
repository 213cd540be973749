// Forward over a paged K/V cache, for batches of prompts.
#pragma once

#include "forward.hpp"

namespace catalog::ck {

template <class Row>
struct Family {
    using Args = fmha_batch_prefill_args;
    using Types = ForwardTypes<Row>;
    using Traits = ck_tile::TileFmhaTraits<Pads<Row>::s, Pads<Row>::sk, Pads<Row>::d, Pads<Row>::dv, Row::logits,
                                           Row::bias, false, Row::lse, Row::dropout, Row::descaled, Row::block_per_cu>;
    using Problem = Headers::ForwardProblem<Row, Types, ForwardShape<Row>, ForwardVariant<Row>, Traits>;
    using Kernel = ck_tile::FmhaBatchPrefillWithPagedKVCacheKernel<
        typename Row::template Pipeline<Problem>,
        Store<typename Types::OaccDataType, typename Types::ODataType, Pads<Row>::s, Pads<Row>::dv>>;

    static void run(const ck_tile::stream_config& to, const Args& args) {
        auto [arguments, grid] = fmha_batch_prefill_create_kargs_and_grids<Kernel>(args);
        Headers::enqueue<Kernel>(to, grid, arguments);
    }
};

}  // namespace catalog::ck
