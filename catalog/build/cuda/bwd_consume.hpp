// The main stage of backward: the warpgroups that multiply. Scores are transposed, keys by queries: so weights and their
// gradients are, as they leave the arithmetic, the left operands of dV and dK in registers.
//
// With P = exp(S - LSE), dV = P^T dO, dP = dO V^T, dS = P * (dP - delta), dK = scale dS^T Q and dQ = scale dS K. dS goes
// through shared memory to dQ, dQ from there by additions of TMA to device memory. While one tile's dQ is multiplied
// the next tile's scores are started.
#pragma once

#include "bwd_load.hpp"

namespace catalog::cuda {

template <class Row>
class BackwardConsumer {
    using Tile = BackwardTile<Row>;
    using T = typename Row::dtype;
    static constexpr int m = Tile::m, queries_step = 16 * panel_row_bytes;  // 16 queries, or keys, of a panel
    static constexpr int all_consumers = 1, own_warpgroup = 2;              // names of barriers

   public:
    __device__ __forceinline__ BackwardConsumer(const catalog_args& args, const BackwardMaps& maps,
                                                std::uint32_t base)
        : args(args),
          maps(maps),
          base(base),
          work{base + Tile::work_at},
          barriers{base + Tile::barriers_at},
          warpgroup(__shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128 - 1, 0)),
          warp(threadIdx.x / 32 % 4),
          lane(threadIdx.x % 32) {}

    __device__ __forceinline__ void run() {
        float dk[Tile::hdim_q / 2], dv[Tile::hdim_v / 2];
        clear(dk);
        clear(dv);
        const int heads = heads_per_key_head(args);
        if (work.end() > work.begin()) {
            float s[m / 2];
            RingPlace<Tile::stages> place;
            int head = 0, tile = work.begin();
            std::uint32_t ds = Tile::ds_at;
            barrier_wait(barriers.k(), 0);
            start_scores(place, true, s);
            wgmma_wait<0>();
            pin(s);
            barrier_wait(barriers.v(), 0);
            while (head < heads) {
                const bool last = tile + 1 == work.end();
                visit(head, tile, ds, !last || head + 1 < heads, place, s, dk, dv);
                place = place.next();
                ds ^= Tile::ds_at ^ (Tile::ds_at + Tile::ds_bytes);
                tile = last ? work.begin() : tile + 1;
                head += last;
            }
            named_barrier_sync(all_consumers, Tile::consumers);  // K is read by all warpgroups
        }
        store_keys(dk, dv);
    }

   private:
    template <int count>
    static __device__ __forceinline__ void clear(float (&registers)[count]) {
#pragma unroll
        for (int i = 0; i < count; ++i) registers[i] = 0;
    }

    __device__ __forceinline__ bool leads() const { return threadIdx.x % 128 == 0; }

    // S^T of a tile, or dP^T: this warpgroup's rows of `keys`, times `queries`.
    template <int hdim>
    __device__ __forceinline__ void multiply_rows(std::uint32_t keys, std::uint32_t queries, float (&d)[m / 2]) const {
        const std::uint64_t a = describe_panel<Major::k>(base + keys + warpgroup * 64 * panel_row_bytes);
        const std::uint64_t b = describe_panel<Major::k>(base + queries);
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
            wgmma<T, Major::mn>(d, weights[step], advance(b, step * queries_step), true);
        wgmma_commit();
    }

    // Without a tile they are multiplied all the same, of what memory holds: then the loop has one shape.
    __device__ __forceinline__ void start_scores(RingPlace<Tile::stages> place, bool there, float (&s)[m / 2]) const {
        if (there) barrier_wait(barriers.full_q(place.stage), place.phase);
        multiply_rows<Tile::hdim_q>(Tile::k_at, Tile::q_at + place.stage * Tile::q_bytes, s);
    }

