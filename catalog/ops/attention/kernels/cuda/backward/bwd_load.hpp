// The main stage of backward: the warps that do not multiply. One loads tiles, one LSE, one delta, and one V; then
// it adds dQ up.
#pragma once

#include "bwd_walk.hpp"

namespace catalog::cuda {

template <class T>
__device__ __forceinline__ RaggedRows ragged(const catalog_tensor& tensor, std::int64_t batch, int head,
                                             std::int64_t first, int rows) {
    return {offset_of(tensor, batch, head, first) * static_cast<std::int64_t>(sizeof(T)),
            tensor.stride_seqlen * static_cast<std::int64_t>(sizeof(T)), rows};
}

// `columns` elements of each row, panel by panel: those of the block's slice.
template <class Row, int columns, int panel_bytes>
__device__ __forceinline__ void load_panels(std::uint32_t target, const CUtensorMap* map, std::uint32_t barrier,
                                            const RaggedRows& rows, int first) {
#pragma unroll
    for (int panel = 0; panel < columns / panel_columns; ++panel)
        tma_load(target + panel * panel_bytes, map, barrier, slice_of<Row>() * columns + panel * panel_columns,
                 rows.first_row + first, rows.low, rows.high, RaggedRows::wrap);
}

// By one thread, or a warp under a block mask: all but V.
template <class Row>
__device__ __forceinline__ void load_tiles(const catalog_args& args, const BackwardMaps& maps, std::uint32_t base) {
    using Tile = BackwardTile<Row>;
    using T = typename Row::dtype;
    const WorkInMemory work{base + Tile::work_at};
    const BackwardBarriers<Row> barriers{base + Tile::barriers_at};
    if (acts<Row>()) {
        const RaggedRows k = ragged<T>(args.k, work.batch(), work.head_k(), work.first_k(), work.seqlen_k());
        barrier_arrive_expect(barriers.k(), Tile::k_bytes);
        load_panels<Row, Tile::hdim_q, Tile::key_panel>(base + Tile::k_at, &maps.k, barriers.k(), k, work.first_key());
    }
    RingPlace<Tile::stages> place;
    RingPlace<Tile::grad_o_stages> grad_o_place;
    const int first_head = work.head_k() * work.heads();
    for (int head = first_head; head < first_head + work.heads(); ++head) {
        const RaggedRows q = ragged<T>(args.q, work.batch(), head, work.first_q(), work.seqlen_q());
        const RaggedRows grad_o = ragged<T>(args.grad_o, work.batch(), head, work.first_q(), work.seqlen_q());
        TileWalk<Row> walk(args, work, head - first_head);
        for (int tile = walk.first(); tile < work.end(); tile = walk.after(tile)) {
            if (acts<Row>()) {
                const std::uint32_t full_q = barriers.full_q(place.stage);
                const std::uint32_t full_grad_o = barriers.full_grad_o(grad_o_place.stage);
                barrier_wait(barriers.empty_q(place.stage), place.phase ^ 1);
                barrier_arrive_expect(full_q, Tile::q_bytes);
                load_panels<Row, Tile::hdim_q, Tile::query_panel>(base + Tile::q_at + place.stage * Tile::q_bytes,
                                                                  &maps.q, full_q, q, tile * Tile::m);
                barrier_wait(barriers.empty_grad_o(grad_o_place.stage), grad_o_place.phase ^ 1);
                barrier_arrive_expect(full_grad_o, Tile::grad_o_bytes);
                load_panels<Row, Tile::hdim_v, Tile::query_panel>(
                    base + Tile::grad_o_at + grad_o_place.stage * Tile::grad_o_bytes, &maps.grad_o, full_grad_o, grad_o,
                    tile * Tile::m);
            }
            place = place.next();
            grad_o_place = grad_o_place.next();
        }
    }
    if (Row::block_mask && acts<Row>()) {  // the visit that is none
        barrier_wait(barriers.empty_q(place.stage), place.phase ^ 1);
        barrier_arrive(barriers.full_q(place.stage));
    }
}

// By one thread, or a warp under a block mask: V, which is not needed first.
template <class Row>
__device__ __forceinline__ void load_v(const catalog_args& args, const BackwardMaps& maps, std::uint32_t base) {
    using Tile = BackwardTile<Row>;
    using T = typename Row::dtype;
    const WorkInMemory work{base + Tile::work_at};
    const BackwardBarriers<Row> barriers{base + Tile::barriers_at};
    if (!acts<Row>()) return;
    const RaggedRows v = ragged<T>(args.v, work.batch(), work.head_k(), work.first_k(), work.seqlen_k());
    barrier_arrive_expect(barriers.v(), Tile::v_bytes);
    load_panels<Row, Tile::hdim_v, Tile::key_panel>(base + Tile::v_at, &maps.v, barriers.v(), v, work.first_key());
}

// By one thread: adds what the warpgroups stage of a tile to dQ in device memory.
template <class Row>
__device__ __forceinline__ void add_tile(const catalog_args& args, const BackwardMaps& maps, std::uint32_t base,
                                         int tile, RingPlace<BackwardTile<Row>::dq_stages>& place) {
    using Tile = BackwardTile<Row>;
    const WorkInMemory work{base + Tile::work_at};
    const BackwardBarriers<Row> barriers{base + Tile::barriers_at};
    const RaggedRows rows(work.dq_offset() * 4, args.dq_acc.stride_seqlen * 4, work.seqlen_q());
    if constexpr (Row::deterministic) fence_proxy_async_global();
#pragma unroll
    for (int round = 0; round < Tile::dq_rounds; ++round) {
#pragma unroll
        for (int warpgroup = 0; warpgroup < Tile::warpgroups; ++warpgroup) {
            const int staged = Tile::divides_queries ? 0 : warpgroup * Tile::dq_panels;
            const int first_panel = staged * Tile::dq_rounds + round * Tile::dq_panels;
            const int first_row = Tile::divides_queries ? warpgroup * 64 : 0;
            barrier_wait(barriers.full_dq(warpgroup, place.stage), place.phase);
            if constexpr (!Row::deterministic) fence_proxy_async();
#pragma unroll
            for (int panel = 0; panel < Tile::dq_panels; ++panel)
                tma_reduce_add(&maps.dq_acc,
                               base + Tile::dq_at + place.stage * Tile::dq_bytes +
                                   (staged + panel) * Tile::query_panel + first_row * panel_row_bytes,
                               slice_of<Row>() * Tile::hdim_q + (first_panel + panel) * 32,
                               rows.first_row + tile * Tile::m + first_row, rows.low, rows.high, RaggedRows::wrap);
            bulk_commit();
        }
        bulk_wait_read<1>();
        barrier_arrive(barriers.empty_dq(0, place.stage));
        bulk_wait_read<0>();
        barrier_arrive(barriers.empty_dq(1, place.stage));
        place = place.next();
    }
}

// By one thread, or a warp under a block mask: adds dQ of all tiles, in the block's turn where results must be the same
// bits every time.
template <class Row>
__device__ __forceinline__ void add_dq(const catalog_args& args, const BackwardMaps& maps, std::uint32_t base) {
    using Tile = BackwardTile<Row>;
    const WorkInMemory work{base + Tile::work_at};
    RingPlace<Tile::dq_stages> place;
    for (int head = 0; head < work.heads(); ++head) {
        TileWalk<Row> walk(args, work, head);
        const Turns<Row> turns{args, work, head};
        if constexpr (Row::deterministic)
            if ((!Row::block_mask || walk.first() < work.end()) && acts<Row>()) turns.wait(walk.first());
        for (int tile = walk.first(), next; tile < work.end(); tile = next) {
            if (acts<Row>()) add_tile<Row>(args, maps, base, tile, place);
            next = walk.after(tile);
            if (Row::deterministic && acts<Row>()) {
                // Asked while this tile is on its way to memory: mostly the next turn has come by then.
                const bool waits = next < work.end() && (Row::block_mask || !turns.has_come(next));
                bulk_wait<0>();
                turns.pass(tile);
                if (waits) turns.wait(next);
            }
        }
        if (acts<Row>()) work.next_head(args.dq_acc.stride_nhead, counters_of_head(args, Tile::m));
    }
}

// By a warp: a number for each query.
template <class Row, bool of_lse>
__device__ __forceinline__ void load_rows(const catalog_args& args, std::uint32_t base) {
    using Tile = BackwardTile<Row>;
    const WorkInMemory work{base + Tile::work_at};
    const BackwardBarriers<Row> barriers{base + Tile::barriers_at};
    const int lane = threadIdx.x % 32;
    const catalog_tensor& tensor = of_lse ? args.lse : args.delta;
    RingPlace<of_lse ? Tile::stages : Tile::grad_o_stages> place;
    const int first_head = work.head_k() * work.heads();
    for (int head = first_head; head < first_head + work.heads(); ++head) {
        float slope = 0;
        if constexpr (of_lse && shifts_lse<Row>) slope = slope_of(args, work.index(), head);
        TileWalk<Row> walk(args, work, head - first_head);
        for (int tile = walk.first(); tile < work.end(); tile = walk.after(tile)) {
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
                x = of_lse ? lse_of_weights<Row>(x, slope, first + i + work.diagonal()) : delta_of_weights<Row>(args, x);
            }
            barrier_wait(of_lse ? barriers.empty_q(place.stage) : barriers.empty_grad_o(place.stage), place.phase ^ 1);
            const std::uint32_t target = base + (of_lse ? Tile::lse_at : Tile::delta_at) +
                                         place.stage * Tile::row_bytes + lane * 4;
#pragma unroll
            for (int i = 0; i < Tile::m; i += 32)
                if (i + lane < Tile::m) store_number(target + i * 4, number[i / 32]);
            if constexpr (Row::block_mask && of_lse)
                if (lane == 0) Visit{tile, head - first_head, walk.halves()}.store(Tile::visit_at(base, place.stage));
            barrier_arrive(of_lse ? barriers.full_q(place.stage) : barriers.full_grad_o(place.stage));
            place = place.next();
        }
    }
    if constexpr (Row::block_mask && of_lse) {
        barrier_wait(barriers.empty_q(place.stage), place.phase ^ 1);
        if (lane == 0) Visit{-1, 0, 0}.store(Tile::visit_at(base, place.stage));
        barrier_arrive(barriers.full_q(place.stage));
    }
}

}  // namespace catalog::cuda
