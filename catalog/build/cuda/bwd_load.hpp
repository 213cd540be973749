// The main stage of backward: the warps that load. One copies K and Q, one V and dO; one stores LSE, one delta.
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

// By one thread: K and Q, or V and dO.
template <class Row, bool of_q>
__device__ __forceinline__ void load_tiles(const catalog_args& args, const BackwardMaps& maps, std::uint32_t base) {
    using Tile = BackwardTile<Row>;
    using T = typename Row::dtype;
    constexpr int hdim = of_q ? Tile::hdim_q : Tile::hdim_v, bytes = of_q ? Tile::q_bytes : Tile::grad_o_bytes;
    const WorkInMemory work{base + Tile::work_at};
    const BackwardBarriers<Row> barriers{base + Tile::barriers_at};
    const int head_k = blockIdx.y, heads = heads_per_key_head(args);
    {
        const catalog_tensor& tensor = of_q ? args.k : args.v;
        const RaggedRows keys = ragged<T>(tensor, work.batch(), head_k, work.first_k(), work.seqlen_k());
        const std::uint32_t barrier = of_q ? barriers.k() : barriers.v();
        barrier_arrive_expect(barrier, of_q ? Tile::k_bytes : Tile::v_bytes);
        load_panels<hdim, Tile::key_panel>(base + (of_q ? Tile::k_at : Tile::v_at), of_q ? &maps.k : &maps.v, barrier,
                                           keys, blockIdx.x * Tile::n);
    }
    RingPlace<Tile::stages> place;
    for (int head = 0; head < heads; ++head) {
        const catalog_tensor& tensor = of_q ? args.q : args.grad_o;
        const RaggedRows rows =
            ragged<T>(tensor, work.batch(), head_k * heads + head, work.first_q(), work.seqlen_q());
        for (int tile = work.begin(); tile < work.end(); ++tile) {
            const std::uint32_t full = of_q ? barriers.full_q(place.stage) : barriers.full_grad_o(place.stage);
            const std::uint32_t target = base + (of_q ? Tile::q_at : Tile::grad_o_at) + place.stage * bytes;
            barrier_wait(of_q ? barriers.empty_q(place.stage) : barriers.empty_grad_o(place.stage), place.phase ^ 1);
            barrier_arrive_expect(full, bytes);
            load_panels<hdim, Tile::query_panel>(target, of_q ? &maps.q : &maps.grad_o, full, rows, tile * Tile::m);
            place = place.next();
        }
    }
}

// By a warp: a number for each query. LSE comes in base 2, and as infinity where a row is none or sees no key, so that its
// weights are 0.
template <class Row, bool of_lse>
__device__ __forceinline__ void load_rows(const catalog_args& args, std::uint32_t base) {
    using Tile = BackwardTile<Row>;
    constexpr bool shifted = of_lse && Row::bias == Bias::alibi && Row::mask == Mask::causal;
    const WorkInMemory work{base + Tile::work_at};
    const BackwardBarriers<Row> barriers{base + Tile::barriers_at};
    const int lane = threadIdx.x % 32, heads = heads_per_key_head(args);
    const catalog_tensor& tensor = of_lse ? args.lse : args.delta;
    RingPlace<Tile::stages> place;
    for (int head = blockIdx.y * heads; head < (blockIdx.y + 1) * heads; ++head) {
        float slope = 0;
        if constexpr (shifted) slope = slope_of(args, blockIdx.z, head);
        for (int tile = work.begin(); tile < work.end(); ++tile) {
            const int first = tile * Tile::m + lane, rest = work.seqlen_q() - first;
            const float* const rows = static_cast<const float*>(tensor.data) +
                                      offset_of(tensor, work.batch(), head, work.first_q() + first);
            float number[(Tile::m + 31) / 32];
#pragma unroll
            for (int i = 0; i < Tile::m; i += 32) {
                float& x = number[i / 32];
                x = of_lse ? infinity() : 0.0f;
                if (i >= rest) continue;
                x = __ldg(rows + i * tensor.stride_seqlen);
                if constexpr (shifted) x -= slope * static_cast<float>(first + i + work.diagonal());
                if constexpr (of_lse) x = x == -infinity() ? infinity() : x * log2_e;
                if constexpr (!of_lse && Tile::scales_ds) x *= args.scale;
            }
            barrier_wait(of_lse ? barriers.empty_q(place.stage) : barriers.empty_grad_o(place.stage), place.phase ^ 1);
            const std::uint32_t target = base + (of_lse ? Tile::lse_at : Tile::delta_at) +
                                         place.stage * Tile::row_bytes + lane * 4;
#pragma unroll
            for (int i = 0; i < Tile::m; i += 32)
                if (i + lane < Tile::m) store_number(target + i * 4, number[i / 32]);
            barrier_arrive(of_lse ? barriers.full_q(place.stage) : barriers.full_grad_o(place.stage));
            place = place.next();
        }
    }
}

}  // namespace catalog::cuda
