// CK's headers of 2025-07, where they differ from others.
#pragma once

#include "ck_tile/core.hpp"
#include "ck_tile/host/kernel_launch.hpp"
#include "ck_tile/ops/epilogue.hpp"
#include "ck_tile/ops/gemm.hpp"

namespace catalog::ck {

using ck_tile::element_wise::PassThrough;

// Sums and products of an accumulator and elements of D tensors, which CK has in an example only.
struct MultiDAdd {
    template <class E, class C, class... D>
    CK_TILE_HOST_DEVICE auto operator()(E& e, const C& c, const D&... ds) const {
        e = ck_tile::type_convert<E>((ck_tile::type_convert<float>(c) + ... + ck_tile::type_convert<float>(ds)));
    }
};
struct MultiDMultiply {
    template <class E, class C, class... D>
    CK_TILE_HOST_DEVICE auto operator()(E& e, const C& c, const D&... ds) const {
        e = ck_tile::type_convert<E>((ck_tile::type_convert<float>(c) * ... * ck_tile::type_convert<float>(ds)));
    }
};

struct Headers {
    template <class Row, class Ds, class LayoutsD, ck_tile::memory_operation_enum operation>
    using Shuffle = ck_tile::CShuffleEpilogueProblem<
        typename Row::A, typename Row::B, Ds, typename Row::Sum, typename Row::C, LayoutsD, typename Row::LayoutC,
        typename Row::Combine, Row::wave_m * Row::wave_n * Row::wave_k * ck_tile::get_warp_size(), Row::tile_m,
        Row::tile_n, Row::wave_m, Row::wave_n, Row::warp_tile_m, Row::warp_tile_n, Row::warp_tile_k, false, operation,
        Row::num_wave_groups>;

    // It combines nothing with D tensors.
    template <class Row, class, class, ck_tile::memory_operation_enum operation>
    using Direct =
        ck_tile::DefaultGemm2DEpilogueProblem<typename Row::A, typename Row::B, typename Row::Sum, typename Row::C,
                                              typename Row::LayoutC, Row::pad_m, Row::pad_n, Row::warp_tile_m,
                                              Row::warp_tile_n, Row::warp_tile_k, false, true, operation>;

    template <class A, class B, class C>
    static ck_tile::GroupedGemmHostArgs grouped_args(A a, B b, C c, ck_tile::index_t splits, ck_tile::index_t m,
                                                     ck_tile::index_t n, ck_tile::index_t k, ck_tile::index_t stride_a,
                                                     ck_tile::index_t stride_b, ck_tile::index_t stride_c) {
        return {a, b, c, splits, m, n, k, stride_a, stride_b, stride_c};
    }

    // The device function of a kernel with these arguments.
    template <class Kernel, int blocks_per_cu, class... Args>
    static constexpr auto entry = ck_tile::kentry<static_cast<int>(Kernel::BlockSize().x), blocks_per_cu, Kernel, Args...>;
};

}  // namespace catalog::ck
