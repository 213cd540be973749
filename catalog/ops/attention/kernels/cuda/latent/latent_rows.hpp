// The rows of a block of multi-head latent attention on their way through their keys: what a thread of a warpgroup has of
// scores, weights, and the sum so far.
#pragma once

#include "latent_shape.hpp"
#include "cuda/mma/mma_work.hpp"

namespace catalog::cuda {

template <class Row, bool partial>
class LatentRows {
    using T = typename Row::dtype;
    using Shape = LatentShape<Row>;
    static constexpr int keys = Shape::keys_of_group, columns = Shape::columns_of_group;

   public:
    __device__ __forceinline__ LatentRows(const catalog_args& args, const MmaWork<Row, partial>& work,
                                          std::uint32_t shared)
        : args(args),
          work(work),
          shared(shared),
          group(static_cast<int>(threadIdx.x) / 128),
          lane(static_cast<int>(threadIdx.x) % 32),
          window(window_of<Row::mask>(args, work.seq.seqlen_q, work.seq.seqlen_k, work.keys(args))) {
#pragma unroll
        for (float& sum_of_column : o) sum_of_column = 0.0f;
    }

    // Keys that some, or that every, row sees.
    __device__ __forceinline__ KeyRange seen_by_some() const { return cuda::seen_by_some(first_seen(), last_seen()); }
    __device__ __forceinline__ KeyRange seen_by_all() const { return cuda::seen_by_all(first_seen(), last_seen()); }

    // The keys of the tile that begins at `key`, at `k` in shared memory, are weighed. `all`: keys that every row sees. For
    // all threads of the block; afterwards they see the weights.
    __device__ __forceinline__ void weigh_keys(std::uint32_t k, int key, KeyRange all) {
        multiply_q_k(k + group * keys * panel_row_bytes);
        hide(key + group * keys, all);
        float largest[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            largest[half] = minus_infinity();
#pragma unroll
            for (int n = 0; n < keys / 8; ++n)
                largest[half] = fmaxf(largest[half], fmaxf(s[n * 4 + 2 * half], s[n * 4 + 2 * half + 1]));
            largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xffffffff, largest[half], 1));
            largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xffffffff, largest[half], 2));
        }
        exchange(largest);
        weigh(fmaxf(largest[0], other(0)), fmaxf(largest[1], other(1)));
        fence_proxy_async();
        __syncthreads();
    }

    // Their values, at `v`, are added.
    __device__ __forceinline__ void add_values(std::uint32_t v) {
        const std::uint64_t weights = describe_panel<Major::k>(shared + Shape::weights);
        const std::uint64_t values =
            describe_panel<Major::mn>(v + group * (columns / panel_columns) * Shape::kv_panel, Shape::kv_panel);
        pin(o);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Shape::keys / 16; ++step)
            wgmma<T, Major::mn>(o, advance(weights, step * 32), advance(values, step * 16 * panel_row_bytes), true);
        wgmma_commit();
        wgmma_wait<0>();
        pin(o);
    }

    // What is accumulated goes to O and LSE, or to those of the split; by all threads of the block.
    __device__ __forceinline__ void store() {
#pragma unroll
        for (float& sum_of_row : sum) {
            sum_of_row += __shfl_xor_sync(0xffffffff, sum_of_row, 1);
            sum_of_row += __shfl_xor_sync(0xffffffff, sum_of_row, 2);
        }
        exchange(sum);
#pragma unroll
        for (int half = 0; half < 2; ++half) store_row(row(half), half, sum[half] + other(half));
    }

   private:
    __device__ __forceinline__ KeyRange first_seen() const { return window.visible(work.row_at(0).query); }
    __device__ __forceinline__ KeyRange last_seen() const { return window.visible(work.row_at(work.rows - 1).query); }

    // Of the thread's two rows.
    __device__ __forceinline__ int row(int half) const {
        return static_cast<int>(threadIdx.x) / 32 % 4 * 16 + 8 * half + lane / 4;
    }

    // What the warpgroup knows of its rows becomes known to the other one.
    __device__ __forceinline__ void exchange(const float (&of_rows)[2]) {
        if (lane % 4 == 0)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(note(group, half)), "f"(of_rows[half]) : "memory");
        __syncthreads();
    }

    __device__ __forceinline__ float other(int half) const {
        float of_row;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(of_row) : "r"(note(1 - group, half)) : "memory");
        return of_row;
    }

    __device__ __forceinline__ std::uint32_t note(int of_group, int half) const {
        return shared + Shape::notes + (of_group * Shape::rows + row(half)) * 4;
    }

    __device__ __forceinline__ void multiply_q_k(std::uint32_t k) {
        const std::uint64_t rows = describe_panel<Major::k>(shared), columns = describe_panel<Major::k>(k);
        forget(s);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < Row::hdim_q / 16; ++i)
            wgmma<T>(s, advance(rows, i / 4 * Shape::q_panel + i % 4 * 32),
                     advance(columns, i / 4 * Shape::kv_panel + i % 4 * 32), i > 0);
        wgmma_commit();
        wgmma_wait<0>();
        pin(s);
    }

    __device__ __forceinline__ void hide(int key, KeyRange all) {
        if (all.begin <= key && key + keys <= all.end) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const KeyRange seen = window.visible(work.row_at(row(half)).query);
            const int first = key + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < keys / 8; ++n)
