// What happens to a warpgroup's scores between Q K^T and P V, in registers: factors of quantised tensors, soft cap, bias,
// ALiBi, mask, online softmax, dropout.
//
// Weights in fp8 are 2^lift times as large as others, since what is below 2^-9 would be lost. Where blocks of values
// have factors of their own, their logarithms are added to the scores that the weights are the powers of, and the sum of
// a block's weights is divided by its factor.
//
// A thread has two rows of a tile, 8 apart; element i of its accumulator is in row i / 2 % 2. Scores are in units of
// the base 2 once they are multiplied with `scale`.
#pragma once

#include "fwd_wgmma_work.hpp"
#include "cuda/common/factors.hpp"
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
    using T = typename Row::dtype;
    using B = BiasElement<Row>;

   public:
    static constexpr int keys = Row::tile_n0, elements = keys / 2;
    static constexpr bool alibi = Row::bias == Bias::alibi, biased = Row::bias == Bias::bias;
    // Otherwise the scale is part of the argument of 2^x.
    static constexpr bool scaled_before = Row::logits || alibi || biased;
    static constexpr bool by_tensor = Row::qscale == Qscale::pertensor, by_blocks = Row::qscale == Qscale::blockscale;
    static constexpr float lift = std::is_same_v<T, fp8> ? 5.0f : 0.0f;
    // Weights up to 2^room times those of the largest score so far fit their type.
    static constexpr float room = std::is_same_v<T, fp8> ? 3.0f : 8.0f;

    // `query` is the first of the thread's rows.
    __device__ __forceinline__ Softmax(const FwdCall& call, const Work<Row>& work, int query)
        : call(call), batch(work.batch), head(work.head), head_k(call.of_kv_head.quotient(work.head)) {
        const int lane_column = 2 * (threadIdx.x % 4);
        if constexpr (Row::sink) sinks = work.sinks - lane_column;
        if constexpr (Row::dropout) {
            this->query = query;
            instance = work.batch * call.nhead_q + work.head;
        }
        if constexpr (by_tensor) of_q_k[0] = of_q_k[1] = scale_with(call.scale, *call.q_descales.data * *call.k_descales.data);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const KeyRange seen = work.visible(query + 8 * r);
            begin[r] = seen.begin - lane_column;
            end[r] = seen.end - lane_column;
            center[r] = query + 8 * r + work.diagonal - lane_column;
            max[r] = -infinity;
            sum[r] = 0.0f;
            if constexpr (by_blocks) of_q[r] = call.q_descales.of(batch, head, min(query + 8 * r, work.seqlen_q - 1));
            if constexpr (biased) {
                const ByteStrides& strides = call.bias_strides;
                const std::int64_t row = work.first_q + min(query + 8 * r, work.seqlen_q - 1);
                const std::int64_t offset = (Work<Row>::group ? 0 : work.batch) * strides.batch +
                                            work.head * strides.nhead + row * strides.seqlen;
                bias[r] = reinterpret_cast<const B*>(static_cast<const char*>(call.bias) + offset) + lane_column;
            }
        }
        if constexpr (alibi)
            slope = call.alibi_slopes[work.batch * call.alibi_stride_batch + work.head * call.alibi_stride_nhead];
    }

    // Reads the factors of the tile whose first key is `key`, before its scores are finished.
    __device__ __forceinline__ void read_factors(int key) {
        if constexpr (by_blocks) {
            const float of_k = call.k_descales.of(batch, head_k, key);
            of_v = call.v_descales.of(batch, head_k, key);
            for (int r = 0; r < 2; ++r) of_q_k[r] = scale_with(call.scale, of_q[r] * of_k);
        }
    }

    // Soft cap, bias and ALiBi; what a row does not see becomes -infinity. `key` is the tile's first.
    template <bool masked>
    __device__ __forceinline__ void finish_scores(float (&s)[elements], int key) const {
        if constexpr (Row::logits) {
            // tanh(x) = 1 - 2 / (1 + exp(2 x)): its absolute error counts, which is that of float32.
#pragma unroll
            for (int i = 0; i < elements; ++i)
                s[i] = call.soft_cap *
                       (1.0f - __fdividef(2.0f, 1.0f + exp2_approximate(s[i] * product_scale_of(i / 2 % 2))));
        }
        if constexpr (biased) {
#pragma unroll
            for (int i = 0; i < elements; ++i) {
                const int r = i / 2 % 2;
                const bool there = !masked || column_of(i) < end[r] - key;
                const float added = there ? static_cast<float>(bias[r][key + column_of(i)]) : 0.0f;
                s[i] = fmaf(added, log2_e, s[i] * product_scale_of(r));
            }
        }
        if constexpr (alibi) {
            const float steep = slope * log2_e;
#pragma unroll
            for (int i = 0; i < elements; ++i) {
                const float distance = static_cast<float>(key - center[i / 2 % 2]) + static_cast<float>(column_of(i));
                const float score = s[i] * product_scale_of(i / 2 % 2);
                s[i] = fmaf(Row::mask == Mask::causal ? distance : -fabsf(distance), steep, score);
            }
        }
        if constexpr (masked) {
            const int first[2] = {begin[0] - key, begin[1] - key}, past[2] = {end[0] - key, end[1] - key};
#pragma unroll
            for (int i = 0; i < elements; ++i) {
                const int r = i / 2 % 2;
                const bool is_sink = Row::sink && column_of(i) < sinks - key;
                const bool seen =
                    column_of(i) < past[r] && (Row::mask != Mask::generic || column_of(i) >= first[r] || is_sink);
                s[i] = seen ? s[i] : -infinity;
            }
        }
    }

    // Turns scores into weights. True: some row's `factor`, which its earlier weights are to be multiplied with, is not
    // 1.
    //
    // Weights are relative to the largest score so far, or to an earlier one that was less than 2^room times smaller:
    // they fit any type, and most tiles change no factor.
    __device__ __forceinline__ bool weigh(float (&s)[elements], float (&factor)[2]) {
        // Of values without any the logarithm would be -infinity.
        const float factor_of_v = by_blocks && of_v >= 0.0f ? fmaxf(of_v, 0x1p-100f) : of_v;
        const float shift = by_blocks ? log2f(factor_of_v) : 0.0f;
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
            const float largest = fmaf(quad_max(fmaxf(even, odd)), scale_of(r), shift);
            const bool grows = largest - max[r] > room;
            factor[r] = grows ? exp2_approximate(max[r] - largest) : 1.0f;
            max[r] = grows ? largest : max[r];
            changed |= grows;
            // A row that has seen no key: subtracting -infinity from itself would give NaN.
            reference[r] = max[r] == -infinity ? 0.0f : max[r] - shift - lift;
        }
        float total[2][2] = {};
