// The rows of a block on their way through their keys with mma.sync: each thread has scores, weights, and part of what
// its warp's rows have accumulated.
#pragma once

#include "mma_results.hpp"
#include "wgmma_tile.hpp"

namespace catalog::cuda {

template <class Row, bool partial>
class MmaRows {
    using T = QueryElement<Row>;
    using Shape = MmaShape<Row>;
    static constexpr int atoms = Shape::atoms, keys = Shape::keys, hdim_v = Row::hdim_v;

   public:
    // `q`: the rows of Q in shared memory; `stored`: the keys that there are.
    __device__ __forceinline__ MmaRows(const catalog_args& args, const MmaWork<Row, partial>& work, std::uint32_t q,
                                       KeyRange stored)
        : args(args),
          work(work),
          thread(0),
          window(window_of<Row::mask>(args, work.seq.seqlen_q, work.seq.seqlen_k, stored)),
          scores(work.grid.scores),
          tile(q) {
        if constexpr (Row::qscale == Qscale::pertensor)
            scores.multiply((has_query_bytes<Row> ? *static_cast<const float*>(args.q_descale.data) : 1.0f) *
                            *static_cast<const float*>(args.k_descale.data));
#pragma unroll
        for (int m = 0; m < atoms; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                max[m][half] = minus_infinity();
                sum[m][half] = 0.0f;
            }
    }

    // Q has arrived in shared memory.
    __device__ __forceinline__ void load_queries() { tile.load_queries(); }

    // Keys that some, or that every, row sees, sinks aside.
    __device__ __forceinline__ KeyRange seen_by_some() const { return cuda::seen_by_some(first_seen(), last_seen()); }
    __device__ __forceinline__ KeyRange seen_by_all() const { return cuda::seen_by_all(first_seen(), last_seen()); }

    // First keys that queries see although left of the window.
    __device__ __forceinline__ int sinks() const {
        return Row::sink ? clamp_length(args.sink_size, work.seq.seqlen_k) : 0;
    }

    // The group's keys of the tile that begins at `key`, in shared memory at `k`, are weighed. `all`: keys that every row
    // sees.
    __device__ __forceinline__ void weigh_keys(std::uint32_t k, int key, KeyRange all) {
        tile.multiply_q_k(k, zero_of(key));
        finish_scores(key + thread.warp_n * keys, all);
        weigh();
    }

    // Their values are added.
    __device__ __forceinline__ void add_values(std::uint32_t v, int key) { tile.multiply_p_v(v, zero_of(key)); }

    // What is accumulated goes to where `target` says. For `zero` see zero_of.
    template <class Target>
    __device__ __forceinline__ void store(const Target& target, const MergeRoom<Row>& room, int zero) {
        if constexpr (has_bytes<Row>) tile.order_columns();
#pragma unroll
        for (int m = 0; m < atoms; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) max[m][half] *= scores.exponent;
        MmaResults<Row, Target>(args, target, room, tile.o, max, sum, zero).finish();
    }

   private:
    __device__ __forceinline__ KeyRange first_seen() const { return window.visible(work.row_at(0).query); }
    __device__ __forceinline__ KeyRange last_seen() const { return window.visible(work.row_at(work.rows - 1).query); }

    // Of a row of the tile; behind the last one those of the last.
    __device__ __forceinline__ const T* biases_of(int row) const {
        const QueryRow at = work.row_at(::min(row, work.rows - 1));
        return rows_of<const T>(args.bias, work.seq.batch, work.head_of(at), work.seq.first_q + at.query);
    }

    // Products become scores, -infinity where the query does not see the key. `all`: keys that every row sees.
    __device__ __forceinline__ void finish_scores(int key, KeyRange all) {
        const bool hidden = key < all.begin || all.end < key + keys;
        if (!Scores<Row>::finished && !hidden) return;
        const MmaThread<Row> thread(zero_of(key));
#pragma unroll
        for (int m = 0; m < atoms; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const QueryRow at = work.row_at(thread.row(m, half));
                const int first = key + thread.lane % 4 * 2;
                if constexpr (Scores<Row>::finished) {
                    [[maybe_unused]] const T* const biases = biases_of(thread.row(m, half)) + first;
                    const float slope = Row::bias == Bias::alibi ? slope_of(args, work.seq.index, work.head_of(at)) : 0;
                    const int distance = first - window.center(at.query);
#pragma unroll
                    for (int n = 0; n < keys / 8; ++n)
#pragma unroll
                        for (int c = 0; c < 2; ++c) {
                            float& score = tile.s[m][n][2 * half + c];
                            float bias = 0;
                            if constexpr (Row::bias == Bias::bias)
                                if (first + 8 * n + c < work.seq.seqlen_k) bias = static_cast<float>(biases[8 * n + c]);
                            score = scores.finish(score, bias, slope, distance + 8 * n + c);
                        }
                }
                if (!hidden) continue;
                const KeyRange seen = window.visible(at.query);
#pragma unroll
                for (int n = 0; n < keys / 8; ++n)
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        const int column = 8 * n + c;
                        bool before = Row::mask == Mask::generic && column < seen.begin - first;
                        if constexpr (Row::sink) before &= column >= sinks() - first;
                        if (before || column >= seen.end - first) tile.s[m][n][2 * half + c] = minus_infinity();
                    }
            }
    }

    // Scores become weights, relative to the largest score so far, or to an earlier one that was less than 2^8 times
    // smaller: they fit any type, and few tiles change what earlier tiles have accumulated.
    __device__ __forceinline__ void weigh() {
        float rescale[atoms][2];
        bool changed = false;
#pragma unroll
        for (int m = 0; m < atoms; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float& reference = max[m][half];
                float largest = minus_infinity();
#pragma unroll
                for (int n = 0; n < keys / 8; ++n)
                    largest = fmaxf(largest, fmaxf(tile.s[m][n][2 * half], tile.s[m][n][2 * half + 1]));
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 1));
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 2));
                const bool grows = (largest - reference) * scores.exponent > 8.0f;
                rescale[m][half] = grows ? exp2_approximate((reference - largest) * scores.exponent) : 1.0f;
                reference = grows ? largest : reference;
                changed |= grows;
                sum[m][half] *= rescale[m][half];
            }
        if (__any_sync(0xffffffff, changed))
#pragma unroll
            for (int m = 0; m < atoms; ++m)
#pragma unroll
                for (int n = 0; n < hdim_v / 8; ++n)
#pragma unroll
                    for (int c = 0; c < 4; ++c) tile.o[m][n][c] *= rescale[m][c / 2];
#pragma unroll
        for (int m = 0; m < atoms; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // A row that has seen no key: subtracting -infinity from itself would give NaN.
                const float zero = max[m][half] == minus_infinity() ? 0.0f : max[m][half] * scores.exponent;
#pragma unroll
                for (int n = 0; n < keys / 8; ++n)
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        float& weight = tile.s[m][n][2 * half + c];
                        weight = exp2_approximate(fmaf(weight, scores.exponent, -zero));
                        sum[m][half] += weight;
                    }
            }
    }

    const catalog_args& args;
    const MmaWork<Row, partial>& work;
    const MmaThread<Row> thread;
    const Window<Row::mask> window;
    // The launch's, unless tensors have factors.
    std::conditional_t<Row::qscale == Qscale::none, const Scores<Row>&, Scores<Row>> scores;
    std::conditional_t<by_warpgroup<Row>, WgmmaTile<Row>, MmaTile<Row>> tile;
    float max[atoms][2], sum[atoms][2];  // of the lane's rows: what weights are relative to, the lane's part of the sum
};

}  // namespace catalog::cuda
