// Backward attention, the main stage: dK, dV, and dQ in float32, added up in device memory, in a fixed order where
// results must be the same bits every time.
//
// Shared memory is the busiest part of a multiprocessor here. On an H200 (bf16, hdim 128, 8192 tokens) this stage runs
// at 600 TFLOP/s. Slower were: additions to dQ straight from registers (13 %); dQ staged beside products of scores, and
// fenced by those who stage it (5 % together); with tiles of 64 queries, dQ of the tile before (up to 2 %, with early
// scores; without them 3 to 5 %); dQ cleared by the first stage; dQ converted beside products of later sections (1 to 2 %);
// blocks that take one work after the other (3 to 6 %; up to 12 % faster for short sequences of head dim 64, which do).
#pragma once

#include "bwd_consume.hpp"
#include "bwd_consume_wide.hpp"
#include "bwd_launch.hpp"

namespace catalog::cuda {

// There are all maps where there are queries.
__device__ __forceinline__ void prefetch_maps(const catalog_args& args, const BackwardMaps& maps) {
    if (args.seqlen_q == 0) return;
    tma_prefetch_map(&maps.k);
    tma_prefetch_map(&maps.q);
    tma_prefetch_map(&maps.grad_o);
    tma_prefetch_map(&maps.v);
    tma_prefetch_map(&maps.dq_acc);
}

template <class Row>
__global__ void __launch_bounds__(BackwardTile<Row>::threads, 1)
    dq_dk_dv(const __grid_constant__ catalog_args args, const __grid_constant__ BackwardMaps maps,
             const Sections sections) {
    using Tile = BackwardTile<Row>;
    extern __shared__ __align__(1024) std::uint8_t memory[];
    const std::uint32_t base = shared_address(memory);
    // Maps come from memory, as parameters do: they are asked for at once. One thread initialises barriers while another
    // finds the work, unless that one arrives at them.
    if (threadIdx.x == 96) prefetch_maps(args, maps);
    if (threadIdx.x == (Tile::persistent ? 0 : 64)) {
        if constexpr (Tile::slices > 1) SliceExchange<Row>::init(base);
        BackwardBarriers<Row>{base + Tile::barriers_at}.init();
    }
    follow_last_kernel();
    const int item = blockIdx.x / Tile::slices;
    if (!Tile::persistent && !Item<Row>(sections, item).exists(args, sections)) return;
    const WorkPlace<Row> first(base);
    if (threadIdx.x == 0) first.find(args, sections, item);
    __syncthreads();
    if constexpr (Tile::slices > 1) cluster_pass();  // init() released the barriers to the cluster
    if (threadIdx.x < 128) {
        release_registers<Tile::loader_registers>();
        const unsigned thread = Row::block_mask ? threadIdx.x / 32 * 32 : threadIdx.x;
        if (!Tile::persistent && first.work().begin() == first.work().end()) {
            if (thread >= 96) ClearAhead<Row>{args, sections, first.work()}.clear_all();
            return;
        }
        if (thread >= 96)
            load_rows<Row, false>(args, base, sections);
        else if (thread >= 64)
            load_rows<Row, true>(args, base, sections);
        else if (thread == 32)
            add_dq<Row>(args, maps, base, sections);
        else if (thread == 0)
            load_tiles<Row>(args, maps, base, sections);
    } else {
        claim_registers<Tile::consumer_registers>();
        if constexpr (Tile::divides_hdim)
            WideBackwardConsumer<Row>(args, maps, base).run();
        else
            BackwardConsumer<Row>(args, maps, base).run();
        if constexpr (Tile::slices > 1) cluster_pass();  // the other block may still write to this one's memory
    }
}

template <class Row>
inline bool make_maps(const catalog_args& args, BackwardMaps& maps) {
    using Tile = BackwardTile<Row>;
    using T = typename Row::dtype;
    const auto rows_of = [](CUtensorMap& map, const catalog_tensor& tensor, std::int64_t hdim, int box_rows) {
        return !tensor.data || make_ragged_map<T>(map, tensor.data, tensor.stride_seqlen * sizeof(T), hdim,
                                                  panel_columns, box_rows);
    };
    const std::int64_t dq_row_bytes = args.dq_acc.stride_seqlen * sizeof(float);
    return rows_of(maps.q, args.q, args.hdim_q, Tile::m) && rows_of(maps.grad_o, args.grad_o, args.hdim_v, Tile::m) &&
           rows_of(maps.k, args.k, args.hdim_q, Tile::n) && rows_of(maps.v, args.v, args.hdim_v, Tile::n) &&
           rows_of(maps.dk, args.dk, args.hdim_q, 64) && rows_of(maps.dv, args.dv, args.hdim_v, 64) &&
           (!args.dq_acc.data || make_ragged_map<float>(maps.dq_acc, args.dq_acc.data, dq_row_bytes, args.hdim_q, 32,
                                                        Tile::dq_rows));
}

template <class Row>
inline std::int32_t workspace_size_fmha_bwd_dq_dk_dv_wgmma(const catalog_args* args, Uses uses,
                                                           catalog_workspace* size) {
    return backward_workspace<Row>(args, uses, size);
}

template <class Row>
inline std::int32_t launch_fmha_bwd_dq_dk_dv_wgmma(const catalog_args* args, cudaStream_t stream) noexcept {
    Sections sections;
    const catalog_status status = begin_backward<Row>(args, stream, sections);
    if (status != CATALOG_OK || sections.items == 0) return status;
    BackwardMaps maps{};
    if (!make_maps<Row>(*args, maps)) return CATALOG_BAD_ARGUMENT;
    return launch_blocks<Row>(*args, stream, sections, dq_dk_dv<Row>, maps);
}

template <class Row>
inline constexpr Block block_of{BackwardTile<Row>::threads, BackwardTile<Row>::shared_bytes};

}  // namespace catalog::cuda
