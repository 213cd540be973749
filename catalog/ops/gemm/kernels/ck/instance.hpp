// The types of a row: CK's templates with its traits.
#pragma once

#include <cstddef>
#include <utility>

namespace catalog::ck {

template <class Row>
struct Instance {
    using Tile = ck_tile::TileGemmShape<ck_tile::sequence<Row::tile_m, Row::tile_n, Row::tile_k>,
                                        ck_tile::sequence<Row::wave_m, Row::wave_n, Row::wave_k>,
                                        ck_tile::sequence<Row::warp_tile_m, Row::warp_tile_n, Row::warp_tile_k>>;
    // Upstream's order of tiles: groups of 8 along one axis, 4 along the other.
    using Partitioner = ck_tile::GemmSpatiallyLocalTilePartitioner<Tile, 8, 4>;

    using Traits =
        ck_tile::TileGemmUniversalTraits<Row::pad_m, Row::pad_n, Row::pad_k, Row::double_buffer, typename Row::LayoutA,
                                         typename Row::LayoutB, typename Row::LayoutC, false, false, Row::persistent,
                                         Row::num_wave_groups, Row::preshuffled>;

    // Says how a loop over K is divided into a hot loop and a tail.
    using Loop = typename Row::template Loop<
        ck_tile::GemmPipelineProblem<typename Row::A, typename Row::B, typename Row::Sum, Tile, Traits>>;

    template <bool hot_loop, ck_tile::TailNumber tail>
    using Pipeline = typename Row::template Pipeline<ck_tile::UniversalGemmPipelineProblem<
        typename Row::A, typename Row::B, typename Row::Sum, Tile, Traits, Row::scheduler, hot_loop, tail>>;

    // For kernels that divide the loop themselves.
    using AnyPipeline = typename Row::template Pipeline<ck_tile::UniversalGemmPipelineProblem<
        typename Row::A, typename Row::B, typename Row::Sum, Tile, Traits, Row::scheduler>>;

    template <std::size_t>
    using TypeD = typename Row::C;
    template <std::size_t>
    using LayoutD = ck_tile::tensor_layout::gemm::RowMajor;
    template <std::size_t... i>
    static ck_tile::tuple<TypeD<i>...> types_d(std::index_sequence<i...>);
    template <std::size_t... i>
    static ck_tile::tuple<LayoutD<i>...> layouts_d(std::index_sequence<i...>);
    using Ds = decltype(types_d(std::make_index_sequence<Row::num_d>()));
    using LayoutsD = decltype(layouts_d(std::make_index_sequence<Row::num_d>()));

    template <ck_tile::memory_operation_enum operation>
    using Epilogue = std::conditional_t<
        Row::shuffles, ck_tile::CShuffleEpilogue<Headers::Shuffle<Row, Ds, LayoutsD, operation>>,
        ck_tile::DefaultGemm2DEpilogue<Headers::Direct<Row, Ds, LayoutsD, operation>>>;
};

}  // namespace catalog::ck
