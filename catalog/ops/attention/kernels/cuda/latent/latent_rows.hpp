// What warpgroups compute of multi-head latent attention: one weighs the keys of a tile for all rows, others sum up values.
#pragma once

#include "latent_shape.hpp"

namespace catalog::cuda {

// The numbers that were written for the thread's two rows.
__device__ __forceinline__ void read_note(float (&of_rows)[2], std::uint32_t note) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(of_rows[half]) : "r"(note + row_of_thread(half) * 4) : "memory");
}

// The rows while their keys are weighed. Scores, then weights, are in the layout of an accumulator; see wgmma.hpp.
template <class Row, bool partial>
class LatentWeights {
    using T = typename Row::dtype;
    using Shape = LatentShape<Row>;
    static constexpr int keys = Shape::keys;

   public:
    using Tile = float[keys / 2];

    __device__ __forceinline__ LatentWeights(const catalog_args& args, const MmaWork<Row, partial>& work,
                                             const Window<Row::mask>& window)
        : args(args), work(work), window(window), lane(static_cast<int>(threadIdx.x) % 32) {}

    // Adds to scores the products of `count` panels of Q and of keys, from number `panel` on; those of number 0 come first.
    // `q` and `k` describe the first panels of all.
    template <int count>
    static __device__ __forceinline__ void multiply(Tile& s, std::uint64_t q, std::uint64_t k, int panel) {
#pragma unroll
        for (int i = 0; i < 4 * count; ++i) {  // 16 elements
            const int of_panel = panel + i / 4, column = i % 4 * 32;
            wgmma<T>(s, advance(q, of_panel * Shape::q_panel + column), advance(k, of_panel * Shape::kv_panel + column),
                     panel > 0 || i > 0);
        }
    }

    // The first of two steps in which scores of the keys from `key` on become weights: their maxima. `all`: keys that every
    // row sees. The result is what earlier sums of a row are to be multiplied with.
    __device__ __forceinline__ void find_maxima(Tile& s, int key, KeyRange all, float (&rescale)[2]) {
        const bool hidden = key < all.begin || all.end < key + keys;
        if (Scores<Row>::finished || hidden) finish_scores(s, key, hidden);
#pragma unroll
        for (int half = 0; half < 2; ++half) rescale[half] = find_maximum(s, half);
    }

    // The second one.
    __device__ __forceinline__ void weigh(Tile& s) {
        const float exponent = work.grid.scores.exponent;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            sum[half] *= factor(max_of_sum[half], max[half]);
            max_of_sum[half] = max[half];
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
        }
    }

    __device__ __forceinline__ void store(const Tile& s, std::uint32_t panel) const {
        const int row = static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane % 16;
        const std::uint32_t first = panel + swizzled(row, lane / 16 * 16);
#pragma unroll
        for (int n = 0; n < keys / 2; n += 8)
            store_matrices(first ^ n * 4, pack<T>(s[n], s[n + 1]), pack<T>(s[n + 2], s[n + 3]),
                           pack<T>(s[n + 4], s[n + 5]), pack<T>(s[n + 6], s[n + 7]));
    }

    // A number for each row, for other warpgroups.
    __device__ __forceinline__ void write(const float (&of_rows)[2], std::uint32_t note) const {
        if (lane % 4 == 0)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(note + row_of_thread(half) * 4), "f"(of_rows[half])
                             : "memory");
    }

    // After the last tile: LSE, and what O is to be multiplied with.
    __device__ __forceinline__ void finish(float (&normalize)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = row_of_thread(half), stored = row < work.rows ? row : 0;
            const QueryRow at = work.row_at(stored);
            const RowEnd end = end_of_row<Row>(args, max[half] * work.grid.scores.exponent, row_sum(half), work.seq.index,
                                               work.head_of(at), window.center(at.query), work.split == 0);
            normalize[half] = end.normalize;
            if (row < work.rows && lane % 4 == 0)
                if (float* const target = work.lse_of(args, row)) *target = end.lse;
        }
    }

    // Where another warpgroup weighs other tiles of the same rows: the largest score of all tiles so far goes from one to the
    // other, and in the end the maximum and the sum of the tiles of one.
    __device__ __forceinline__ void write_maxima(std::uint32_t notes) const { write(max, notes); }
    __device__ __forceinline__ void read_maxima(std::uint32_t notes) { read_note(max, notes); }

    __device__ __forceinline__ void write_sums(std::uint32_t of_maxima, std::uint32_t of_sums) const {
        write(max_of_sum, of_maxima);
        const float sums[2] = {row_sum(0), row_sum(1)};
        write(sums, of_sums);
    }
    __device__ __forceinline__ void add_sums(std::uint32_t of_maxima, std::uint32_t of_sums) {
        float other_max[2], other_sum[2];
        read_note(other_max, of_maxima);
        read_note(other_sum, of_sums);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            max[half] = fmaxf(max_of_sum[half], other_max[half]);
            sum[half] *= factor(max_of_sum[half], max[half]);
            if (lane % 4 == 0) sum[half] += other_sum[half] * factor(other_max[half], max[half]);
        }
    }

   private:
    // `hidden`: whether a row may not see some of the keys.
    __device__ __forceinline__ void finish_scores(Tile& s, int key, bool hidden) const {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            finish_row<keys>(args, work, work.grid.scores, window, row_of_thread(half), key + lane % 4 * 2, hidden,
                             [&](int n, int c) -> float& { return s[n * 4 + 2 * half + c]; });
    }

    // Smaller growth than 2^8 is left alone, as in MmaRows.
    __device__ __forceinline__ float find_maximum(const Tile& s, int half) {
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
        return rescale;
    }

    // Of sums of weights that are relative to one maximum, when another takes its place.
    __device__ __forceinline__ float factor(float from, float to) const {
        return from == to ? 1.0f : exp2_approximate((from - to) * work.grid.scores.exponent);
    }

    __device__ __forceinline__ float row_sum(int half) const {
        const float pair = sum[half] + __shfl_xor_sync(all_lanes, sum[half], 1);
        return pair + __shfl_xor_sync(all_lanes, pair, 2);
    }

    const catalog_args& args;
    const MmaWork<Row, partial>& work;
    const Window<Row::mask>& window;
    const int lane;
    // Of each row the largest score so far, or nearly; the sum of weights, and the score that these are relative to.
    float max[2] = {minus_infinity(), minus_infinity()};
    float sum[2] = {0.0f, 0.0f}, max_of_sum[2] = {minus_infinity(), minus_infinity()};
};

