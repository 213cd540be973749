// What warpgroups compute of multi-head latent attention: one weighs the keys of a tile for all rows, others sum up values.
#pragma once

#include "latent_shape.hpp"

namespace catalog::cuda {

// The rows while their keys are weighed.
template <class Row, bool partial>
class LatentWeights {
    using T = typename Row::dtype;
    using Shape = LatentShape<Row>;
    static constexpr int keys = Shape::keys;

   public:
    __device__ __forceinline__ LatentWeights(const catalog_args& args, const MmaWork<Row, partial>& work,
                                             const Window<Row::mask>& window, std::uint32_t shared)
        : args(args), work(work), window(window), shared(shared), lane(static_cast<int>(threadIdx.x) % 32) {}

    // The keys of the tile that begins at `key`, in a stage that is being filled. `all`: keys that every row sees.
    __device__ __forceinline__ void weigh_keys(const Ring<2>& ring, int key, KeyRange all) {
        multiply_q_k(ring);
        if (key < all.begin || all.end < key + keys) hide(key);
#pragma unroll
        for (int half = 0; half < 2; ++half) rescale[half] = weigh(half);
        barrier_wait(Shape::summed(shared), tile % 2 ^ 1);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const std::uint32_t row = shared + Shape::weights + lane % 4 * 4;
#pragma unroll
            for (int n = 0; n < keys / 8; ++n)
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(row + swizzled(row_of_thread(half), n * 16)),
                             "r"(pack<T>(s[n * 4 + 2 * half], s[n * 4 + 2 * half + 1]))
                             : "memory");
        }
        tell(rescale);
    }

    // After the last tile: LSE, and what O is to be multiplied with.
    __device__ __forceinline__ void finish() {
        float normalize[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            sum[half] += __shfl_xor_sync(all_lanes, sum[half], 1);
            sum[half] += __shfl_xor_sync(all_lanes, sum[half], 2);
            const int row = row_of_thread(half), stored = row < work.rows ? row : 0;
            const QueryRow at = work.row_at(stored);
            const RowEnd end = end_of_row<Row>(args, max[half] * work.grid.scores.exponent, sum[half], work.seq.index,
                                               work.head_of(at), window.center(at.query), work.split == 0);
            normalize[half] = end.normalize;
            if (row < work.rows && lane % 4 == 0)
                if (float* const target = work.lse_of(args, row)) *target = end.lse;
        }
        barrier_wait(Shape::summed(shared), tile % 2 ^ 1);
        tell(normalize);
    }

   private:
    __device__ __forceinline__ void multiply_q_k(const Ring<2>& ring) {
        constexpr int panels = Shape::panels_of_group;
        forget(s);
#pragma unroll
        for (int group = 0; group < Shape::summing; ++group) {
            barrier_wait(Shape::full(shared, ring.stage, group), ring.phase);
            fence_proxy_async();
            wgmma_fence();
            multiply_panels<panels>(ring.stage, group * panels);
            if (group == 0) multiply_panels<Shape::panels - Shape::value_panels>(ring.stage, Shape::value_panels);
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin(s);
    }

    template <int count>
    __device__ __forceinline__ void multiply_panels(int stage, int first) {
        const std::uint64_t rows = describe_panel<Major::k>(shared + first * Shape::q_panel);
        const std::uint64_t columns =
            describe_panel<Major::k>(shared + Shape::stages + stage * Shape::stage_bytes + first * Shape::kv_panel);
#pragma unroll
        for (int i = 0; i < 4 * count; ++i)  // 16 elements
            wgmma<T>(s, advance(rows, i / 4 * Shape::q_panel + i % 4 * 32),
                     advance(columns, i / 4 * Shape::kv_panel + i % 4 * 32), first > 0 || i > 0);
    }

    __device__ __forceinline__ void hide(int key) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const KeyRange seen = window.visible(work.row_at(row_of_thread(half)).query);
            const int first = key + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < keys / 8; ++n)
