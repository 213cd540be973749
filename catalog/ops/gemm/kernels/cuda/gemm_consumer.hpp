// A warpgroup that computes: it sums its rows of P times Q, tile after tile.
#pragma once

#include "gemm_epilogue.hpp"
#include "gemm_scales.hpp"
#include "gemm_tiles.hpp"

namespace catalog::cuda {

template <class Row>
class GemmConsumer {
    using Shape = GemmShape<Row>;
    using T = typename Row::dtype;
    using Sums = typename Shape::Sums;

   public:
    __device__ __forceinline__ GemmConsumer(const GemmCall& call, std::uint32_t shared, int group)
        : call(call), shared(shared), group(group), lane(static_cast<int>(threadIdx.x) % 32) {}

    __device__ __forceinline__ void run() {
        Sums sums;
        GemmEpilogue<Row> epilogue(call, shared, group);
        for (GemmTiles<Row> tiles(call); tiles.exists(); tiles.next()) {
            if constexpr (Shape::promotes)
                multiply_promoted(tiles, sums);
            else
                multiply(tiles.end_step() - tiles.first_step(), sums);
            if constexpr (!Shape::swapped && sizeof(typename Row::out) == 2)
                if (call.plain && call.splits == 1) {
                    epilogue.store_plain(tiles.tile(), sums);
                    continue;
                }
            epilogue.store(tiles.tile(), sums);
        }
        if (threadIdx.x % 128 == 0) bulk_wait_read<0>();
    }

   private:
    // What the tensor cores sum of a unit.
    using Part = typename Shape::Part[Shape::unit_q / 2];

    // Those of a stage: this warpgroup's part of P, and Q.
    struct Operands {
        std::uint64_t p, q;

        __device__ __forceinline__ Operands(std::uint32_t stage, int group)
            : p(describe_panel<Shape::major_p>(stage + group * Shape::blocks_p * block_bytes, Shape::panel_p)),
              q(describe_panel<Shape::major_q>(stage + Shape::p_bytes, Shape::panel_q)) {}
    };

    static constexpr bool along_p = Shape::major_p == Major::k, along_q = Shape::major_q == Major::k;
    static constexpr int block_bytes = along_p ? 64 * panel_row_bytes : Shape::panel_p;

    static __device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
        for (auto& block : sums)
            for (auto& sum : block) sum = 0;
    }

    __device__ __forceinline__ void multiply(int steps, Sums& sums) {
        if (steps == 0) clear(sums);
        int last = 0;
        for (int step = 0; step < steps; ++step) {
            barrier_wait(Shape::full(shared, ring.stage), ring.phase);
            multiply_stage(shared + ring.stage * Shape::stage_bytes, step > 0, sums);
            if (step > 0) {
                wgmma_wait<1>();
                release(last);
            }
            last = ring.stage;
            ring.next();
        }
        wgmma_wait<0>();
#pragma unroll
        for (auto& block : sums) pin(block);
        if (steps > 0) release(last);
    }

    __device__ __forceinline__ void multiply_stage(std::uint32_t stage, bool accumulate, Sums& sums) {
        const Operands of(stage, group);
        wgmma_fence();
#pragma unroll
        for (int slice = 0; slice < Shape::tile_k / Shape::slice; ++slice)
#pragma unroll
            for (int unit = 0; unit < Shape::units; ++unit)
                multiply_slice(of, slice, unit, accumulate || slice > 0, reinterpret_cast<Part&>(*of_unit(sums, unit)));
        wgmma_commit();
    }

    using TileScales = std::conditional_t<Shape::in_blocks, BlockScales<Row>, NoScales>;

