// What happens to a warpgroup's scores between Q K^T and P V, in registers: soft cap, ALiBi, mask, online softmax.
//
// A thread has two rows of a tile, 8 apart; element i of its accumulator is in row i / 2 % 2. Scores are in units of
// the base 2 once they are multiplied with `scale`.
#pragma once

#include "fwd_wgmma_work.hpp"
#include "cuda/hopper.hpp"

namespace catalog::cuda {

inline constexpr float infinity = __builtin_huge_valf();
// The column of element i, without that of the thread's first.
__host__ __device__ constexpr int column_of(int i) { return i / 4 * 8 + i % 2; }

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(all_lanes, x, 1));
    return fmaxf(x, __shfl_xor_sync(all_lanes, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(all_lanes, x, 1);
    return x + __shfl_xor_sync(all_lanes, x, 2);
}

// log(exp(a) + exp(b))
__device__ __forceinline__ float log_add(float a, float b) {
    const float larger = fmaxf(a, b);
    return larger == -infinity ? larger : larger + log1pf(expf(fminf(a, b) - larger));
}

template <class Row>
class Softmax {
   public:
    static constexpr int keys = Row::tile_n0, elements = keys / 2;
    static constexpr bool alibi = Row::bias == Bias::alibi;
    // Otherwise the scale is part of the argument of 2^x.
    static constexpr bool scaled_before = Row::logits || alibi;

    // `query` is the first of the thread's rows.
    __device__ __forceinline__ Softmax(const FwdCall& call, const Work<Row>& work, int query)
        : call(call), scale(scaled_before ? 1.0f : call.scale) {
        const int lane_column = 2 * (threadIdx.x % 4);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const KeyRange seen = work.visible(query + 8 * r);
            begin[r] = seen.begin - lane_column;
            end[r] = seen.end - lane_column;
            center[r] = query + 8 * r + work.diagonal - lane_column;
            max[r] = -infinity;
            sum[r] = 0.0f;
        }
        if constexpr (alibi)
            slope = call.alibi_slopes[work.batch * call.alibi_stride_batch + work.head * call.alibi_stride_nhead];
    }

    // Soft cap and ALiBi; what a row does not see becomes -infinity. `key` is the tile's first.
    template <bool masked>
    __device__ __forceinline__ void finish_scores(float (&s)[elements], int key) const {
        if constexpr (Row::logits) {
            // tanh(x) = 1 - 2 / (1 + exp(2 x)): its absolute error counts, which is that of float32.
#pragma unroll
            for (int i = 0; i < elements; ++i)
                s[i] = call.soft_cap * (1.0f - __fdividef(2.0f, 1.0f + exp2_approximate(s[i] * call.scale)));
        }
        if constexpr (alibi) {
            const float steep = slope * log2_e;
#pragma unroll
            for (int i = 0; i < elements; ++i) {
                const float distance = static_cast<float>(key - center[i / 2 % 2]) + static_cast<float>(column_of(i));
                s[i] = fmaf(Row::mask == Mask::causal ? distance : -fabsf(distance), steep, s[i] * call.scale);
            }
        }
        if constexpr (masked) {
            const int first[2] = {begin[0] - key, begin[1] - key}, past[2] = {end[0] - key, end[1] - key};
#pragma unroll
            for (int i = 0; i < elements; ++i) {
                const int r = i / 2 % 2;
                const bool seen = column_of(i) < past[r] && (Row::mask != Mask::generic || column_of(i) >= first[r]);
                s[i] = seen ? s[i] : -infinity;
            }
        }
    }

    // Turns scores into weights. True: some row's `factor`, which its earlier weights are to be multiplied with, is not
    // 1.
    //
    // Weights are relative to the largest score so far, or to an earlier one that was less than 2^8 times smaller: they
    // fit any type, and most tiles change no factor.
    __device__ __forceinline__ bool weigh(float (&s)[elements], float (&factor)[2]) {
        bool changed = false;
        float reference[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float even = s[2 * r], odd = s[2 * r + 1];
#pragma unroll
            for (int i = 4 + 2 * r; i < elements; i += 4) {
                even = fmaxf(even, s[i]);
                odd = fmaxf(odd, s[i + 1]);
            }
            const float largest = quad_max(fmaxf(even, odd));
            const bool grows = (largest - max[r]) * scale > 8.0f;
            factor[r] = grows ? exp2_approximate((max[r] - largest) * scale) : 1.0f;
            max[r] = grows ? largest : max[r];
            changed |= grows;
            // A row that has seen no key: subtracting -infinity from itself would give NaN.
            reference[r] = max[r] == -infinity ? 0.0f : max[r] * scale;
        }
        float total[2][2] = {};
#pragma unroll
        for (int i = 0; i < elements; ++i) {
            const int r = i / 2 % 2;
            s[i] = exp2_approximate(fmaf(s[i], scale, -reference[r]));
            total[r][i % 2] += s[i];
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) sum[r] = fmaf(sum[r], factor[r], total[r][0] + total[r][1]);
        return __any_sync(all_lanes, changed);
    }

    // The log-sum-exp of a row, and the factor that makes its weights add up to 1; the quad's lanes together.
    struct Total {
        float lse, normalize;
    };

    __device__ __forceinline__ Total finish(const Work<Row>& work, int r) const {
        const float all = quad_sum(sum[r]);
        Total total{(max[r] * scale + log2f(all)) * ln_2, all == 0.0f ? 0.0f : 1.0f / all};
        if (max[r] == -infinity) total.lse = -infinity;
        // Under a causal mask the scores are slope * (key - center); they should be slope * key.
        if constexpr (alibi && Row::mask == Mask::causal)
            total.lse += slope * static_cast<float>(center[r] + 2 * static_cast<int>(threadIdx.x % 4));
        if (call.sink) {
            const float with_sink = log_add(total.lse, call.sink[work.head * call.sink_stride]);
            if (with_sink != -infinity) total.normalize *= expf(total.lse - with_sink);
            total.lse = with_sink;
        }
        return total;
    }

   private:
    const FwdCall& call;
    const float scale;
    float slope;
    int begin[2], end[2], center[2];  // without the thread's first column
    float max[2], sum[2];
};

}  // namespace catalog::cuda
