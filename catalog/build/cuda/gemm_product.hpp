// The main loop of a warpgroup: it multiplies stages of P and Q that TMA has loaded into shared memory.
#pragma once

#include "cluster.hpp"
#include "gemm_shape.hpp"

namespace catalog::cuda {

template <class Row>
class GemmProduct {
    using Shape = GemmShape<Row>;
    using T = typename Row::dtype;

   public:
    using Sums = typename Shape::Sums;

    __device__ __forceinline__ GemmProduct(std::uint32_t shared, int group)
        : shared(shared), group(group), lane(static_cast<int>(threadIdx.x) % 32) {}

    // The sums over the next `steps` stages, as tensor cores add them.
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

   protected:
    // What the tensor cores sum of a unit.
    using Part = typename Shape::Part[Shape::unit_q / 2];

    static constexpr bool along_p = Shape::major_p == Major::k, along_q = Shape::major_q == Major::k;
    static constexpr int block_bytes = along_p ? 64 * panel_row_bytes : Shape::panel_p;

    // Those of a stage: this warpgroup's part of P, and Q.
    struct Operands {
        std::uint64_t p, q;

        __device__ __forceinline__ Operands(std::uint32_t stage, int group)
            : p(describe_panel<Shape::major_p>(stage + group * Shape::blocks_p * block_bytes, Shape::panel_p)),
              q(describe_panel<Shape::major_q>(stage + Shape::p_bytes, Shape::panel_q)) {}
    };

    static __device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
        for (auto& block : sums)
            for (auto& sum : block) sum = 0;
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

    // The stage may be overwritten: by all blocks that load it.
    __device__ __forceinline__ void release(int stage) const {
        const std::uint32_t empty = Shape::empty(shared, stage);
        if constexpr (Shape::sharers == 1) {
            if (lane == 0) barrier_arrive(empty);
        } else {
            if (lane < Shape::sharers) barrier_arrive_remote(shared_address_of(empty, lane));
        }
    }

    const std::uint32_t shared;
    const int group, lane;
    Ring<Shape::stages> ring;

   private:
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
};

}  // namespace catalog::cuda