    __device__ __forceinline__ void start_dq(std::uint32_t ds, float (&dq)[Tile::dq_columns / 2]) const {
        wgmma_fence();
        if constexpr (Tile::transposes_dq) {
            const std::uint64_t a = describe_panel<Major::mn>(base + Tile::k_at + warpgroup * Tile::key_panel);
            const std::uint64_t b = describe_panel<Major::k>(base + ds);
#pragma unroll
            for (int step = 0; step < Tile::n / 16; ++step)
                wgmma<T, Major::k, Major::mn>(dq, advance(a, step * queries_step),
                                              advance(b, step / 4 * Tile::query_panel + step % 4 * 32), step > 0);
        } else {
            const int row = Tile::divides_queries ? warpgroup * 64 : 0, panel = Tile::divides_queries ? 0 : warpgroup;
            const std::uint64_t a = describe_panel<Major::k>(base + ds + row * panel_row_bytes);
            const std::uint64_t b =
                describe_panel<Major::mn>(base + Tile::k_at + panel * Tile::key_panel, Tile::key_panel);
#pragma unroll
            for (int step = 0; step < Tile::n / 16; ++step)
                wgmma<T, Major::mn>(dq, advance(a, step / 4 * Tile::query_panel + step % 4 * 32),
                                    advance(b, step * queries_step), step > 0);
        }
        wgmma_commit();
    }

    __device__ __forceinline__ int first_key() const { return blockIdx.x * Tile::n; }

