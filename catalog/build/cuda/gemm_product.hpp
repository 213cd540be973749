// The main loop of a warpgroup: it multiplies stages of P and Q that TMA has loaded into shared memory.
#pragma once

#include "gemm_shape.hpp"

namespace catalog::cuda {

template <class Row>
class GemmProduct {
    using Shape = GemmShape<Row>;
    using T = typename Row::dtype;

   public:
    __device__ __forceinline__ GemmProduct(std::uint32_t shared, int group)
        : shared(shared), group(group), lane(static_cast<int>(threadIdx.x) % 32) {}

    // The sums over the next `steps` stages.
    __device__ __forceinline__ void multiply(int steps, float (&sums)[Shape::blocks_p][Shape::tile_q / 2]) {
        if (steps == 0) {
#pragma unroll
            for (auto& block : sums)
                for (float& sum : block) sum = 0;
        }
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

   private:
    __device__ __forceinline__ void multiply_stage(std::uint32_t stage, bool accumulate,
                                                   float (&sums)[Shape::blocks_p][Shape::tile_q / 2]) {
        constexpr bool along_p = Shape::major_p == Major::k, along_q = Shape::major_q == Major::k;
        constexpr int block_bytes = along_p ? 64 * panel_row_bytes : Shape::panel_p;
        const std::uint64_t p =
            describe_panel<Shape::major_p>(stage + group * Shape::blocks_p * block_bytes, Shape::panel_p);
        const std::uint64_t q = describe_panel<Shape::major_q>(stage + Shape::p_bytes, Shape::panel_q);
        wgmma_fence();
#pragma unroll
        for (int slice = 0; slice < Shape::tile_k / 16; ++slice) {
            const std::uint32_t at_p = along_p ? slice / 4 * Shape::panel_p + slice % 4 * 32 : slice * 2048;
            const std::uint32_t at_q = along_q ? slice / 4 * Shape::panel_q + slice % 4 * 32 : slice * 2048;
#pragma unroll
            for (int block = 0; block < Shape::blocks_p; ++block)
                wgmma<T, Shape::major_q, Shape::major_p>(sums[block], advance(p, at_p + block * block_bytes),
                                                         advance(q, at_q), accumulate || slice > 0);
        }
        wgmma_commit();
    }

    // The stage may be overwritten.
    __device__ __forceinline__ void release(int stage) const {
        if (lane == 0) barrier_arrive(Shape::empty(shared, stage));
    }

    const std::uint32_t shared;
    const int group, lane;
    Ring<Shape::stages> ring;
};

}  // namespace catalog::cuda