#pragma unroll
                for (int c = 0; c < 2; ++c)
                    if (first + 8 * n + c < seen.begin || first + 8 * n + c >= seen.end)
                        s[n * 4 + 2 * half + c] = minus_infinity();
        }
    }

    // A row's scores become weights, as in MmaRows; the result is what earlier sums are to be multiplied with.
    __device__ __forceinline__ float weigh(int half) {
        const float exponent = work.grid.scores.exponent;
        float largest = minus_infinity();
#pragma unroll
        for (int n = 0; n < keys / 8; ++n)
            largest = fmaxf(largest, fmaxf(s[n * 4 + 2 * half], s[n * 4 + 2 * half + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, 2));
        const bool grows = (largest - max[half]) * exponent > 8.0f;
        const float rescale = grows ? exp2_approximate((max[half] - largest) * exponent) : 1.0f;
        max[half] = grows ? largest : max[half];
        sum[half] *= rescale;
        // A row that has seen no key: subtracting -infinity from itself would give NaN.
        const float zero = max[half] == minus_infinity() ? 0.0f : max[half] * exponent;
#pragma unroll
        for (int n = 0; n < keys / 8; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float& weight = s[n * 4 + 2 * half + c];
                weight = exp2_approximate(fmaf(weight, exponent, -zero));
                sum[half] += weight;
            }
        return rescale;
    }

    // A number for each row, and what was written before, to those who sum up.
    __device__ __forceinline__ void tell(const float (&of_rows)[2]) {
        if (lane % 4 == 0)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared + Shape::notes + row_of_thread(half) * 4),
                             "f"(of_rows[half])
                             : "memory");
        barrier_arrive(Shape::weighed(shared));
        ++tile;
    }

    const catalog_args& args;
    const MmaWork<Row, partial>& work;
    const Window<Row::mask>& window;
    const std::uint32_t shared;
    const int lane;
    int tile = 0;
    float s[keys / 2], rescale[2];  // scores, then weights, in the layout of an accumulator; see wgmma.hpp
    float max[2] = {minus_infinity(), minus_infinity()}, sum[2] = {0.0f, 0.0f};  // as in MmaRows
};

// The columns of O of one warpgroup while values are summed up.
template <class Row, bool partial>
class LatentSums {
    using T = typename Row::dtype;
    using Shape = LatentShape<Row>;
    static constexpr int columns = Shape::columns;

   public:
    __device__ __forceinline__ LatentSums(std::uint32_t shared, int group)
        : shared(shared), group(group), lane(static_cast<int>(threadIdx.x) % 32) {
#pragma unroll
        for (float& sum : o) sum = 0.0f;
    }

    // Until the weights of the next tile are there, or what O is to be multiplied with at the end; it is brought to their
    // scale.
    __device__ __forceinline__ void await_weights() {
        barrier_wait(Shape::weighed(shared), tile++ % 2);
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
            asm volatile("ld.shared.f32 %0, [%1];"
                         : "=f"(factor[half])
                         : "r"(shared + Shape::notes + row_of_thread(half) * 4)
                         : "memory");
        if (!__any_sync(all_lanes, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
        for (int i = 0; i < columns / 2; ++i) o[i] *= factor[i / 2 % 2];
    }

    // Starts to add the values of a stage: of the first half of its keys, then of the second.
    __device__ __forceinline__ void start_adding(const Ring<2>& ring) {
        barrier_wait(Shape::full(shared, ring.stage, group), ring.phase);
        fence_proxy_async();
        const std::uint32_t panels = shared + Shape::stages + ring.stage * Shape::stage_bytes +
                                     group * Shape::panels_of_group * Shape::kv_panel;
        const std::uint64_t weights = describe_panel<Major::k>(shared + Shape::weights);
        const std::uint64_t values = describe_panel<Major::mn>(panels, Shape::kv_panel);
        pin(o);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Shape::keys / 16; ++step) {
            wgmma<T, Major::mn>(o, advance(weights, step * 32), advance(values, step * 16 * panel_row_bytes), true);
            if (step == Shape::keys / 32 - 1) wgmma_commit();
        }
        wgmma_commit();
    }

    // Afterwards the warpgroup does not read the values of the first half any more.
    __device__ __forceinline__ void finish_half() const {
        wgmma_wait<1>();
        named_barrier_sync(2 + group, 128);
    }

    // Afterwards the warpgroup does not read the stage any more.
    __device__ __forceinline__ void finish_adding() {
        wgmma_wait<0>();
        pin(o);
        barrier_arrive(Shape::summed(shared));
        named_barrier_sync(2 + group, 128);
    }

    __device__ __forceinline__ void store(const catalog_args& args, const MmaWork<Row, partial>& work) {
        const int first = group * columns + lane % 4 * 2, stored = static_cast<int>(args.hdim_v);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = row_of_thread(half);
            if (row >= work.rows) continue;
#pragma unroll
            for (int n = 0; n < columns / 8; ++n) {
                if (first + 8 * n >= stored) break;
                const float even = o[n * 4 + 2 * half], odd = o[n * 4 + 2 * half + 1];
                if constexpr (partial)
                    *reinterpret_cast<float2*>(work.part_of(args, row) + first + 8 * n) = make_float2(even, odd);
                else
                    *reinterpret_cast<std::uint32_t*>(work.o_of(args, row) + first + 8 * n) =
                        pack<typename Row::otype>(even, odd);
            }
        }
    }

   private:
    const std::uint32_t shared;
    const int group, lane;
    int tile = 0;
    float o[columns / 2];  // in the layout of an accumulator; see wgmma.hpp
};

}  // namespace catalog::cuda
