// The main stage of backward for head dims over 128: both warpgroups own all 64 keys of the block, and each half of the
// columns of dK, dV and dQ. Of the scores each computes those of half of the queries; weights and their gradients reach
// the other one through shared memory.
#pragma once

#include "bwd_warpgroup.hpp"

namespace catalog::cuda {

template <class Row>
class WideBackwardConsumer : BackwardWarpgroup<Row> {
    using Base = BackwardWarpgroup<Row>;
    using typename Base::T;
    using typename Base::Tile;
    using Base::all_consumers, Base::args, Base::barriers, Base::base, Base::lane, Base::m, Base::maps, Base::row_step;
    using Base::warp, Base::warpgroup, Base::work;
    static_assert(Tile::dq_stages == 1, "rounds of one tile take turns at its only place");
    static constexpr int columns = m / Tile::warpgroups;  // queries of a warpgroup's scores
    static constexpr std::uint32_t other_buffer = Tile::ds_buffers > 1 ? Tile::ds_at ^ (Tile::ds_at + Tile::ds_bytes) : 0;
    static constexpr int panels_q = Tile::hdim_q / panel_columns / 2, panels_v = Tile::hdim_v / panel_columns / 2;

   public:
    using Base::Base;

    __device__ __forceinline__ void run() {
        float dk[panels_q * 32], dv[panels_v * 32];
        Base::clear(dk);
        Base::clear(dv);
        const int heads = work.heads();
        if (work.end() > work.begin()) {
            float s[columns / 2];
            RingPlace<Tile::stages> place;
            RingPlace<Tile::grad_o_stages> grad_o_place;
            int head = 0, turn = work.begin();
            std::uint32_t weights = Tile::ds_at;
            barrier_wait(barriers.k(), 0);
            start_scores(place, true, s);
            wgmma_wait<0>();
            pin(s);
            barrier_wait(barriers.v(), 0);
            if constexpr (Row::block_mask) {
                for (Visit next; (next = Base::visit_of(place.stage)).tile >= 0;) {
                    visit(next.head, next.tile, weights, true, place, grad_o_place, s, dk, dv);
                    place = place.next();
                    grad_o_place = grad_o_place.next();
                    weights ^= other_buffer;
                }
            }
            while (!Row::block_mask && head < heads) {
                const bool last = turn + 1 == work.end();
                visit(head, work.template tile<Row>(turn), weights, !last || head + 1 < heads, place, grad_o_place, s, dk,
                      dv);
                place = place.next();
                grad_o_place = grad_o_place.next();
                weights ^= other_buffer;
                turn = last ? work.begin() : turn + 1;
                head += last;
            }
            named_barrier_sync(all_consumers, Tile::consumers);  // K and V are read by both
        }
        const std::uint32_t dv_at = base + Tile::v_at + warpgroup * panels_v * Tile::key_panel;
        const std::uint32_t dk_at = base + Tile::k_at + warpgroup * panels_q * Tile::key_panel;
        Base::template store_rows<Tile::hdim_v>(
            dv, Base::final_scale_v(), [&](int panel) { return dv_at + panel * Tile::key_panel; }, 0,
            warpgroup * panels_v, &maps.dv, args.dv);
        Base::template store_rows<Tile::hdim_q>(
            dk, Base::final_scale(), [&](int panel) { return dk_at + panel * Tile::key_panel; }, 0,
            warpgroup * panels_q, &maps.dk, args.dk);
        Base::finish_stores();
        if constexpr (Row::store_randval)
            if (args.randval.data && slice_of<Row>() == 0)
                Base::store_random_bytes(static_cast<int>(threadIdx.x) - 128, Tile::consumers);
    }

   private:
    // S^T of this warpgroup's queries, or dP^T.
    template <int hdim>
    __device__ __forceinline__ void multiply_rows(std::uint32_t keys, std::uint32_t queries,
                                                  float (&d)[columns / 2]) const {
        const std::uint64_t a = describe_panel<Major::k>(base + keys);
        const std::uint64_t b = describe_panel<Major::k>(base + queries + warpgroup * columns * panel_row_bytes);
        forget(d);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < hdim / 16; ++step)
            wgmma<T>(d, advance(a, step / 4 * Tile::key_panel + step % 4 * 32),
                     advance(b, step / 4 * Tile::query_panel + step % 4 * 32), step > 0);
        wgmma_commit();
    }

    // Without a tile they are multiplied all the same, of what memory holds: then the loop has one shape.
    __device__ __forceinline__ void start_scores(RingPlace<Tile::stages> place, bool there,
                                                 float (&s)[columns / 2]) const {
        if (there) barrier_wait(barriers.full_q(place.stage), place.phase);
        multiply_rows<Tile::hdim_q>(Tile::k_at, Tile::q_at + place.stage * Tile::q_bytes, s);
    }

