// The main stage of backward: what the warpgroups that multiply have in common.
#pragma once

#include "bwd_load.hpp"
#include "bwd_scores.hpp"

namespace catalog::cuda {

template <class Row>
class BackwardWarpgroup : protected BackwardScores<Row> {
    using Scores = BackwardScores<Row>;

   public:
    __device__ __forceinline__ BackwardWarpgroup(const catalog_args& args, const BackwardMaps& maps, std::uint32_t base)
        : Scores(args, base, __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128 - 1, 0), threadIdx.x / 32 % 4),
          maps(maps),
          barriers{base + Tile::barriers_at} {}

   protected:
    using typename Scores::T;
    using typename Scores::Tile;
    using Scores::args, Scores::base, Scores::final_scale, Scores::first_key, Scores::kept_weight, Scores::lane;
    using Scores::m, Scores::warp, Scores::warpgroup, Scores::work;
    static constexpr int row_step = 16 * panel_row_bytes;       // 16 rows of a panel
    static constexpr int all_consumers = 1, own_warpgroup = 2;  // names of barriers

    __device__ __forceinline__ bool leads() const { return threadIdx.x % 128 == 0; }

    // P^T, packed for dV, as soon as it is there. S^T becomes the factor of dP - delta.
    template <int columns>
    __device__ __forceinline__ void weigh_and_pack(int head, int tile, int first_column, int stage,
                                                   float (&s)[columns / 2],
                                                   std::uint32_t (&weights)[columns / 16][4]) const {
        if constexpr (Row::logits) {
            Scores::template weigh_capped<columns>(
                head, tile, first_column, stage, s,
                [&](int j, int half, float x, float y) { weights[j / 2][j % 2 * 2 + half] = pack<T>(x, y); });
        } else {
            Scores::template weigh<columns>(head, tile, first_column, stage, s);
            pack_weights<columns>(s, weights);
        }
    }

    // dS^T from P^T and dP^T, packed; what was packed needs no more registers.
    template <bool packs_weights, int columns>
    __device__ __forceinline__ void differentiate(int head, int tile, int first_column, int stage,
                                                  const float (&p)[columns / 2], const float (&dp)[columns / 2],
                                                  std::uint32_t (&weights)[columns / 16][4],
                                                  std::uint32_t (&ds)[columns / 16][4]) const {
        Scores::template differentiate<columns>(
            head, tile, first_column, stage, p, dp, [&](int j, int half, float x, float y) {
                const int i = 4 * j + 2 * half;
                ds[j / 2][j % 2 * 2 + half] = pack<T>(x, y);
                if constexpr (packs_weights)
                    weights[j / 2][j % 2 * 2 + half] = pack<T>(kept_weight(p[i]), kept_weight(p[i + 1]));
            });
    }

    template <int columns>
    static __device__ __forceinline__ void pack_weights(const float (&p)[columns / 2],
                                                        std::uint32_t (&weights)[columns / 16][4]) {
#pragma unroll
        for (int i = 0; i < columns / 4; ++i)
            weights[i / 4][i % 4] = pack<T>(kept_weight(p[2 * i]), kept_weight(p[2 * i + 1]));
    }

    // 64 rows of dK or dV, through memory that nobody reads any more: panel_at(0) says where their first panel goes.
    // `hdim`: of the block's slice; `first_row` counts from the block's first key.
    template <int hdim, int count, class PanelAt>
    __device__ __forceinline__ void store_rows(const float (&sums)[count], float scale, const PanelAt& panel_at,
                                               int first_row, int first_panel, const CUtensorMap* map,
                                               const catalog_tensor& tensor) const {
        const std::uint32_t row = warp * 16 + lane % 16, column = lane / 16 * 16;
#pragma unroll
        for (int i = 0; i < count; i += 8) {
            std::uint32_t packed[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) packed[j] = pack<T>(sums[i + 2 * j] * scale, sums[i + 2 * j + 1] * scale);
            store_matrices(panel_at(i / 32) + swizzled(row, column + i / 8 % 4 * 32), packed[0], packed[1], packed[2],
                           packed[3]);
        }
        fence_proxy_async();
        named_barrier_sync(own_warpgroup + warpgroup, 128);
        if (!leads()) return;
        const RaggedRows rows = ragged<T>(tensor, work.batch(), work.head_k(), work.first_k(), work.seqlen_k());
#pragma unroll
        for (int panel = 0; panel < count / 32; ++panel)
            tma_store_once(map, panel_at(panel), slice_of<Row>() * hdim + (first_panel + panel) * panel_columns,
                           rows.first_row + first_key() + first_row, rows.low, rows.high, RaggedRows::wrap);
        bulk_commit();
    }

    __device__ __forceinline__ void finish_stores() const {
        if (leads()) bulk_wait_read<0>();
    }

    // 64 rows of dQ from `first_row` on, a whole number of panels of columns: to where `memory` says. Of every 8
    // columns the even ones come first, as convert_dq expects: four registers are then matrices that stmatrix stores.
    template <int begin, int end, int count>
    __device__ __forceinline__ void stage_rows(const float (&dq)[count], std::uint32_t memory, int first_row) const {
        const std::uint32_t row = first_row + warp * 16 + lane / 16 * 8 + lane % 8;
        const std::uint32_t first = base + memory + swizzled(row, lane / 8 % 2 * 16);
#pragma unroll
        for (int i = begin; i < end; i += 4)
            store_matrices((first ^ (i / 4 % 4 * 32)) + (i - begin) / 16 * Tile::query_panel, dq_bits(dq[i]),
                           dq_bits(dq[i + 1]), dq_bits(dq[i + 2]), dq_bits(dq[i + 3]));
    }

    __device__ __forceinline__ std::uint32_t dq_bits(float sum) const { return __float_as_uint(final_dq(sum)); }

    __device__ __forceinline__ float final_dq(float sum) const {
        if constexpr (Tile::scales_ds) return sum;
        return sum * args.scale;
    }

    static __device__ __forceinline__ void release(std::uint32_t barrier) { warp_arrive(barrier); }

    // What is staged of dQ. The fence is the adding thread's, but where other blocks wait for that one.
    __device__ __forceinline__ void release_dq(std::uint32_t barrier) const {
        if constexpr (Row::deterministic) fence_proxy_async();
        release(barrier);
    }

    const BackwardMaps& maps;
    const BackwardBarriers<Row> barriers;
};

}  // namespace catalog::cuda
