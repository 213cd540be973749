// The main stage of backward: the warps that do not multiply. One loads tiles, one LSE, one delta, and one adds dQ up.
#pragma once

#include "bwd_clear_ahead.hpp"
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

// By one thread: the block's rows of K or V.
template <class Row, int hdim>
__device__ __forceinline__ void load_keys(const catalog_tensor& tensor, const CUtensorMap& map, std::uint32_t target,
                                          std::uint32_t barrier, const WorkInMemory& work) {
    using Tile = BackwardTile<Row>;
    const RaggedRows rows =
        ragged<typename Row::dtype>(tensor, work.batch(), work.head_k(), work.first_k(), work.seqlen_k());
    barrier_arrive_expect(barrier, hdim / panel_columns * Tile::key_panel);
    load_panels<Row, hdim, Tile::key_panel>(target, &map, barrier, rows, work.first_key());
}

template <class Row>
__device__ __forceinline__ void load_k(const catalog_args& args, const BackwardMaps& maps, std::uint32_t base,
                                       const WorkInMemory& work) {
    using Tile = BackwardTile<Row>;
    const BackwardBarriers<Row> barriers{base + Tile::barriers_at};
    load_keys<Row, Tile::hdim_q>(args.k, maps.k, base + Tile::k_at, barriers.k(), work);
}

template <class Row>
__device__ __forceinline__ void load_v(const catalog_args& args, const BackwardMaps& maps, std::uint32_t base,
                                       const WorkInMemory& work) {
    using Tile = BackwardTile<Row>;
    const BackwardBarriers<Row> barriers{base + Tile::barriers_at};
    load_keys<Row, Tile::hdim_v>(args.v, maps.v, base + Tile::v_at, barriers.v(), work);
}

// Where the rows of Q and dO of a head lie.
template <class Row, bool in_memory = BackwardTile<Row>::persistent>
struct QueryRows {
    RaggedRows q, grad_o;

    __device__ __forceinline__ QueryRows(const catalog_args& args, const WorkInMemory& work, int head, std::uint32_t)
        : q(ragged<typename Row::dtype>(args.q, work.batch(), head, work.first_q(), work.seqlen_q())),
          grad_o(ragged<typename Row::dtype>(args.grad_o, work.batch(), head, work.first_q(), work.seqlen_q())) {}
    __device__ __forceinline__ const RaggedRows& of_q(const WorkInMemory&) const { return q; }
    __device__ __forceinline__ const RaggedRows& of_grad_o(const WorkInMemory&) const { return grad_o; }
};

// In shared memory, where no registers are left for it.
template <class Row>
struct QueryRows<Row, true> {
    const std::uint32_t at;

    __device__ __forceinline__ QueryRows(const catalog_args& args, const WorkInMemory& work, int head,
                                         std::uint32_t base)
        : at(base + BackwardTile<Row>::query_rows_at) {
        store_wide_number(at, end_of(args.q, work, head));
        store_wide_number(at + 8, end_of(args.grad_o, work, head));
    }
    __device__ __forceinline__ RaggedRows of_q(const WorkInMemory& work) const { return of(0, work); }
    __device__ __forceinline__ RaggedRows of_grad_o(const WorkInMemory& work) const { return of(8, work); }

   private:
    __device__ __forceinline__ RaggedRows of(int offset, const WorkInMemory& work) const {
        return {static_cast<std::uint64_t>(load_wide_number(at + offset)), work.seqlen_q()};
    }
    static __device__ __forceinline__ std::int64_t end_of(const catalog_tensor& tensor, const WorkInMemory& work,
                                                          int head) {
        constexpr std::int64_t bytes = sizeof(typename Row::dtype);
        const std::int64_t offset = offset_of(tensor, work.batch(), head, work.first_q()) * bytes;
        return static_cast<std::int64_t>(RaggedRows::end(offset, tensor.stride_seqlen * bytes, work.seqlen_q()) >> 4);
    }
};

