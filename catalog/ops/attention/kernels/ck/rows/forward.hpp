// What the forward families share: element types, tiles, the variant of the softmax, pipelines and epilogues.
#pragma once

#include "ck_tile/ops/epilogue.hpp"
#include "ck_tile/ops/fmha/block/variants.hpp"
#include "fmha_fwd.hpp"

#include "pads.hpp"

namespace catalog::ck {

template <class Row>
using ForwardTypes = FmhaFwdTypeConfig<typename Row::Element>;

template <class Row>
using ForwardShape = ck_tile::TileFmhaShape<
    ck_tile::sequence<Row::tile_m0, Row::tile_n0, Row::tile_k0, Row::tile_n1, Row::tile_k1, Row::tile_k0max>,
    ck_tile::sequence<Row::wave_m0, Row::wave_n0, Row::wave_k0>,
    ck_tile::sequence<Row::warp_m0, Row::warp_n0, Row::warp_k0>,
    ck_tile::sequence<Row::wave_m1, Row::wave_n1, Row::wave_k1>,
    ck_tile::sequence<Row::warp_m1, Row::warp_n1, Row::warp_k1>, Row::v_in_rows>;

template <class Row>
using ForwardVariant =
    ck_tile::ComposedAttention<Row::logits ? ck_tile::LOGITS_SOFT_CAP : 0, CK_TILE_FMHA_FWD_FAST_EXP2>;

// Traits and pipelines of forward and batch prefill.
template <class Row>
using ForwardTraits =
    ck_tile::TileFmhaTraits<Pads<Row>::s, Pads<Row>::sk, Pads<Row>::d, Pads<Row>::dv, Row::logits, Row::bias, false,
                            Row::lse, Row::dropout, Row::descaled, Row::block_per_cu, Row::skip_min_seqlen_q>;

template <class Row>
using ForwardPipeline = typename Row::template Pipeline<
    Headers::ForwardProblem<Row, ForwardTypes<Row>, ForwardShape<Row>, ForwardVariant<Row>, ForwardTraits<Row>>>;

// Writes the sums of a tile as elements of type To, behind checks of the extents that are padded.
template <class Sum, class To, bool pad_m, bool pad_n>
using Store = ck_tile::Default2DEpilogue<ck_tile::Default2DEpilogueProblem<Sum, To, pad_m, pad_n>>;

// Writes O.
template <class Row>
using StoreOutput =
    Store<typename ForwardTypes<Row>::OaccDataType, typename ForwardTypes<Row>::ODataType, Pads<Row>::s, Pads<Row>::dv>;

}  // namespace catalog::ck
