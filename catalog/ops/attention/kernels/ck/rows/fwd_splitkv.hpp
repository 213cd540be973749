// Forward over parts of the keys: partial outputs and their LSE.
#pragma once

#include "forward.hpp"

namespace catalog::ck {

template <class Row>
struct Family {
    using Args = fmha_fwd_splitkv_args;
    using Types = ForwardTypes<Row>;

    // uneven: the last split may be shorter than a tile. merged: a single query row of the heads that share K and V
    // fills one tile.
    template <bool uneven, bool merged>
    struct Instance {
        using Traits = ck_tile::TileFmhaFwdSplitKVTraits<Pads<Row>::s, Pads<Row>::sk, Pads<Row>::d, Pads<Row>::dv,
                                                         Row::logits, Row::bias, false, Row::lse, Row::descaled,
                                                         Row::paged_kv, uneven, merged, Row::block_per_cu>;
        using Problem = ck_tile::BlockFmhaFwdSplitKVPipelineProblem<
            typename Types::QDataType, typename Types::KDataType, typename Types::VDataType,
            typename Types::SaccDataType, typename Types::SMPLComputeDataType, typename Types::BiasDataType,
            typename Types::LSEDataType, typename Types::PDataType, typename Types::OaccDataType,
            typename Types::OaccDataType, ForwardShape<Row>, Row::group, ForwardVariant<Row>, typename Row::Mask,
            Traits>;
        using Sum = typename Types::OaccDataType;
        using Kernel = ck_tile::FmhaFwdSplitKVKernel<typename Row::template Pipeline<Problem>,
                                                     Store<Sum, Sum, false, false>>;
    };

    template <bool uneven, bool merged>
    static void enqueue(const ck_tile::stream_config& to, const Args& args) {
        using Kernel = typename Instance<uneven, merged>::Kernel;
        Headers::enqueue<Kernel>(to, fmha_fwd_splitkv_create_kargs_and_grids<Kernel>(args));
    }

    template <bool uneven>
    static void run_split(const ck_tile::stream_config& to, const Args& args) {
        constexpr bool merges = Row::hdim_q == 128 && Row::bias == ck_tile::BlockAttentionBiasEnum::NO_BIAS &&
                                !Row::Mask::IsMasking;
        if constexpr (merges)
            if (args.max_seqlen_q == 1 && args.nhead_k < args.nhead_q) return enqueue<uneven, true>(to, args);
        enqueue<uneven, false>(to, args);
    }

    static void run(const ck_tile::stream_config& to, const Args& args) {
        const bool uneven = Row::group || args.seqlen_k_ptr || args.seqlen_k % (args.num_splits * Row::tile_n0) != 0;
        uneven ? run_split<true>(to, args) : run_split<false>(to, args);
    }
};

}  // namespace catalog::ck