#pragma unroll
                for (int c = 0; c < 2; ++c)
                    if (first + 8 * n + c < seen.begin || first + 8 * n + c >= seen.end)
                        s[n * 4 + 2 * half + c] = minus_infinity();
        }
    }

    // Scores become weights, as in MmaRows, given the largest of each row.
    __device__ __forceinline__ void weigh(float largest_of_first, float largest_of_second) {
        const float largest[2] = {largest_of_first, largest_of_second};
        const float exponent = work.grid.scores.exponent;
        float rescale[2];
        bool changed = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const bool grows = (largest[half] - max[half]) * exponent > 8.0f;
            rescale[half] = grows ? exp2_approximate((max[half] - largest[half]) * exponent) : 1.0f;
            max[half] = grows ? largest[half] : max[half];
            changed |= grows;
            sum[half] *= rescale[half];
            // A row that has seen no key: subtracting -infinity from itself would give NaN.
            const float zero = max[half] == minus_infinity() ? 0.0f : max[half] * exponent;
            const std::uint32_t target = shared + Shape::weights + lane % 4 * 4;
#pragma unroll
            for (int n = 0; n < keys / 8; ++n) {
                const float first = exp2_approximate(fmaf(s[n * 4 + 2 * half], exponent, -zero));
                const float second = exp2_approximate(fmaf(s[n * 4 + 2 * half + 1], exponent, -zero));
                sum[half] += first + second;
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(
                                 target + piece_offset<Shape::keys, Shape::rows>(row(half), group * (keys / 8) + n)),
                             "r"(pack<T>(first, second))
                             : "memory");
            }
        }
        if (__any_sync(0xffffffff, changed))
#pragma unroll
            for (int i = 0; i < columns / 2; ++i) o[i] *= rescale[i / 2 % 2];
    }

    __device__ __forceinline__ void store_row(int row, int half, float total) const {
        if (row >= work.rows) return;
        const QueryRow at = work.row_at(row);
        const RowEnd end = end_of_row<Row>(args, max[half] * work.grid.scores.exponent, total, work.seq.index,
                                           work.head_of(at), window.center(at.query), work.split == 0);
        if (group == 0 && lane % 4 == 0)
            if (float* const target = work.lse_of(args, row)) *target = end.lse;
        const int first = group * columns + lane % 4 * 2, stored = static_cast<int>(args.hdim_v);
#pragma unroll
        for (int n = 0; n < columns / 8; ++n) {
            if (first + 8 * n >= stored) break;
            const float even = o[n * 4 + 2 * half] * end.normalize, odd = o[n * 4 + 2 * half + 1] * end.normalize;
            if constexpr (partial)
                *reinterpret_cast<float2*>(work.part_of(args, row) + first + 8 * n) = make_float2(even, odd);
            else
                *reinterpret_cast<std::uint32_t*>(work.o_of(args, row) + first + 8 * n) =
                    pack<typename Row::otype>(even, odd);
        }
    }

    const catalog_args& args;
    const MmaWork<Row, partial>& work;
    const std::uint32_t shared;
    const int group, lane;
    const Window<Row::mask> window;
    float s[keys / 2], o[columns / 2];  // in the layout of an accumulator; see wgmma.hpp
    float max[2] = {minus_infinity(), minus_infinity()}, sum[2] = {0.0f, 0.0f};  // as in MmaRows
};

}  // namespace catalog::cuda
