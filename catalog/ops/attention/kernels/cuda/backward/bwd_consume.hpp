// The main stage of backward for head dims up to 128: each warpgroup owns 64 keys. As scores are transposed, weights
// and their gradients are, as they leave the arithmetic, the left operands of dV and dK in registers.
//
// dS goes through shared memory to dQ, dQ from there by additions of TMA to device memory. dQ is staged beside the
// products of dK, which read the least of shared memory: those of scores leave it no time for anything else.
#pragma once

#include "bwd_warpgroup.hpp"

namespace catalog::cuda {

template <class Row>
class BackwardConsumer : BackwardWarpgroup<Row> {
    using Base = BackwardWarpgroup<Row>;
    using typename Base::T;
    using typename Base::Tile;
    using Base::all_consumers, Base::args, Base::barriers, Base::base, Base::lane, Base::m, Base::maps, Base::row_step;
    using Base::warp, Base::warpgroup, Base::work;

   public:
    using Base::Base;

    __device__ __forceinline__ void run() {
        RingPlace<Tile::stages> place;  // of the next tile: the ring goes on from work to work
        int visits = 0;                 // of tiles of all works
        if constexpr (!Tile::persistent) {
            multiply(0, place, visits);
        } else {
            // The count is in the work too: no register keeps it while tiles are multiplied.
            for (unsigned count = 0; WorkPlace<Row>(base, count).wait();) {
                work = WorkPlace<Row>(base, count).work();
                multiply(count, place, visits);
                count = work.count();
                barrier_arrive(WorkPlace<Row>(base, count).empty());
                ++count;
            }
        }
        if (Base::leads()) bulk_wait_read<0>();
    }

   private:
    // Whether a tile of the work was visited before this turn, of `visited` ones of all works.
    __device__ __forceinline__ bool follows(int head, int turn, int visited) const {
        return Tile::persistent ? head > 0 || turn > work.begin() : visited > 0;
    }

    // Enough of the number of visits before the one at a place to tell the stages and phases of dS and dQ. A ring of two
    // stages tells it, so no register need count.
    static __device__ __forceinline__ int visited(RingPlace<Tile::stages> place, int visits) {
        constexpr bool ring_tells = Tile::stages == 2 && (Tile::persistent || (Row::block_mask && !Tile::lags));
        return ring_tells ? 4 + 2 * static_cast<int>(place.phase) + place.stage : visits;
    }

    // A work, which comes after `count` others, from its first tile to dK and dV.
    __device__ __forceinline__ void multiply(unsigned count, RingPlace<Tile::stages>& place, int& visits) {
        float dk[Tile::hdim_q / 2], dv[Tile::hdim_v / 2];
        Base::clear(dk);
        Base::clear(dv);
        const int heads = work.heads();
        const bool has_tiles = work.end() > work.begin();
        if (Tile::persistent || has_tiles) barrier_wait(barriers.k(), count % 2);
        if (has_tiles) {
            float s[m / 2];
            int head = 0, turn = work.begin();
            if constexpr (!Tile::lags) {
                start_scores(place, true, s);
                wgmma_wait<0>();
                pin(s);
            }
            barrier_wait(barriers.v(), count % 2);
            if constexpr (Row::block_mask) {
                for (;; place = place.next(), ++visits) {
                    if constexpr (Tile::lags) barrier_wait(barriers.full_q(place.stage), place.phase);
                    const Visit next = Base::visit_of(place.stage);
                    if (next.tile < 0) break;
                    visit(next.head, next.tile, visits, true, place, s, dk, dv);
                }
            }
            while (!Row::block_mask && head < heads) {
                const bool last = turn + 1 == work.end();
                visit(head, turn, visits, !last || head + 1 < heads, place, s, dk, dv);
                place = place.next();
                ++visits;
                turn = last ? work.begin() : turn + 1;
                head += last;
            }
            if (Tile::lags && (!Row::block_mask || visits > 0)) {
                const int of = visited(place, visits) - 1;
                float dq[Tile::dq_columns / 2];
                start_dq(of, true, dq);
                wgmma_wait<0>();
                pin(dq);
                if constexpr (Tile::persistent) Base::release(barriers.empty_ds(of % 2));
                hand_over(of, dq);
            }
            named_barrier_sync(all_consumers, Tile::consumers);  // dS is read by all warpgroups
        } else if constexpr (Tile::persistent) {
            barrier_wait(barriers.v(), count % 2);
        }
        if constexpr (Tile::persistent) Base::release(barriers.empty_keys());
        store_gradients(dk, dv, visited(place, visits));
        if constexpr (Row::store_randval)
            if (args.randval.data) Base::store_random_bytes(static_cast<int>(threadIdx.x) - 128, Tile::consumers);
    }

