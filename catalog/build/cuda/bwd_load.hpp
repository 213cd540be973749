// The main stage of backward: the warps that load. One copies Q and dO, one stores LSE, one delta.
#pragma once

#include "bwd_tile.hpp"

namespace catalog::cuda {

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

template <class T>
__device__ __forceinline__ RaggedRows ragged(const catalog_tensor& tensor, std::int64_t batch, int head,
                                             std::int64_t first, int rows) {
    return {offset_of(tensor, batch, head, first) * static_cast<std::int64_t>(sizeof(T)),
            tensor.stride_seqlen * static_cast<std::int64_t>(sizeof(T)), rows};
}

// `columns` elements of each row, panel by panel.
template <int columns, int panel_bytes>
__device__ __forceinline__ void load_panels(std::uint32_t target, const CUtensorMap* map, std::uint32_t barrier,
                                            const RaggedRows& rows, int first) {
#pragma unroll
    for (int panel = 0; panel < columns / panel_columns; ++panel)
        tma_load(target + panel * panel_bytes, map, barrier, panel * panel_columns, rows.first_row + first, rows.low,
                 rows.high, RaggedRows::wrap);
}

// By one thread.
template <class Row>
__device__ __forceinline__ void load_tiles(const catalog_args& args, const BackwardMaps& maps,
                                           const BackwardWork<Row>& work, const BackwardBarriers<Row>& barriers,
                                           std::uint32_t base) {
    using Tile = BackwardTile<Row>;
    using T = typename Row::dtype;
    const Sequence& sequence = work.sequence;
    const RaggedRows k = ragged<T>(args.k, sequence.batch, work.head_k, sequence.first_k, sequence.seqlen_k);
    const RaggedRows v = ragged<T>(args.v, sequence.batch, work.head_k, sequence.first_k, sequence.seqlen_k);
    barrier_arrive_expect(barriers.k(), Tile::k_bytes);
    load_panels<Tile::hdim_q, Tile::key_panel>(base + Tile::k_at, &maps.k, barriers.k(), k, work.first_key);
    RingPlace<Tile::stages> place;
    bool first_tile = true;
    for (int head = work.head_k * work.heads; head < (work.head_k + 1) * work.heads; ++head) {
        const RaggedRows q = ragged<T>(args.q, sequence.batch, head, sequence.first_q, sequence.seqlen_q);
        const RaggedRows grad_o = ragged<T>(args.grad_o, sequence.batch, head, sequence.first_q, sequence.seqlen_q);
        for (int tile = work.begin; tile < work.end; ++tile) {
            barrier_wait(barriers.empty_q(place.stage), place.phase ^ 1);
            barrier_arrive_expect(barriers.full_q(place.stage), Tile::q_bytes);
            load_panels<Tile::hdim_q, Tile::query_panel>(base + Tile::q_at + place.stage * Tile::q_bytes, &maps.q,
                                                         barriers.full_q(place.stage), q, tile * Tile::m);
            if (first_tile) {
                barrier_arrive_expect(barriers.v(), Tile::v_bytes);
                load_panels<Tile::hdim_v, Tile::key_panel>(base + Tile::v_at, &maps.v, barriers.v(), v,
                                                           work.first_key);
                first_tile = false;
            }
            barrier_wait(barriers.empty_grad_o(place.stage), place.phase ^ 1);
            barrier_arrive_expect(barriers.full_grad_o(place.stage), Tile::grad_o_bytes);
            load_panels<Tile::hdim_v, Tile::query_panel>(base + Tile::grad_o_at + place.stage * Tile::grad_o_bytes,
                                                         &maps.grad_o, barriers.full_grad_o(place.stage), grad_o,
                                                         tile * Tile::m);
            place = place.next();
        }
    }
}

// By a warp: a number for each query. LSE comes in base 2, and as infinity where a row is none or sees no key, so that its
// weights are 0.
template <class Row, bool of_lse>
__device__ __forceinline__ void load_rows(const catalog_args& args, const BackwardWork<Row>& work,
                                          const BackwardBarriers<Row>& barriers, std::uint32_t base) {
    using Tile = BackwardTile<Row>;
    constexpr bool shifted = of_lse && Row::bias == Bias::alibi && Row::mask == Mask::causal;
    constexpr int turns = (Tile::m + 31) / 32;
    const int lane = threadIdx.x % 32;
    const catalog_tensor& tensor = of_lse ? args.lse : args.delta;
    RingPlace<Tile::stages> place;
    for (int head = work.head_k * work.heads; head < (work.head_k + 1) * work.heads; ++head) {
        const float* const rows = static_cast<const float*>(tensor.data) +
                                  offset_of(tensor, work.sequence.batch, head, work.sequence.first_q);
        float slope = 0;
        if constexpr (shifted) slope = slope_of(args, blockIdx.z, head);
        for (int tile = work.begin; tile < work.end; ++tile) {
            float number[turns];
#pragma unroll
            for (int i = 0; i < turns; ++i) {
                const int query = tile * Tile::m + i * 32 + lane;
                number[i] = of_lse ? infinity() : 0.0f;
                if (query < work.sequence.seqlen_q) {
                    number[i] = __ldg(rows + query * tensor.stride_seqlen);
                    if constexpr (shifted) number[i] -= slope * static_cast<float>(query + work.diagonal);
                    if constexpr (of_lse) number[i] = number[i] == -infinity() ? infinity() : number[i] * log2_e;
                    if constexpr (!of_lse && Tile::scales_ds) number[i] *= args.scale;
                }
            }
            barrier_wait(of_lse ? barriers.empty_q(place.stage) : barriers.empty_grad_o(place.stage), place.phase ^ 1);
            const std::uint32_t target = base + (of_lse ? Tile::lse_at : Tile::delta_at) +
                                         place.stage * Tile::row_bytes + lane * 4;
#pragma unroll
            for (int i = 0; i < turns; ++i)
                if (i * 32 + lane < Tile::m) store_number(target + i * 128, number[i]);
            barrier_arrive(of_lse ? barriers.full_q(place.stage) : barriers.full_grad_o(place.stage));
            place = place.next();
        }
    }
}

}  // namespace catalog::cuda