    // dV or dK += weights^T rows, in this warpgroup's panels.
    template <int panels>
    __device__ __forceinline__ void add_to_keys(std::uint32_t weights, std::uint32_t rows,
                                                float (&d)[panels * 32]) const {
        const std::uint64_t a = describe_panel<Major::k>(base + weights);
        const std::uint64_t b = describe_panel<Major::mn>(base + rows + warpgroup * panels * Tile::query_panel,
                                                          Tile::query_panel);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < m / 16; ++step)
            wgmma<T, Major::mn>(d, advance(a, step * 32), advance(b, step * row_step), true);
        wgmma_commit();
    }

    // What both warpgroups have stored is there for all products.
    __device__ __forceinline__ void meet() const {
        named_barrier_sync(all_consumers, Tile::consumers);
        fence_proxy_async();
    }

    __device__ __forceinline__ void add_values(std::uint32_t weights, std::uint32_t grad_o,
                                               float (&dv)[panels_v * 32]) const {
        meet();
        add_to_keys<panels_v>(weights, grad_o, dv);
    }

    __device__ __forceinline__ void start_dq(std::uint32_t ds, float (&dq)[panels_q * 32]) const {
        const std::uint64_t a = describe_panel<Major::mn>(base + ds);
        const std::uint64_t b =
            describe_panel<Major::mn>(base + Tile::k_at + warpgroup * panels_q * Tile::key_panel, Tile::key_panel);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Tile::n / 16; ++step)
            wgmma<T, Major::mn, Major::mn>(dq, advance(a, step * row_step), advance(b, step * row_step), step > 0);
        wgmma_commit();
    }

    // As rows of keys.
    __device__ __forceinline__ void store_weights(const std::uint32_t (&weights)[columns / 16][4],
                                                  std::uint32_t target) const {
        const std::uint32_t row = warp * 16 + lane % 16, column = warpgroup * columns * 2 + lane / 16 * 16;
#pragma unroll
        for (int step = 0; step < columns / 16; ++step)
            store_matrices(base + target + swizzled(row, column + step * 32), weights[step][0], weights[step][1],
                           weights[step][2], weights[step][3]);
    }

    template <int round>
    __device__ __forceinline__ void hand_over(const float (&dq)[panels_q * 32]) const {
        constexpr int count = panels_q * 16;
        barrier_wait(barriers.empty_dq(warpgroup, 0), (round + 1) % 2);
        Base::template stage_rows<round * count, (round + 1) * count>(
            dq, Tile::dq_at + warpgroup * Tile::dq_panels * Tile::query_panel, 0);
        Base::release_dq(barriers.full_dq(warpgroup, 0));
    }

    // One tile, whose scores are there; leaves those of the next one.
    __device__ __forceinline__ void visit(int head, int tile, std::uint32_t memory, bool more,
                                          RingPlace<Tile::stages> place, RingPlace<Tile::grad_o_stages> grad_o_place,
                                          float (&s)[columns / 2], float (&dk)[panels_q * 32],
                                          float (&dv)[panels_v * 32]) const {
        const std::uint32_t q = Tile::q_at + place.stage * Tile::q_bytes;
        const std::uint32_t grad_o = Tile::grad_o_at + grad_o_place.stage * Tile::grad_o_bytes;
        const std::uint32_t ds_memory = memory + Tile::key_panel;
        const int first_column = warpgroup * columns;
        {
            float dp[columns / 2];
            std::uint32_t weights[columns / 16][4], ds[columns / 16][4];
            const SliceExchange<Row> exchange(base, warpgroup);
            if constexpr (Tile::slices > 1) exchange.template send<exchange.scores>(s);
            barrier_wait(barriers.full_grad_o(grad_o_place.stage), grad_o_place.phase);
            multiply_rows<Tile::hdim_v>(Tile::v_at, grad_o, dp);
            if constexpr (Tile::slices > 1) exchange.template add<exchange.scores>(s);
            Base::template weigh_and_pack<columns>(head, tile, first_column, place.stage, s, weights);
            // From the only buffer, both warpgroups have read what they had stored for the tile before.
            if constexpr (Tile::ds_buffers == 1) named_barrier_sync(all_consumers, Tile::consumers);
            store_weights(weights, memory);
            wgmma_wait<0>();
            pin(dp);
            if constexpr (Tile::slices > 1) {
                exchange.template send<exchange.grad_weights>(dp);
                add_values(memory, grad_o, dv);  // while the other block's sums come
                exchange.template add<exchange.grad_weights>(dp);
            }
            Base::template differentiate<false, columns>(head, tile, first_column, grad_o_place.stage, s, dp, weights,
                                                         ds);
            store_weights(ds, ds_memory);
        }
        if constexpr (Tile::slices > 1)
            meet();
        else
            add_values(memory, grad_o, dv);
        float dq[panels_q * 32];
        start_dq(ds_memory, dq);
        add_to_keys<panels_q>(ds_memory, q, dk);
        wgmma_wait<2>();
        pin(dv);
        barrier_arrive(barriers.empty_grad_o(grad_o_place.stage));
        wgmma_wait<1>();
        pin(dq);
        // Staging is cheaper beside dK than beside scores. A turn may be long in coming: then scores go first, unless too few
        // registers are left for that.
        constexpr bool lacks_registers = Row::block_mask || Tile::slices > 1 || Row::bias == Bias::alibi || Row::dropout;
        constexpr bool early_dq = !Row::deterministic || lacks_registers;
        if constexpr (early_dq) hand_over<0>(dq);
        start_scores(place.next(), more, s);
        wgmma_wait<1>();
        pin(dk);
        barrier_arrive(barriers.empty_q(place.stage));
        if constexpr (!early_dq) hand_over<0>(dq);
        hand_over<1>(dq);
        wgmma_wait<0>();  // the compiler leaves no product in flight around a loop
        pin(s);
    }
};

}  // namespace catalog::cuda
