// The rows of a block on their way through their keys with mma.sync: each thread has scores, weights, and part of what
// its warp's rows have accumulated.
#pragma once

#include "key_factors.hpp"
#include "mma_dropout.hpp"
#include "mma_results.hpp"
#include "row_scores.hpp"
#include "tf32_tile.hpp"
#include "wgmma_tile.hpp"

namespace catalog::cuda {

template <class Row, bool partial>
class MmaRows {
    using T = QueryElement<Row>;
    using Shape = MmaShape<Row>;
    static constexpr int atoms = Shape::atoms, keys = Shape::keys, hdim_v = Row::hdim_v;
    static constexpr bool has_factor =
        Row::qscale == Qscale::pertensor || (has_key_factors<Row> && has_query_bytes<Row>);

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
        if constexpr (has_factor) {
            float factor = has_query_bytes<Row> ? *static_cast<const float*>(args.q_descale.data) : 1.0f;
            if constexpr (Row::qscale == Qscale::pertensor) factor *= *static_cast<const float*>(args.k_descale.data);
            scores.multiply(factor);
        }
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

    // The group's keys of the tile that begins at `key`, in shared memory at `k`, are weighed. `all`: keys that every row
    // sees.
    __device__ __forceinline__ void weigh_keys(std::uint32_t k, int key, KeyRange all) {
        if constexpr (has_key_factors<Row>)
            if (const float change = key_factors.find_unit(k); change != 1.0f)
                multiply_o([&](int, int) { return change; });
        tile.multiply_q_k(k, zero_of(key));
        if constexpr (has_key_factors<Row>) key_factors.multiply_scores(tile.s, k);
        finish_scores(key + thread.warp_n * keys, all);
        weigh();
        if constexpr (Row::dropout) drop(args, work, MmaThread<Row>(zero_of(key)), key + thread.warp_n * keys, tile.s);
        if constexpr (has_key_factors<Row>) key_factors.multiply_weights(tile.s, k);
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
        if constexpr (has_key_factors<Row>) multiply_o([&](int, int) { return key_factors.unit; });
        MmaResults<Row, Target>(args, target, room, tile.o, max, sum, zero).finish();
    }

   private:
    __device__ __forceinline__ KeyRange first_seen() const { return window.visible(work.row_at(0).query); }
    __device__ __forceinline__ KeyRange last_seen() const { return window.visible(work.row_at(work.rows - 1).query); }

    // Products become scores, -infinity where the query does not see the key. `all`: keys that every row sees.
    __device__ __forceinline__ void finish_scores(int key, KeyRange all) {
        const bool hidden = key < all.begin || all.end < key + keys;
        if (!Scores<Row>::finished && !hidden) return;
        const MmaThread<Row> thread(zero_of(key));
#pragma unroll
        for (int m = 0; m < atoms; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                finish_row<keys>(args, work, scores, window, thread.row(m, half), key + LaneKeys<Row>::first(thread.lane),
                                 hidden, [&](int n, int c) -> float& { return tile.s[m][n][2 * half + c]; });
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
        if (__any_sync(0xffffffff, changed)) multiply_o([&](int m, int half) { return rescale[m][half]; });
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

    // `by`: what a row, of the warp's 16 number m, is multiplied with.
    template <class Function>
    __device__ __forceinline__ void multiply_o(const Function& by) {
#pragma unroll
        for (int m = 0; m < atoms; ++m)
#pragma unroll
            for (int n = 0; n < hdim_v / 8; ++n)
#pragma unroll
                for (int c = 0; c < 4; ++c) tile.o[m][n][c] *= by(m, c / 2);
    }

    const catalog_args& args;
    const MmaWork<Row, partial>& work;
    const MmaThread<Row> thread;
    const Window<Row::mask> window;
    // The launch's, unless all products have a factor.
    std::conditional_t<has_factor, Scores<Row>, const Scores<Row>&> scores;
    using OfWarp = std::conditional_t<std::is_same_v<T, float>, Tf32Tile<Row>, MmaTile<Row>>;
    std::conditional_t<by_warpgroup<Row>, WgmmaTile<Row>, OfWarp> tile;
    KeyFactors<Row> key_factors;
    float max[atoms][2], sum[atoms][2];  // of the lane's rows: what weights are relative to, the lane's part of the sum
};

}  // namespace catalog::cuda
