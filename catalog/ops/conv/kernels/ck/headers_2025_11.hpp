// CK's headers of 2025-11: the templates of each direction, and the types of a row.
#pragma once

#include <vector>

#include "ck_tile/core.hpp"
#include "ck_tile/host/convolution_parameter.hpp"
#include "ck_tile/host/kernel_launch.hpp"
#include "ck_tile/ops/epilogue/cshuffle_epilogue.hpp"
#include "ck_tile/ops/gemm.hpp"
#include "ck_tile/ops/grouped_convolution.hpp"

#include "roles.hpp"

namespace catalog::ck {

template <Direction>
struct Templates;

template <>
struct Templates<Direction::forward> {
    using Arguments = ck_tile::GroupedConvFwdHostArgs<>;
    template <class... T>
    using Kernel = ck_tile::GroupedConvolutionForwardKernel<T...>;
};

template <>
struct Templates<Direction::bwd_data> {
    using Arguments = ck_tile::GroupedConvBwdDataHostArgs;
    template <class... T>
    using Kernel = ck_tile::GroupedConvolutionBackwardDataKernel<T...>;
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
    using Plain = ck_tile::element_wise::PassThrough;
    using RowMajor = ck_tile::tensor_layout::gemm::RowMajor;
    using ColumnMajor = ck_tile::tensor_layout::gemm::ColumnMajor;
    using LayoutA = std::conditional_t<Of::rows_a, RowMajor, ColumnMajor>;
    using LayoutB = std::conditional_t<Of::rows_b, RowMajor, ColumnMajor>;

    using Tile = ck_tile::TileGemmShape<ck_tile::sequence<Row::tile_m, Row::tile_n, Row::tile_k>,
                                        ck_tile::sequence<Row::wave_m, Row::wave_n, Row::wave_k>,
                                        ck_tile::sequence<Row::warp_tile_m, Row::warp_tile_n, Row::warp_tile_k>>;
    using Geometry = ck_tile::GroupedConvTraits<Row::ndim, Row::specialization, typename Row::LayoutIn,
                                                typename Row::LayoutWeight, ck_tile::tuple<>, typename Row::LayoutOut,
                                                Row::vector_a, Row::vector_b, Row::vector_c, Row::num_groups_to_merge>;
    // Upstream's order of tiles: groups of 8 along one axis, 4 along the other.
    using Partitioner = ck_tile::GemmSpatiallyLocalTilePartitioner<Tile, 8, 4>;

    // Says how a loop over K is divided into a hot loop and a tail, for rows whose loop is not simple.
    template <class R>
    using Loop = typename R::template Loop<ck_tile::GemmPipelineProblem<
        typename Of::A, typename Of::B, typename Row::Sum, Tile,
        ck_tile::TileGemmTraits<true, true, true, LayoutA, LayoutB, RowMajor, Row::num_wave_groups>, Plain, Plain,
        typename Of::C, true, Row::vector_a, Row::vector_b>>;

    template <bool hot_loop, ck_tile::TailNumber tail>
    using Pipeline = typename Row::template Pipeline<ck_tile::UniversalGemmPipelineProblem<
        typename Of::A, typename Of::B, typename Row::Sum, Tile,
        ck_tile::TileGemmUniversalTraits<true, true, true, Row::double_buffer, LayoutA, LayoutB, RowMajor, false, false,
                                         false, Row::num_wave_groups>,
        Row::scheduler, hot_loop, tail, Plain, Plain, typename Of::C, true, Row::vector_a, Row::vector_b>>;

    using Epilogue = ck_tile::CShuffleEpilogue<ck_tile::CShuffleEpilogueProblem<
        typename Of::A, typename Of::B, ck_tile::tuple<>, typename Row::Sum, typename Of::C,
        typename Geometry::ImplicitGemmDsLayout, RowMajor, Plain, Row::tile_m, Row::tile_n, Row::wave_m, Row::wave_n,
        Row::warp_tile_m, Row::warp_tile_n, Row::warp_tile_k, false, ck_tile::memory_operation_enum::set,
        Row::num_wave_groups, true, Row::vector_c>>;

    // Steps over K of a product that a launch computes. A gradient of an input with strides is several products.
    static std::vector<ck_tile::index_t> depths(const typename Templates<Row::direction>::Arguments& args,
                                                ck_tile::index_t depth) {
        if constexpr (Row::direction == Direction::bwd_data) {
            const ck_tile::GroupedConvBwdDataKernelArgs<Geometry, Partitioner> products(args);
            std::vector<ck_tile::index_t> all;
            for (ck_tile::index_t i = 0; i < products.gemm_count && i < products.MaxGroupedGemmGroupsNum; ++i)
                all.push_back(products.a_grid_descs_m_k[i].get_length(ck_tile::number<1>{}));
            return all;
        }
        return {depth};
    }

    // The device function of a kernel with these arguments.
    template <class Kernel, class... Args>
    static constexpr auto entry = ck_tile::kentry<Row::block_per_cu, Kernel, Args...>;
};

}  // namespace catalog::ck