// The columns of O of one warpgroup while values are summed up.
template <class Row, bool partial>
class LatentSums {
    using T = typename Row::dtype;
    using Shape = LatentShape<Row>;
    static constexpr int columns = Shape::columns;

   public:
    __device__ __forceinline__ explicit LatentSums(int group)
        : group(group), lane(static_cast<int>(threadIdx.x) % 32) {
#pragma unroll
        for (auto& half : o)
#pragma unroll
            for (float& sum : half) sum = 0.0f;
    }

    // Multiplies O with the numbers that were written for its rows.
    __device__ __forceinline__ void rescale(std::uint32_t note) {
        float factor[2];
        read_note(factor, note);
        if (!__any_sync(all_lanes, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
        for (auto& half : o)
#pragma unroll
            for (int i = 0; i < columns / 4; ++i) half[i] *= factor[i / 2 % 2];
    }

    // Starts to add the values of a tile, whose panels begin at `tile`: to the first half of the columns, then to the second.
    __device__ __forceinline__ void start_adding(std::uint32_t weights_panel, std::uint32_t tile) {
        fence_proxy_async();
        const std::uint64_t weights = describe_panel<Major::k>(weights_panel);
        const std::uint64_t values =
            describe_panel<Major::mn>(tile + group * Shape::panels_of_group * Shape::kv_panel, Shape::kv_panel);
#pragma unroll
        for (auto& half : o) pin(half);
        wgmma_fence();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int step = 0; step < Shape::keys / 16; ++step)
                wgmma<T, Major::mn>(
                    o[half], advance(weights, step * 32),
                    advance(values, half * Shape::panels_of_half * Shape::kv_panel + step * 16 * panel_row_bytes), true);
            wgmma_commit();
        }
    }

    // Afterwards the warpgroup does not read the panels of the first half any more.
    __device__ __forceinline__ void finish_half() const {
        wgmma_wait<1>();
        named_barrier_sync(3 + group, 128);
    }

    // Afterwards the warpgroup does not read the tile any more.
    __device__ __forceinline__ void finish_adding() {
        wgmma_wait<0>();
#pragma unroll
        for (auto& half : o) pin(half);
        named_barrier_sync(3 + group, 128);
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
                const int i = n * 4 + 2 * half, of_half = columns / 4;
                const float even = o[i / of_half][i % of_half], odd = o[i / of_half][i % of_half + 1];
                if constexpr (partial)
                    *reinterpret_cast<float2*>(work.part_of(args, row) + first + 8 * n) = make_float2(even, odd);
                else
                    *reinterpret_cast<std::uint32_t*>(work.o_of(args, row) + first + 8 * n) =
                        pack<typename Row::otype>(even, odd);
            }
        }
    }

   private:
    const int group, lane;
    float o[2][columns / 4];  // either half of the columns in the layout of an accumulator; see wgmma.hpp
};

}  // namespace catalog::cuda