    // dV and dK, through the warpgroup's part of the memory of dS and, where that is too small, of the dQ that was handed
    // over last: the next K and V may be on their way. They are read from there beside the next work's first products.
    __device__ __forceinline__ void store_gradients(const float (&dk)[Tile::hdim_q / 2],
                                                    const float (&dv)[Tile::hdim_v / 2], int visited) const {
        constexpr int panel_bytes = 64 * panel_row_bytes, panels_of_buffer = Tile::query_panel / panel_bytes;
        constexpr int panels_v = Tile::hdim_v / panel_columns, panels = panels_v + Tile::hdim_q / panel_columns;
        constexpr int panels_of_dq = Tile::divides_queries ? 0 : Tile::dq_panels * panels_of_buffer;
        static_assert(panels <= 2 * panels_of_buffer + panels_of_dq);
        const int last_stage = (visited + Tile::dq_stages - 1) % Tile::dq_stages;
        if (work.begin() == work.end()) wait_for_stores();
        if (panels > 2 * panels_of_buffer && visited > 0)
            barrier_wait(barriers.empty_dq(warpgroup, last_stage), (visited - 1) / Tile::dq_stages % 2);
        const std::uint32_t ds = base + Tile::ds_at + warpgroup * Tile::query_panel;
        const std::uint32_t dq = base + Tile::dq_at + last_stage * Tile::dq_bytes +
                                 warpgroup * Tile::dq_panels * Tile::query_panel;
        const auto place_of = [&](int panel) {
            const int buffer = panel / panels_of_buffer, panel_of_buffer = panel % panels_of_buffer;
            return (buffer < 2 ? ds + buffer * Tile::ds_bytes : dq + (buffer - 2) * Tile::query_panel) +
                   panel_of_buffer * panel_bytes;
        };
        Base::template store_rows<Tile::hdim_v>(dv, Base::final_scale_v(), place_of, warpgroup * 64, 0, &maps.dv,
                                                args.dv);
        Base::template store_rows<Tile::hdim_q>(
            dk, Base::final_scale(), [&](int panel) { return place_of(panels_v + panel); }, warpgroup * 64, 0,
            &maps.dk, args.dk);
    }

    // Until the memory through which the warpgroup stored its last gradients is free.
    __device__ __forceinline__ void wait_for_stores() const {
        if constexpr (!Tile::persistent) return;
        if (Base::leads()) bulk_wait_read<0>();
        named_barrier_sync(Base::own_warpgroup + warpgroup, 128);
    }

    // S^T of a tile, or dP^T: this warpgroup's rows of `keys`, times `queries`.
    template <int hdim>
    __device__ __forceinline__ void multiply_rows(std::uint32_t keys, std::uint32_t queries, float (&d)[m / 2]) const {
        const std::uint64_t a = describe_panel<Major::k>(base + keys + warpgroup * 64 * panel_row_bytes);
        const std::uint64_t b = describe_panel<Major::k>(base + queries);
        forget(d);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < hdim / 16; ++step)
            wgmma<T>(d, advance(a, step / 4 * Tile::key_panel + step % 4 * 32),
                     advance(b, step / 4 * Tile::query_panel + step % 4 * 32), step > 0);
        wgmma_commit();
    }