// By one thread, or a warp under a block mask: the tiles of a work. The first ones of Q and dO come before K and V, whose
// memory the work before may still read.
template <class Row>
__device__ __forceinline__ void load_work(const catalog_args& args, const BackwardMaps& maps, std::uint32_t base,
                                          const WorkPlace<Row>& of, RingCount<BackwardTile<Row>::stages>& place) {
    using Tile = BackwardTile<Row>;
    const BackwardBarriers<Row> barriers{base + Tile::barriers_at};
    const WorkInMemory work = of.work();
    bool lacks_keys = Tile::persistent;
    if (!Tile::persistent && acts<Row>()) load_k<Row>(args, maps, base, work);
    for (int of_group = 0; of_group < work.heads(); ++of_group) {
        const QueryRows<Row> rows(args, work, work.head_k() * work.heads() + of_group, base);
        TileWalk<Row> walk(args, work, of_group);
        for (int tile = walk.first(); tile < work.end(); tile = walk.after(tile)) {
            if (acts<Row>()) {
                const RingCount<Tile::grad_o_stages> grad_o_place{place.count};
                const std::uint32_t full_q = barriers.full_q(place.stage());
                const std::uint32_t full_grad_o = barriers.full_grad_o(grad_o_place.stage());
                barrier_wait(barriers.empty_q(place.stage()), place.phase() ^ 1);
                barrier_arrive_expect(full_q, Tile::q_bytes);
                load_panels<Row, Tile::hdim_q, Tile::query_panel>(base + Tile::q_at + place.stage() * Tile::q_bytes,
                                                                  &maps.q, full_q, rows.of_q(work),
                                                                  work.tile<Row>(tile) * Tile::m);
                barrier_wait(barriers.empty_grad_o(grad_o_place.stage()), grad_o_place.phase() ^ 1);
                barrier_arrive_expect(full_grad_o, Tile::grad_o_bytes);
                load_panels<Row, Tile::hdim_v, Tile::query_panel>(
                    base + Tile::grad_o_at + grad_o_place.stage() * Tile::grad_o_bytes, &maps.grad_o, full_grad_o,
                    rows.of_grad_o(work), work.tile<Row>(tile) * Tile::m);
            }
            if (lacks_keys) {
                barrier_wait(barriers.empty_keys(), of.count % 2 ^ 1);
                load_k<Row>(args, maps, base, work);
                load_v<Row>(args, maps, base, work);
                lacks_keys = false;
            }
            place = place.next();
        }
    }
    if (lacks_keys) {  // nobody needs them, but the phases go on
        barrier_wait(barriers.empty_keys(), of.count % 2 ^ 1);
        barrier_arrive(barriers.k());
        barrier_arrive(barriers.v());
    }
    if (Row::block_mask && acts<Row>()) {  // the visit that is none
        barrier_wait(barriers.empty_q(place.stage()), place.phase() ^ 1);
        barrier_arrive(barriers.full_q(place.stage()));
    }
}

// By one thread, or a warp under a block mask.
template <class Row>
__device__ __forceinline__ void load_tiles(const catalog_args& args, const BackwardMaps& maps, std::uint32_t base,
                                           const Sections& sections) {
    RingCount<BackwardTile<Row>::stages> place;
    load_each_work<Row, 0>(base, [&](const auto& count) {
        load_work<Row>(args, maps, base, WorkPlace<Row>(base, count.load()), place);
        if constexpr (BackwardTile<Row>::persistent) WorkPlace<Row>(base, count.load() + 1).find_next(args, sections);
    });
}

