// CK's headers of 2025-07: the templates of each direction, and the types of a row.
#pragma once

#include <vector>

// A call of a member template in the headers lacks the angle brackets that newer compilers ask for.
#ifdef __clang__
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wunknown-warning-option"
#pragma clang diagnostic ignored "-Wmissing-template-arg-list-after-template-kw"
#endif
#include "ck_tile/core.hpp"
#include "ck_tile/host/convolution_parameter.hpp"
#include "ck_tile/host/kernel_launch.hpp"
#include "ck_tile/host/stream_config.hpp"
#include "ck_tile/ops/epilogue.hpp"
#include "ck_tile/ops/gemm.hpp"
#include "ck_tile/ops/grouped_convolution.hpp"
#ifdef __clang__
#pragma clang diagnostic pop
#endif

#include "roles.hpp"

namespace catalog::ck {

template <Direction>
struct Templates;

template <>
struct Templates<Direction::forward> {
    using Arguments = ck_tile::GroupedConvFwdHostArgs;
    template <class... T>
    using Kernel = ck_tile::GroupedConvolutionForwardKernel<T...>;
};

template <>
struct Templates<Direction::bwd_weight> {
    using Arguments = ck_tile::GroupedConvBwdWeightHostArgs;
    template <class... T>
    using Kernel = ck_tile::GroupedConvolutionBackwardWeightKernel<T...>;
};

template <class Row>
struct Instance : Templates<Row::direction> {
    using Of = Roles<Row>;
    using RowMajor = ck_tile::tensor_layout::gemm::RowMajor;

    using Tile = ck_tile::TileGemmShape<ck_tile::sequence<Row::tile_m, Row::tile_n, Row::tile_k>,
                                        ck_tile::sequence<Row::wave_m, Row::wave_n, Row::wave_k>,
                                        ck_tile::sequence<Row::warp_tile_m, Row::warp_tile_n, Row::warp_tile_k>>;
    using Geometry = ck_tile::GroupedConvTraits<Row::ndim, Row::specialization, typename Row::LayoutIn,
                                                typename Row::LayoutWeight, ck_tile::tuple<>, typename Row::LayoutOut>;
    using Partitioner = ck_tile::GemmTile1DPartitioner<Tile>;

    // Descriptors of both directions present A and B along K.
    using Problem = ck_tile::GemmPipelineProblem<typename Of::A, typename Of::B, typename Row::Sum, Tile,
                                                 typename Geometry::GroupedConvImplicitGemmTraits, typename Of::A, true,
                                                 Row::vector_a, Row::vector_b>;

    template <bool, ck_tile::TailNumber>
    using Pipeline = typename Row::template Pipeline<Problem>;

    using Epilogue = ck_tile::CShuffleEpilogue<ck_tile::CShuffleEpilogueProblem<
        typename Of::A, typename Of::B, ck_tile::tuple<>, typename Row::Sum, typename Of::C,
        typename Geometry::ImplicitGemmDsLayout, RowMajor, ck_tile::element_wise::PassThrough, Problem::kBlockSize,
        Row::tile_m, Row::tile_n, Row::wave_m, Row::wave_n, Row::warp_tile_m, Row::warp_tile_n, Row::warp_tile_k, false,
        ck_tile::memory_operation_enum::set, 1, true, Row::vector_c>>;

    static std::vector<ck_tile::index_t> depths(const typename Templates<Row::direction>::Arguments&,
                                                ck_tile::index_t depth) {
        return {depth};
    }

    // The device function of a kernel with these arguments.
    template <class Kernel, class... Args>
    static constexpr auto entry =
        ck_tile::kentry<static_cast<int>(Kernel::BlockSize().x), Row::block_per_cu, Kernel, Args...>;
};

}  // namespace catalog::ck
