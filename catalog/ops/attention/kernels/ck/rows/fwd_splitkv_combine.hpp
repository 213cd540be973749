// The second stage of a forward over parts of the keys: outputs from the partial ones.
#pragma once

#include <stdexcept>
#include <utility>

#include "forward.hpp"

namespace catalog::ck {

template <class Row>
struct Family {
    using Args = fmha_fwd_splitkv_args;
    using Types = ForwardTypes<Row>;

    // Combines up to 2^log_splits splits.
    template <ck_tile::index_t log_splits>
    struct Instance {
        using Traits = ck_tile::TileFmhaFwdSplitKVCombineTraits<Pads<Row>::s, Pads<Row>::dv, Row::lse, Row::descaled,
                                                                log_splits, Row::block_per_cu>;
        using Problem = ck_tile::BlockFmhaSplitKVCombinePipelineProblem<
            typename Types::LSEDataType, typename Types::OaccDataType, typename Types::ODataType, Row::hdim_v,
            Row::group, Row::tile_n1, Traits>;
        using Kernel = ck_tile::FmhaFwdSplitKVCombineKernel<
            ck_tile::BlockFmhaFwdSplitKVCombinePipeline<Problem>,
            Store<typename Types::OaccDataType, typename Types::ODataType, false, false>>;
    };

    template <ck_tile::index_t log_splits>
    static bool enqueue(const ck_tile::stream_config& to, const Args& args) {
        if (args.num_splits > 1 << log_splits) return false;
        using Kernel = typename Instance<log_splits>::Kernel;
        Headers::enqueue<Kernel>(to, fmha_fwd_splitkv_combine_create_kargs_and_grids<Kernel>(args));
        return true;
    }

    template <ck_tile::index_t... log_splits>
    static bool enqueue_smallest(const ck_tile::stream_config& to, const Args& args,
                                 std::integer_sequence<ck_tile::index_t, log_splits...>) {
        return (... || enqueue<log_splits>(to, args));
    }

    static void run(const ck_tile::stream_config& to, const Args& args) {
        if (!enqueue_smallest(to, args, std::integer_sequence<ck_tile::index_t, 3, 4, 5, 6, 7>{}))
            throw std::invalid_argument("more splits than a kernel combines");
    }
};

}  // namespace catalog::ck