    // dV or dK += weights^T rows.
    template <int hdim>
    __device__ __forceinline__ void add_to_keys(const std::uint32_t (&weights)[m / 16][4], std::uint32_t rows,
                                                float (&d)[hdim]) const {
        const std::uint64_t b = describe_panel<Major::mn>(base + rows, Tile::query_panel);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < m / 16; ++step)
            wgmma<T, Major::mn>(d, weights[step], advance(b, step * row_step), true);
        wgmma_commit();
    }

    // Without a tile they are multiplied all the same, of what memory holds: then the loop has one shape.
    __device__ __forceinline__ void start_scores(RingPlace<Tile::stages> place, bool there, float (&s)[m / 2]) const {
        if (there) barrier_wait(barriers.full_q(place.stage), place.phase);
        multiply_rows<Tile::hdim_q>(Tile::k_at, Tile::q_at + place.stage * Tile::q_bytes, s);
    }

    // Where dS of the tile visited as number `number` lies; the first is 0.
    static __device__ __forceinline__ std::uint32_t ds_of(int number) {
        return Tile::ds_at + number % 2 * Tile::ds_bytes;
    }

    // Of no tile of this work dQ is multiplied all the same, of what memory holds.
    __device__ __forceinline__ void start_dq(int number, bool there, float (&dq)[Tile::dq_columns / 2]) const {
        const std::uint32_t ds = ds_of(number);
        if (there) barrier_wait(barriers.full_ds(number % 2), number / 2 % 2);
        fence_proxy_async();
        forget(dq);
        wgmma_fence();
        if constexpr (Tile::divides_queries) {
            const std::uint64_t a = describe_panel<Major::k>(base + ds + warpgroup * 64 * panel_row_bytes);
            const std::uint64_t b = describe_panel<Major::mn>(base + Tile::k_at, Tile::key_panel);
#pragma unroll
            for (int step = 0; step < Tile::n / 16; ++step)
                wgmma<T, Major::mn>(dq, advance(a, step / 4 * Tile::query_panel + step % 4 * 32),
                                    advance(b, step * row_step), step > 0);
        } else {
            const std::uint64_t a = describe_panel<Major::mn>(base + Tile::k_at + warpgroup * Tile::key_panel);
            const std::uint64_t b = describe_panel<Major::k>(base + ds);
#pragma unroll
            for (int step = 0; step < Tile::n / 16; ++step)
                wgmma<T, Major::k, Major::mn>(dq, advance(a, step * row_step),
                                              advance(b, step / 4 * Tile::query_panel + step % 4 * 32), step > 0);
        }
        wgmma_commit();
    }

    // The lane. Under a block mask or with a bias, no registers are left to keep what depends on it alone.
    __device__ __forceinline__ int lane_here() const {
        return Row::block_mask || Row::bias == Bias::bias ? computed_here(lane) : lane;
    }

    // As rows of queries: a panel for each warpgroup's keys.
    __device__ __forceinline__ void store_ds(const std::uint32_t (&ds)[m / 16][4], std::uint32_t target) const {
        const int lane = lane_here();
        const std::uint32_t row = lane / 16 * 8 + lane % 8, column = warp * 32 + lane / 8 % 2 * 16;
        const std::uint32_t first = base + target + warpgroup * Tile::query_panel + swizzled(row, column);
#pragma unroll
        for (int step = 0; step < m / 16; ++step)
            store_matrices_transposed(first + step * row_step, ds[step][0], ds[step][1], ds[step][2],
                                      ds[step][3]);
    }

    __device__ __forceinline__ void stage_dq(std::uint32_t memory, const float (&dq)[Tile::dq_columns / 2]) const {
        if constexpr (Tile::divides_queries) {
            Base::template stage_rows<0, Tile::dq_columns / 2>(dq, memory, warpgroup * 64);
        } else {
            const int lane = lane_here();
            const std::uint32_t column = warp % 2 * 64 + lane / 4 % 2 * 16 + lane / 8 * 4, row = 2 * (lane % 4);
            const std::uint32_t panel = base + memory + (2 * warpgroup + warp / 2) * Tile::query_panel;
            std::uint32_t place[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) place[i] = panel + swizzled(row + i % 2, column + i / 2 * 32);
#pragma unroll
            for (int i = 0; i < Tile::dq_columns / 2; ++i)
                store_number(place[i % 4] + i / 4 * 8 * panel_row_bytes, Base::final_dq(dq[i]));
        }
    }

    __device__ __forceinline__ void hand_over(int number, const float (&dq)[Tile::dq_columns / 2]) const {
        const int stage = number % Tile::dq_stages;
        barrier_wait(barriers.empty_dq(warpgroup, stage), (number / Tile::dq_stages + 1) % 2);
        stage_dq(Tile::dq_at + stage * Tile::dq_bytes, dq);
        Base::release_dq(barriers.full_dq(warpgroup, stage));
    }

    // The tile of a turn, and its head. Under a block mask both are in memory: no register keeps them.
    __device__ __forceinline__ int tile_of(int turn, int stage) const {
        return Row::block_mask ? Base::visit_of(stage).tile : work.template tile<Row>(turn);
    }
    __device__ __forceinline__ int head_of(int head, int stage) const {
        return Row::block_mask ? Base::visit_of(stage).head : head;
    }

    // The tile of a turn. Unless dQ lags its scores are there, and those of the next one are left.
    __device__ __forceinline__ void visit(int head, int turn, int visits, bool more, RingPlace<Tile::stages> place,
                                          float (&s)[m / 2], float (&dk)[Tile::hdim_q / 2],
                                          float (&dv)[Tile::hdim_v / 2]) const {
        const int stage = place.stage, visited = this->visited(place, visits);
        const std::uint32_t grad_o = Tile::grad_o_at + stage * Tile::grad_o_bytes;
        std::uint32_t weights[m / 16][4], ds[m / 16][4];
        {
            float dp[m / 2];
            if constexpr (Tile::lags) start_scores(place, true, s);
            barrier_wait(barriers.full_grad_o(stage), place.phase);
            multiply_rows<Tile::hdim_v>(Tile::v_at, grad_o, dp);
            if constexpr (Tile::lags) {
                wgmma_wait<1>();
                pin(s);
            }
            if constexpr (Tile::early_dv) {
                Base::template weigh_and_pack<m>(head_of(head, stage), tile_of(turn, stage), 0, stage, s, weights);
                add_to_keys(weights, grad_o, dv);
                wgmma_wait<1>();
            } else {
                static_assert(!Row::logits, "a soft cap takes the weights as soon as they are there");
                Base::template weigh<m>(head_of(head, stage), tile_of(turn, stage), 0, stage, s);
                wgmma_wait<0>();
            }
            pin(dp);
            Base::template differentiate<!Tile::early_dv, m>(head_of(head, stage), tile_of(turn, stage), 0, stage, s, dp,
                                                             weights, ds);
            if constexpr (!Tile::early_dv) add_to_keys(weights, grad_o, dv);
        }
        if constexpr (Tile::lags) barrier_wait(barriers.empty_ds(visited % 2), (visited / 2 + 1) % 2);
        const bool follows = this->follows(head, turn, visited);
        if (Tile::persistent && !follows) wait_for_stores();
        store_ds(ds, ds_of(visited));
        Base::release(barriers.full_ds(visited % 2));
        float dq[Tile::dq_columns / 2];
        const int of = visited - Tile::lags;  // whose dQ it is
        start_dq(of, !Tile::lags || follows, dq);
        add_to_keys(ds, Tile::q_at + stage * Tile::q_bytes, dk);
        wgmma_wait<2>();
        pin(dv);
        barrier_arrive(barriers.empty_grad_o(stage));
        wgmma_wait<1>();
        pin(dq);
        if (!Tile::lags || follows) {
            if constexpr (Tile::lags) Base::release(barriers.empty_ds(of % 2));
            hand_over(of, dq);
        }
        if constexpr (Tile::lags) {
            wgmma_wait<0>();
            pin(dk);
            barrier_arrive(barriers.empty_q(stage));
        } else {
            start_scores(place.next(), more, s);
            wgmma_wait<1>();
            pin(dk);
            barrier_arrive(barriers.empty_q(stage));
            wgmma_wait<0>();  // the compiler leaves no product in flight around a loop
            pin(s);
        }
    }
};

}  // namespace catalog::cuda