    // P^T from S^T. `head` counts from the group's first.
    __device__ __forceinline__ void weigh(int head, int first_query, int stage, float (&s)[m / 2]) const {
        const float scale = args.scale * log2_e;
        const int column = 2 * (lane % 4);
        const std::uint32_t lse = base + Tile::lse_at + stage * Tile::row_bytes + column * 4;
        [[maybe_unused]] float slope = 0, distance = 0;
        if constexpr (Row::bias == Bias::alibi) {
            slope = slope_of(args, blockIdx.z, blockIdx.y * heads_per_key_head(args) + head) * log2_e;
            distance = static_cast<float>(first_distance(first_query));
        }
#pragma unroll
        for (int j = 0; j < m / 8; ++j) {
            const float2 of_rows = load_pair(lse + 32 * j);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float x = fmaf(s[4 * j + i], scale, i % 2 ? -of_rows.y : -of_rows.x);
                if constexpr (Row::bias == Bias::alibi) {
                    const float d = distance + static_cast<float>(i / 2 * 8 - (8 * j + i % 2));
                    x = fmaf(Row::mask == Mask::causal ? d : -fabsf(d), slope, x);
                }
                s[4 * j + i] = exp2_approximate(x);
            }
        }
        if (!all_visible(first_query)) hide(first_query, s);
    }

    // Key - query - diagonal of this thread's first element.
    __device__ __forceinline__ int first_distance(int first_query) const {
        const int key = first_key() + warpgroup * 64 + warp * 16 + lane / 4;
        return key - work.diagonal() - first_query - 2 * (lane % 4);
    }

    // Whether every query of a tile sees every key of the block; queries behind the last one do not count.
    __device__ __forceinline__ bool all_visible(int first_query) const {
        bool all = first_key() + Tile::n <= work.seqlen_k();
        if constexpr (Row::mask != Mask::none)
            all &= first_key() + Tile::n - 1 - first_query - work.diagonal() <= work.right();
        if constexpr (Row::mask == Mask::generic)
            all &= first_key() - (first_query + m - 1) - work.diagonal() >= -work.left();
        return all;
    }

    // The query i of a thread's columns sees the key from `least` on, up to `most`.
    __device__ __forceinline__ void hide(int first_query, float (&p)[m / 2]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int key = first_key() + warpgroup * 64 + warp * 16 + lane / 4 + 8 * half;
            const int distance = first_distance(first_query) + 8 * half;
            const int least = key < work.seqlen_k() ? distance - work.right() : m, most = distance + work.left();
#pragma unroll
            for (int j = 0; j < m / 8; ++j) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const bool left_hides = Row::mask == Mask::generic && 8 * j + i > most;
                    if (8 * j + i < least || left_hides) p[4 * j + 2 * half + i] = 0;
                }
            }
        }
    }

    // dS^T from P^T and dP^T, packed; what was packed needs no more registers.
    __device__ __forceinline__ void differentiate(int stage, const float (&p)[m / 2], const float (&dp)[m / 2],
                                                  std::uint32_t (&weights)[m / 16][4],
                                                  std::uint32_t (&ds)[m / 16][4]) const {
        const std::uint32_t delta = base + Tile::delta_at + stage * Tile::row_bytes + lane % 4 * 8;
        const float scale = Tile::scales_ds ? args.scale : 1.0f;
#pragma unroll
        for (int j = 0; j < m / 8; ++j) {
            const float2 of_rows = load_pair(delta + 32 * j);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = 4 * j + 2 * half;
                ds[j / 2][j % 2 * 2 + half] = pack<T>(p[i] * fmaf(dp[i], scale, -of_rows.x),
                                                      p[i + 1] * fmaf(dp[i + 1], scale, -of_rows.y));
                if constexpr (!Tile::early_dv) weights[j / 2][j % 2 * 2 + half] = pack<T>(p[i], p[i + 1]);
            }
        }
    }

    static __device__ __forceinline__ void pack_weights(const float (&p)[m / 2], std::uint32_t (&weights)[m / 16][4]) {
#pragma unroll
        for (int i = 0; i < m / 4; ++i) weights[i / 4][i % 4] = pack<T>(p[2 * i], p[2 * i + 1]);
    }

    // As rows of queries: a panel for each warpgroup's keys.
    __device__ __forceinline__ void store_ds(const std::uint32_t (&ds)[m / 16][4], std::uint32_t target) const {
        const std::uint32_t row = lane / 16 * 8 + lane % 8, column = warp * 32 + lane / 8 % 2 * 16;
        const std::uint32_t first = base + target + warpgroup * Tile::query_panel + swizzled(row, column);
#pragma unroll
        for (int step = 0; step < m / 16; ++step)
            store_matrices_transposed(first + step * queries_step, ds[step][0], ds[step][1], ds[step][2],
                                      ds[step][3]);
    }

    __device__ __forceinline__ float final_dq(float sum) const {
        if constexpr (Tile::scales_ds) return sum;
        return sum * args.scale;
    }

    __device__ __forceinline__ void stage_dq(const float (&dq)[Tile::dq_columns / 2]) const {
        if constexpr (Tile::transposes_dq) {
            const std::uint32_t column = warp % 2 * 64 + lane / 4 * 4, row = 2 * (lane % 4);
            const std::uint32_t panel = base + Tile::dq_at + (2 * warpgroup + warp / 2) * Tile::query_panel;
#pragma unroll
            for (int i = 0; i < Tile::dq_columns / 2; ++i)
                store_number(panel + swizzled(row + i / 4 * 8 + i % 2, column + i / 2 % 2 * 32), final_dq(dq[i]));
        } else {
            const std::uint32_t row = (Tile::divides_queries ? warpgroup * 64 : 0) + warp * 16 + lane / 4;
            const std::uint32_t panel =
                base + Tile::dq_at + (Tile::divides_queries ? 0 : warpgroup * 2) * Tile::query_panel;
#pragma unroll
            for (int i = 0; i < Tile::dq_columns / 2; i += 2)
                store_pair(panel + i / 16 * Tile::query_panel +
                               swizzled(row + i / 2 % 2 * 8, i / 4 % 4 * 32 + lane % 4 * 8),
                           final_dq(dq[i]), final_dq(dq[i + 1]));
        }
    }

    __device__ __forceinline__ void release(std::uint32_t barrier) const {
        __syncwarp();
        if (lane == 0) barrier_arrive(barrier);
    }

    // One tile, whose scores are there; leaves those of the next one.
    __device__ __forceinline__ void visit(int head, int tile, std::uint32_t ds_memory, bool more, RingPlace<Tile::stages> place,
                                          float (&s)[m / 2], float (&dk)[Tile::hdim_q / 2],
                                          float (&dv)[Tile::hdim_v / 2]) const {
        const int first_query = tile * m, stage = place.stage;
        const std::uint32_t q = Tile::q_at + stage * Tile::q_bytes;
        const std::uint32_t grad_o = Tile::grad_o_at + stage * Tile::grad_o_bytes;
        std::uint32_t weights[m / 16][4], ds[m / 16][4];
        {
            float dp[m / 2];
            barrier_wait(barriers.full_grad_o(stage), place.phase);
            multiply_rows<Tile::hdim_v>(Tile::v_at, grad_o, dp);
            weigh(head, first_query, stage, s);
            if constexpr (Tile::early_dv) {
                pack_weights(s, weights);
                add_to_keys(weights, grad_o, dv);
                wgmma_wait<1>();
            } else {
                wgmma_wait<0>();
            }
            pin(dp);
            differentiate(stage, s, dp, weights, ds);
            if constexpr (!Tile::early_dv) add_to_keys(weights, grad_o, dv);
            add_to_keys(ds, q, dk);
        }
        store_ds(ds, ds_memory);
        fence_proxy_async();
        named_barrier_sync(all_consumers, Tile::consumers);
        if constexpr (Tile::late_dq) {
            wgmma_wait<1>();
            pin(dv);
        }
        float dq[Tile::dq_columns / 2];
        start_dq(ds_memory, dq);
        wgmma_wait<1>();
        pin(dv);
        pin(dk);
        release(barriers.empty_grad_o(stage));
        release(barriers.empty_q(stage));
        start_scores(place.next(), more, s);
        wgmma_wait<1>();
        pin(dq);
        barrier_wait(barriers.empty_dq(warpgroup), ds_memory == Tile::ds_at);  // 1 for the first tile
        stage_dq(dq);
        fence_proxy_async();
        release(barriers.full_dq(warpgroup));
        wgmma_wait<0>();  // the compiler leaves no product in flight around a loop
        pin(s);
    }

    // dK or dV, through the memory of this warpgroup's rows of K or V.
    template <int count>
    __device__ __forceinline__ void store_rows(const float (&sums)[count], float scale, std::uint32_t target,
                                               const CUtensorMap* map, const catalog_tensor& tensor) const {
        const std::uint32_t row = warpgroup * 64 + warp * 16 + lane % 16, column = lane / 16 * 16;
#pragma unroll
        for (int i = 0; i < count; i += 8) {
            std::uint32_t packed[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) packed[j] = pack<T>(sums[i + 2 * j] * scale, sums[i + 2 * j + 1] * scale);
            store_matrices(base + target + i / 32 * Tile::key_panel + swizzled(row, column + i / 8 % 4 * 32),
                           packed[0], packed[1], packed[2], packed[3]);
        }
        fence_proxy_async();
        named_barrier_sync(own_warpgroup + warpgroup, 128);
        if (!leads()) return;
        const RaggedRows rows = ragged<T>(tensor, work.batch(), blockIdx.y, work.first_k(), work.seqlen_k());
#pragma unroll
        for (int panel = 0; panel < count / 32; ++panel)
            tma_store(map, base + target + panel * Tile::key_panel + warpgroup * 64 * panel_row_bytes,
                      panel * panel_columns, rows.first_row + first_key() + warpgroup * 64, rows.low, rows.high,
                      RaggedRows::wrap);
        bulk_commit();
    }

    __device__ __forceinline__ void store_keys(const float (&dk)[Tile::hdim_q / 2],
                                               const float (&dv)[Tile::hdim_v / 2]) const {
        store_rows(dv, 1.0f, Tile::v_at, &maps.dv, args.dv);
        store_rows(dk, Tile::scales_ds ? 1.0f : args.scale, Tile::k_at, &maps.dk, args.dk);
        if (leads()) bulk_wait_read<0>();
    }

    const catalog_args& args;
    const BackwardMaps& maps;
    const WorkInMemory work;
    const std::uint32_t base;
    const BackwardBarriers<Row> barriers;
    const int warpgroup, warp, lane;
};

}  // namespace catalog::cuda
