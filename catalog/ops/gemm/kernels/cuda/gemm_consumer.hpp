// A warpgroup that computes: it sums its rows of P times Q, tile after tile.
#pragma once

#include "cuda/gemm_product.hpp"
#include "gemm_epilogue.hpp"
#include "gemm_scales.hpp"
#include "gemm_tiles.hpp"

namespace catalog::cuda {

template <class Row>
class GemmConsumer : GemmProduct<Row> {
    using Product = GemmProduct<Row>;
    using Shape = GemmShape<Row>;
    using typename Product::Operands;
    using typename Product::Part;
    using typename Product::Sums;
    using Product::clear, Product::group, Product::multiply, Product::multiply_slice, Product::of_unit;
    using Product::release, Product::ring, Product::shared;

   public:
    __device__ __forceinline__ GemmConsumer(const GemmCall& call, std::uint32_t shared, int group)
        : Product(shared, group), call(call) {}

    __device__ __forceinline__ void run() {
        Sums sums;
        GemmEpilogue<Row> epilogue(call, shared, group);
        const bool by_pieces = stores_pieces && call.mapped && call.log_parts == 0;
        bool rehearsal = rehearses && by_pieces;
        epilogue.fetch();
        GemmTiles<Row> tiles(call);
        while (tiles.exists()) {
            GemmTile tile = tiles.tile();
            if (rehearsal) tile.end_m = 0;
            const int steps = rehearsal ? 0 : tiles.end_step() - tiles.first_step();
            if constexpr (Shape::promotes)
                multiply_promoted(tile, tiles.first_step(), steps, sums);
            else
                multiply(steps, sums);
            if constexpr (stores_pieces)
                by_pieces ? epilogue.store_pieces(tile, sums) : epilogue.store(tile, sums);
            else
                epilogue.store(tile, sums);
            if (!rehearsal) tiles.next();
            rehearsal = false;
        }
        if (threadIdx.x % 128 == 0) bulk_wait_read<0>();
    }

   private:
    static constexpr bool stores_pieces = Shape::stores_pieces && sizeof(typename Row::out) == 2;

    // Code that has not run yet is fetched from memory. So a tile without rows is stored first, while the first stages are
    // loaded. With several pieces, that would take longer than the loads.
    static constexpr bool rehearses = stores_pieces && Shape::pieces == 1 && Row::scales != Scales::row;

    using TileScales = std::conditional_t<Shape::in_blocks, BlockScales<Row>, NoScales>;

    // Products of each 128 of the depth are summed apart. Scales of blocks are loaded a stage ahead.
    __device__ __forceinline__ void multiply_promoted(const GemmTile& tile, int first, int steps, Sums& sums) {
        clear(sums);
        const TileScales scales(call, tile, group);
        auto next = scales.stage(first);
        for (int step = first; step < first + steps; ++step) {
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

    const GemmCall& call;
};

}  // namespace catalog::cuda