// By one thread: adds what the warpgroups stage of a tile to dQ in device memory. Calls beside() while that is on its way.
template <class Row, class Beside>
__device__ __forceinline__ void add_tile(const catalog_args& args, const BackwardMaps& maps, std::uint32_t base,
                                         const WorkInMemory& work, int tile,
                                         RingCount<BackwardTile<Row>::dq_stages>& place, const Beside& beside) {
    using Tile = BackwardTile<Row>;
    const BackwardBarriers<Row> barriers{base + Tile::barriers_at};
    const RaggedRows rows(work.dq_offset() * 4, computed_here(args.dq_acc.stride_seqlen) * 4, work.seqlen_q());
    if constexpr (Row::deterministic) fence_proxy_async_global();
#pragma unroll
    for (int round = 0; round < Tile::dq_rounds; ++round) {
#pragma unroll
        for (int warpgroup = 0; warpgroup < Tile::warpgroups; ++warpgroup) {
            const int staged = Tile::divides_queries ? 0 : warpgroup * Tile::dq_panels;
            const int first_panel = staged * Tile::dq_rounds + round * Tile::dq_panels;
            const int first_row = Tile::divides_queries ? warpgroup * 64 : 0;
            barrier_wait(barriers.full_dq(warpgroup, place.stage()), place.phase());
            if constexpr (!Row::deterministic) fence_proxy_async();
#pragma unroll
            for (int panel = 0; panel < Tile::dq_panels; ++panel)
                tma_reduce_add(&maps.dq_acc,
                               base + Tile::dq_at + place.stage() * Tile::dq_bytes +
                                   (staged + panel) * Tile::query_panel + first_row * panel_row_bytes,
                               slice_of<Row>() * Tile::hdim_q + (first_panel + panel) * 32,
                               rows.first_row + tile * Tile::m + first_row, rows.low, rows.high, RaggedRows::wrap);
            bulk_commit();
        }
        if (round + 1 == Tile::dq_rounds) beside();
        bulk_wait_read<1>();
        barrier_arrive(barriers.empty_dq(0, place.stage()));
        bulk_wait_read<0>();
        barrier_arrive(barriers.empty_dq(1, place.stage()));
        place = place.next();
    }
}

// By one thread, or a warp under a block mask: adds dQ of all tiles of a work, in the block's turn where results must be
// the same bits every time.
template <class Row>
__device__ __forceinline__ void add_work(const catalog_args& args, const BackwardMaps& maps, std::uint32_t base,
                                         const Sections& sections, const WorkInMemory& work,
                                         RingCount<BackwardTile<Row>::dq_stages>& place) {
    using Tile = BackwardTile<Row>;
    if (!Tile::persistent && acts<Row>()) load_v<Row>(args, maps, base, work);
    ClearAhead<Row>{args, sections, work}.wait();
    for (int head = 0; head < work.heads(); ++head) {
        TileWalk<Row> walk(args, work, head);
        const Turns<Row> turns{args, work, head};
        if constexpr (Row::deterministic)
            if ((!Row::block_mask || walk.first() < work.end()) && acts<Row>()) turns.wait(work.tile<Row>(walk.first()));
        for (int tile = walk.first(), next; tile < work.end(); tile = next) {
            const auto pass_late = [&] {
                if (!Tile::passes_late || tile == walk.first()) return;
                bulk_wait<Tile::warpgroups>();  // the additions to this tile
                turns.pass(work.tile<Row>(tile - 1));
            };
            if (acts<Row>()) add_tile<Row>(args, maps, base, work, work.tile<Row>(tile), place, pass_late);
            next = walk.after(tile);
            if (Row::deterministic && acts<Row>()) {
                // Asked while this tile is on its way to memory: mostly the next turn has come by then.
                const bool more = next < work.end();
                const bool waits = more && (Row::block_mask || !turns.has_come(work.tile<Row>(next)));
                if (!Tile::passes_late || !more) {
                    bulk_wait<0>();
                    turns.pass(work.tile<Row>(tile));
                }
                if (waits) turns.wait(work.tile<Row>(next));
            }
        }
        if (acts<Row>()) work.next_head<Row>(args);
    }
}