#pragma unroll
        for (int i = 0; i < elements; ++i) {
            const int r = i / 2 % 2;
            s[i] = exp2_approximate(fmaf(s[i], scale_of(r), -reference[r]));
            total[r][i % 2] += s[i];
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float of_tile = total[r][0] + total[r][1];
            sum[r] = fmaf(sum[r], factor[r], by_blocks ? of_tile / factor_of_v : of_tile);
        }
        return __any_sync(all_lanes, changed);
    }

    // Weights that are dropped become 0; `key` is the tile's first.
    __device__ __forceinline__ void drop(float (&p)[elements], int key) const {
        drop_weights<keys>(p, key, [&](int r, int first) { return call.dropout.kept(instance, query + 8 * r, first); });
    }

    // The log-sum-exp of a row, and the factor that makes its weights add up to 1; the quad's lanes together.
    struct Total {
        float lse, normalize;
    };

    __device__ __forceinline__ Total finish(const Work<Row>& work, int r) const {
        const float all = quad_sum(sum[r]);
        Total total{(max[r] - lift + log2f(all)) * ln_2, all == 0.0f ? 0.0f : 1.0f / all};
        if (max[r] == -infinity) total.lse = -infinity;
        // Under a causal mask the scores are slope * (key - center); they should be slope * key.
        if constexpr (alibi && Row::mask == Mask::causal)
            total.lse += slope * static_cast<float>(center[r] + 2 * static_cast<int>(threadIdx.x % 4));
        if (call.sink) {
            const float with_sink = log_add(total.lse, call.sink[work.head * call.sink_stride]);
            if (with_sink != -infinity) total.normalize *= expf(total.lse - with_sink);
            total.lse = with_sink;
        }
        if constexpr (Row::dropout) total.normalize *= call.dropout.scale;
        if constexpr (by_tensor) total.normalize *= *call.v_descales.data;
        return total;
    }

   private:
    // What products of row r are multiplied with.
    __device__ __forceinline__ float product_scale_of(int r) const {
        return by_tensor || by_blocks ? of_q_k[r] : call.scale;
    }
    // What finished scores are multiplied with.
    __device__ __forceinline__ float scale_of(int r) const { return scaled_before ? 1.0f : product_scale_of(r); }

    const FwdCall& call;
    const int batch, head, head_k;
    float slope;
    int query, instance;              // the first row's; the head's number among those of all sequences
    float of_q[2], of_q_k[2], of_v;   // factors
    int begin[2], end[2], center[2];  // without the thread's first column
    int sinks;                        // likewise
    const B* bias[2];                 // of the thread's rows, from its first column on
    float max[2], sum[2];
};

}  // namespace catalog::cuda
