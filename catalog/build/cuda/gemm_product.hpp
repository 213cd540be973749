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
        multiply_stages<panel_row_bytes>(0, steps, last, sums);
        finish(steps, last, sums);
    }

    // The same; `halves` more stages have half of the depth, and along it rows of 64 bytes.
    __device__ __forceinline__ void multiply(int steps, int halves, Sums& sums) {
        if (steps + halves == 0) clear(sums);
        int last = 0;
        multiply_stages<panel_row_bytes>(0, steps, last, sums);
        multiply_stages<panel_row_bytes / 2>(steps, steps + halves, last, sums);
        finish(steps + halves, last, sums);
    }

   protected:
    // What the tensor cores sum of a unit.
    using Part = typename Shape::Part[Shape::unit_q / 2];

    static constexpr bool along_p = Shape::major_p == Major::k, along_q = Shape::major_q == Major::k;
    template <int row_bytes>
    static constexpr int block_bytes = along_p ? 64 * row_bytes : Shape::panel_p;

    // Those of a stage: this warpgroup's part of P, and Q. Those along the depth have rows of that many bytes.
    template <int row_bytes>
    struct OperandsOf {
        std::uint64_t p, q;

        __device__ __forceinline__ OperandsOf(std::uint32_t stage, int group)
            : p(describe_panel<Shape::major_p, along_p ? row_bytes : panel_row_bytes>(
                  stage + group * Shape::blocks_p * block_bytes<row_bytes>, Shape::panel_p)),
              q(describe_panel<Shape::major_q, along_q ? row_bytes : panel_row_bytes>(stage + Shape::p_bytes,
                                                                                     Shape::panel_q)) {}
    };
    using Operands = OperandsOf<panel_row_bytes>;

    static __device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
        for (auto& block : sums)
            for (auto& sum : block) sum = 0;
    }

    static __device__ __forceinline__ typename Shape::Sum* of_unit(Sums& sums, int unit) {
        return &sums[unit / Shape::units_q][unit % Shape::units_q * Shape::unit_q / 2];
    }

    // One wgmma.
    template <int row_bytes>
    static __device__ __forceinline__ void multiply_slice(const OperandsOf<row_bytes>& of, int slice, int unit,
                                                          bool accumulate, Part& sums) {
        constexpr int unit_bytes = along_q ? Shape::unit_q * row_bytes : Shape::unit_q / 64 * Shape::panel_q;
        constexpr int in_row = row_bytes / 32;
        const std::uint32_t at_p = along_p ? slice / in_row * Shape::panel_p + slice % in_row * 32 : slice * 2048;
        const std::uint32_t at_q = along_q ? slice / in_row * Shape::panel_q + slice % in_row * 32 : slice * 2048;
        wgmma<T, Shape::major_q, Shape::major_p>(
            sums, advance(of.p, at_p + unit / Shape::units_q * block_bytes<row_bytes>),
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
    // Stages `step` to `end` of a product; `last` is the one that wgmma may still read.
    template <int row_bytes>
    __device__ __forceinline__ void multiply_stages(int step, int end, int& last, Sums& sums) {
        for (; step < end; ++step) {
            barrier_wait(Shape::full(shared, ring.stage), ring.phase);
            multiply_stage<row_bytes>(shared + ring.stage * Shape::stage_bytes, step > 0, sums);
            if (step > 0) {
                wgmma_wait<1>();
                release(last);
            }
            last = ring.stage;
            ring.next();
        }
    }

    __device__ __forceinline__ void finish(int steps, int last, Sums& sums) const {
        wgmma_wait<0>();
#pragma unroll
        for (auto& block : sums) pin(block);
        if (steps > 0) release(last);
    }

    template <int row_bytes>
    __device__ __forceinline__ void multiply_stage(std::uint32_t stage, bool accumulate, Sums& sums) {
        constexpr int slices = Shape::tile_k / Shape::slice * row_bytes / panel_row_bytes;
        const OperandsOf<row_bytes> of(stage, group);
        wgmma_fence();
#pragma unroll
        for (int slice = 0; slice < slices; ++slice)
#pragma unroll
            for (int unit = 0; unit < Shape::units; ++unit)
                multiply_slice(of, slice, unit, accumulate || slice > 0, reinterpret_cast<Part&>(*of_unit(sums, unit)));
        wgmma_commit();
    }
};

}  // namespace catalog::cuda
