// CK's headers of 2025-07, where they differ from later ones.
#pragma once

#include "ck_tile/core.hpp"
#include "ck_tile/host/kernel_launch.hpp"
#include "ck_tile/ops/fmha.hpp"

#include "pads.hpp"

namespace catalog::ck {

struct Headers {
    template <class Row, class Types, class Shape, class Variant, class Traits>
    using ForwardProblem = ck_tile::BlockFmhaPipelineProblem<
        typename Types::QDataType, typename Types::KDataType, typename Types::VDataType, typename Types::SaccDataType,
        typename Types::SMPLComputeDataType, typename Types::BiasDataType, typename Types::RandValOutputDataType,
        typename Types::LSEDataType, typename Types::PDataType, typename Types::OaccDataType, typename Types::ODataType,
        Shape, Row::group, Variant, typename Row::Mask, Traits>;

    template <class Row, class Tile, class Warps0, class Warps1, class Warps2, class Warp0, class Warp1, class Warp2>
    using BackwardShape = ck_tile::TileFmhaBwdShape<Tile, Warps0, Warp0, Warps1, Warp1, Warps0, Warp0, Warps1, Warp1,
                                                    Warps2, Warp2>;

    template <class Row>
    using BackwardTraits = ck_tile::TileFmhaTraits<Pads<Row>::s, Pads<Row>::sk, Pads<Row>::d,
                                                   Pads<Row>::dv, false, Row::bias, Row::dbias, false, false, false,
                                                   Row::block_per_cu>;

    template <class Row, class Types, class Shape>
    using BackwardProblem = ck_tile::BlockFmhaBwdPipelineProblem<
        typename Types::QDataType, typename Types::KDataType, typename Types::VDataType, typename Types::GemmDataType,
        typename Types::LSEDataType, typename Types::AccDataType, typename Types::DDataType,
        typename Types::BiasDataType, typename Types::RandValOutputDataType, typename Types::ODataType,
        typename Types::OGradDataType, typename Types::QGradDataType, typename Types::KGradDataType,
        typename Types::VGradDataType, typename Types::BiasGradDataType, Shape, Row::group, Row::deterministic,
        typename Row::Mask, typename Row::Dropout, BackwardTraits<Row>>;

    template <class Row>
    static constexpr bool pads_keys = Pads<Row>::sk;

    // dQ leaves the kernel through atomic additions or partial sums: no epilogue writes it.
    template <class Pipeline, class StoreDk, class StoreDv, class>
    using BackwardKernel = ck_tile::FmhaBwdDQDKDVKernel<Pipeline, StoreDk, StoreDv>;

    // launch: the kernel's arguments and grid, as CK's functions return them.
    template <class Kernel, class Launch>
    static void enqueue(const ck_tile::stream_config& to, const Launch& launch) {
        const auto& [arguments, grid] = launch;
        constexpr dim3 block = Kernel::BlockSize();
        constexpr ck_tile::index_t blocks_per_cu = Kernel::kBlockPerCu;
        ck_tile::make_kernel<block.x, blocks_per_cu>(Kernel{}, grid, block, 0, arguments)(to);
    }
};

}  // namespace catalog::ck