    // Products of each 128 of the depth are summed apart. Scales of blocks are loaded a stage ahead.
    __device__ __forceinline__ void multiply_promoted(const GemmTiles<Row>& tiles, Sums& sums) {
        clear(sums);
        const TileScales scales(call, tiles.tile(), group);
        auto next = scales.stage(tiles.first_step());
        for (int step = tiles.first_step(); step < tiles.end_step(); ++step) {
            const auto factors = next;
            barrier_wait(Shape::full(shared, ring.stage), ring.phase);
            next = scales.stage(step + 1);
            const Operands of(shared + ring.stage * Shape::stage_bytes, group);
            if constexpr (Shape::overlaps)
                multiply_overlapped(of, factors, sums);
            else
                multiply_in_turn(of, factors, sums);
            ring.next();
        }
    }

    // While one warpgroup adds sums, another one multiplies.
    template <class Factors>
    __device__ __forceinline__ void multiply_in_turn(const Operands& of, const Factors& factors, Sums& sums) {
        Part part;
#pragma unroll
        for (int job = 0; job < Shape::jobs; ++job) {
            multiply_part(of, job, part);
            wgmma_wait<0>();
            pin(part);
            if (job == Shape::jobs - 1) release(ring.stage);
            promote(part, factors, job, sums);
        }
    }

    // The warpgroup adds one unit's sums while tensor cores work on the next of a stage.
    template <class Factors>
    __device__ __forceinline__ void multiply_overlapped(const Operands& of, const Factors& factors, Sums& sums) {
        Part parts[2];
        multiply_part(of, 0, parts[0]);
#pragma unroll
        for (int job = 0; job < Shape::jobs; ++job) {
            if (job + 1 < Shape::jobs) {
                multiply_part(of, job + 1, parts[(job + 1) % 2]);
                wgmma_wait<1>();
            } else {
                wgmma_wait<0>();
                release(ring.stage);
            }
            pin(parts[job % 2]);
            promote(parts[job % 2], factors, job, sums);
        }
    }

    // The products of a unit and 128 of the depth.
    static __device__ __forceinline__ void multiply_part(const Operands& of, int job, Part& part) {
        constexpr int slices = Shape::promoted_depth / Shape::slice;
        wgmma_fence();
#pragma unroll
        for (int slice = 0; slice < slices; ++slice)
            multiply_slice(of, job / Shape::units * slices + slice, job % Shape::units, slice > 0, part);
        wgmma_commit();
    }

    template <class Factors>
    static __device__ __forceinline__ void promote(const Part& part, const Factors& factors, int job, Sums& sums) {
        const int depth = job / Shape::units, unit = job % Shape::units;
        auto* const to = of_unit(sums, unit);
#pragma unroll
        for (int i = 0; i < Shape::unit_q / 2; ++i) {
            const float value = static_cast<float>(part[i]);
            if constexpr (Shape::in_blocks)
                to[i] = fmaf(value, factors.of(depth, unit, i), to[i]);
            else
                to[i] += value;
        }
    }

    static __device__ __forceinline__ typename Shape::Sum* of_unit(Sums& sums, int unit) {
        return &sums[unit / Shape::units_q][unit % Shape::units_q * Shape::unit_q / 2];
    }

    // One wgmma.
    static __device__ __forceinline__ void multiply_slice(const Operands& of, int slice, int unit, bool accumulate,
                                                          Part& sums) {
        constexpr int unit_bytes = along_q ? Shape::unit_q * panel_row_bytes : Shape::unit_q / 64 * Shape::panel_q;
        const std::uint32_t at_p = along_p ? slice / 4 * Shape::panel_p + slice % 4 * 32 : slice * 2048;
        const std::uint32_t at_q = along_q ? slice / 4 * Shape::panel_q + slice % 4 * 32 : slice * 2048;
        wgmma<T, Shape::major_q, Shape::major_p>(sums, advance(of.p, at_p + unit / Shape::units_q * block_bytes),
                                                 advance(of.q, at_q + unit % Shape::units_q * unit_bytes), accumulate);
    }

    // The stage may be overwritten.
    __device__ __forceinline__ void release(int stage) const {
        if (lane == 0) barrier_arrive(Shape::empty(shared, stage));
    }

    const GemmCall& call;
    const std::uint32_t shared;
    const int group, lane;
    Ring<Shape::stages> ring;
};

}  // namespace catalog::cuda
