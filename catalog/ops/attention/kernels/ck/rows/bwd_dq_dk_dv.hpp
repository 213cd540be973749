// The main stage of the backward: dK, dV, and dQ or its partial sums.
#pragma once

#include "backward.hpp"

namespace catalog::ck {

template <class Row>
struct Family {
    using Args = fmha_bwd_args;
    using Types = BackwardTypes<Row>;
    using Shape = Headers::BackwardShape<
        Row,
        ck_tile::sequence<Row::tile_m0, Row::tile_n0, Row::tile_k0, Row::tile_n1, Row::tile_k1, Row::tile_k0max,
                          Row::tile_bwd6, Row::tile_bwd7, Row::tile_bwd8>,
        ck_tile::sequence<Row::wave_m0, Row::wave_n0, Row::wave_k0>,
        ck_tile::sequence<Row::wave_m1, Row::wave_n1, Row::wave_k1>,
        ck_tile::sequence<Row::wave_m2, Row::wave_n2, Row::wave_k2>,
        ck_tile::sequence<Row::warp_m0, Row::warp_n0, Row::warp_k0>,
        ck_tile::sequence<Row::warp_m1, Row::warp_n1, Row::warp_k1>,
        ck_tile::sequence<Row::warp_m2, Row::warp_n2, Row::warp_k2>>;
    using Problem = Headers::BackwardProblem<Row, Types, Shape>;

    template <class To, int pad>
    using Store = ck_tile::Default2DEpilogue<ck_tile::Default2DEpilogueProblem<typename Types::AccDataType, To,
                                                                               Headers::pads_keys<Row>, (pad > 0)>>;
    using Kernel = Headers::BackwardKernel<
        typename Row::template Pipeline<Problem>, Store<typename Types::KGradDataType, Row::pad_d>,
        Store<typename Types::VGradDataType, Row::pad_dv>, Store<typename Types::QGradDataType, Row::pad_d>>;

    static void run(const ck_tile::stream_config& to, const Args& args) {
        Headers::enqueue<Kernel>(to, fmha_bwd_dq_dk_dv_create_kargs_and_grids<Kernel>(args));
    }
};

}  // namespace catalog::ck
