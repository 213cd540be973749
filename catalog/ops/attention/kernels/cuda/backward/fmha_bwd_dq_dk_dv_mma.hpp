// Backward attention, the main stage, for elements of 32 bits: dK, dV, and dQ, added up in device memory, in a fixed order
// where results must be the same bits every time.
#pragma once

#include "bwd_consume_mma.hpp"
#include "bwd_launch.hpp"

namespace catalog::cuda {

template <class Row>
__global__ void __launch_bounds__(BackwardTile<Row>::threads, 1)
    dq_dk_dv_mma(const __grid_constant__ catalog_args args, const Sections sections) {
    using Tile = BackwardTile<Row>;
    extern __shared__ __align__(1024) std::uint8_t memory[];
    const std::uint32_t base = shared_address(memory);
    follow_last_kernel();
    if (!Item<Row>(sections, blockIdx.x).exists(args, sections)) return;
    if (threadIdx.x == 0) WorkInMemory{base + Tile::work_at}.find<Row>(args, sections, blockIdx.x);
    __syncthreads();
    MmaBackward<Row>(args, base).run();
}

template <class Row>
inline std::int32_t workspace_size_fmha_bwd_dq_dk_dv_mma(const catalog_args* args, Uses uses, catalog_workspace* size) {
    return backward_workspace<Row>(args, uses, size);
}

template <class Row>
inline std::int32_t launch_fmha_bwd_dq_dk_dv_mma(const catalog_args* args, cudaStream_t stream) noexcept {
    Sections sections;
    const catalog_status status = begin_backward<Row>(args, stream, sections);
    if (status != CATALOG_OK || sections.items == 0) return status;
    return launch_blocks<Row>(*args, stream, sections, dq_dk_dv_mma<Row>);
}

template <class Row>
inline constexpr Block block_of{BackwardTile<Row>::threads, BackwardTile<Row>::shared_bytes};

}  // namespace catalog::cuda