// By one thread, or a warp under a block mask.
template <class Row>
__device__ __forceinline__ void add_dq(const catalog_args& args, const BackwardMaps& maps, std::uint32_t base,
                                       const Sections& sections) {
    RingCount<BackwardTile<Row>::dq_stages> place;
    load_each_work<Row, 1>(base, [&](const auto& count) {
        add_work<Row>(args, maps, base, sections, WorkPlace<Row>(base, count.load()).work(), place);
    });
}

// By a warp: a number for each query of a work. That which loads delta also clears dQ.
template <class Row, bool of_lse, class Place>
__device__ __forceinline__ void load_rows_of_work(const catalog_args& args, std::uint32_t base, const Sections& sections,
                                                  const WorkInMemory& work, Place& place) {
    using Tile = BackwardTile<Row>;
    const ClearAhead<Row> ahead{args, sections, work};
    const BackwardBarriers<Row> barriers{base + Tile::barriers_at};
    const int lane = threadIdx.x % 32;
    const catalog_tensor& tensor = of_lse ? args.lse : args.delta;
    for (int of_group = 0; of_group < work.heads(); ++of_group) {
        const auto head = [&] { return work.head_k() * work.heads() + of_group; };
        float slope = 0;
        if constexpr (of_lse && shifts_lse<Row>) slope = slope_of(args, work.index(), head());
        TileWalk<Row> walk(args, work, of_group);
        for (int tile = walk.first(); tile < work.end(); tile = walk.after(tile)) {
            const int first = work.tile<Row>(tile) * Tile::m + lane, rest = work.seqlen_q() - first;
            const float* row = static_cast<const float*>(tensor.data) +
                               offset_of(tensor, work.batch(), head(), work.first_q() + first);
            float number[(Tile::m + 31) / 32];
#pragma unroll
            for (int i = 0; i < Tile::m; i += 32, row += 32 * tensor.stride_seqlen) {
                float& x = number[i / 32];
                x = of_lse ? infinity() : 0.0f;
                if (i >= rest) continue;
                x = __ldg(row);
                x = of_lse ? lse_of_weights<Row>(x, slope, first + i + work.diagonal()) : delta_of_weights<Row>(args, x);
            }
            barrier_wait(of_lse ? barriers.empty_q(place.stage()) : barriers.empty_grad_o(place.stage()), place.phase() ^ 1);
            const std::uint32_t target = base + (of_lse ? Tile::lse_at : Tile::delta_at) +
                                         place.stage() * Tile::row_bytes + lane * 4;
#pragma unroll
            for (int i = 0; i < Tile::m; i += 32)
                if (i + lane < Tile::m) store_number(target + i * 4, number[i / 32]);
            if constexpr (Row::block_mask && of_lse)
                if (lane == 0) Visit{tile, of_group, walk.halves()}.store(Tile::visit_at(base, place.stage()));
            barrier_arrive(of_lse ? barriers.full_q(place.stage()) : barriers.full_grad_o(place.stage()));
            place = place.next();
            if constexpr (!of_lse) ahead.clear(of_group, tile - work.begin());
        }
        if constexpr (!of_lse) ahead.clear_rest(of_group, work.end() - work.begin());
    }
    if constexpr (!of_lse) ahead.pass();
    if constexpr (Row::block_mask && of_lse) {
        barrier_wait(barriers.empty_q(place.stage()), place.phase() ^ 1);
        if (lane == 0) Visit{-1, 0, 0}.store(Tile::visit_at(base, place.stage()));
        barrier_arrive(barriers.full_q(place.stage()));
    }
}

// By a warp.
template <class Row, bool of_lse>
__device__ __forceinline__ void load_rows(const catalog_args& args, std::uint32_t base, const Sections& sections) {
    using Tile = BackwardTile<Row>;
    RingCount<of_lse ? Tile::stages : Tile::grad_o_stages> place;
    for_each_work<Row>(
        base,
        [&](const WorkInMemory& work) { load_rows_of_work<Row, of_lse>(args, base, sections, work, place); });
}

}  // namespace catalog::cuda
