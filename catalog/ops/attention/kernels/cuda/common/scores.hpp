// What happens to a product of a query and a key before the softmax: scale, soft cap, bias, ALiBi.
//
// The softmax takes powers of 2. Where nothing but the scale applies, scores stay as they come out of the matrix units,
// and their scale is part of the exponent; else they are finished here, in units of log2.
#pragma once

#include <cmath>

#include "exponentials.hpp"
#include "factors.hpp"
#include "mask.hpp"
#include "sequence.hpp"

namespace catalog::cuda {

inline constexpr float ln_2 = 0x1.62e43p-1f;

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// The slope of a query head's ALiBi, in units of log2.
__device__ __forceinline__ float slope_of(const catalog_args& args, int sequence, int head) {
    return log2_e * static_cast<const float*>(args.alibi_slopes.data)[sequence * args.alibi_slopes.stride_batch +
                                                                      head * args.alibi_slopes.stride_nhead];
}

template <class Row>
struct Scores {
    // Whether scores are finished before the softmax.
    static constexpr bool finished = Row::logits || Row::bias != Bias::none ||
                                     Row::qscale == Qscale::kv_blockscale || Row::qscale == Qscale::blockscale;

    float scale;     // of products
    float exponent;  // of scores, in the softmax
    float cap;

    __host__ explicit Scores(const catalog_args& args)
        : scale(positive_scale(args) * (Row::logits ? 1.0f / args.logits_soft_cap : log2_e)),
          exponent(finished ? 1.0f : scale),
          cap(args.logits_soft_cap * log2_e) {}

    // The softmax insists on a positive scale: what is negative about it, or zero, goes to the queries.
    static __host__ float positive_scale(const catalog_args& args) {
        return args.scale == 0.0f ? 1.0f : std::fabs(args.scale);
    }

    // Products have factors, those of Q and K.
    __device__ __forceinline__ void multiply(float factors) {
        scale = scale_with(scale, factors);
        if constexpr (!finished) exponent = scale;
    }

    // The score of a product. `distance`: of the key from the query, positive to its right.
    __device__ __forceinline__ float finish(float product, float bias, float slope, int distance) const {
        float score = product * scale;
        if constexpr (Row::logits) score = tanh_exact(score) * cap;
        if constexpr (Row::bias == Bias::bias) score = fmaf(bias, log2_e, score);
        if constexpr (Row::bias == Bias::alibi) {
            const float d = static_cast<float>(distance);
            score = fmaf(Row::mask == Mask::causal ? d : -fabsf(d), slope, score);
        }
        return score;
    }
};

// What a row's O is multiplied with at the end, and its LSE.
struct RowEnd {
    float normalize, lse;
};

// `max` in units of log2, `sum` of powers of 2 above it. `center`: the key that the query is aligned with.
template <class Row>
__device__ __forceinline__ RowEnd end_of_row(const catalog_args& args, float max, float sum, int sequence, int head,
                                             int center, bool first_split) {
    float normalize = sum == 0.0f ? 0.0f : 1.0f / sum;  // a row that sees no key is zero
    float lse = max * ln_2 + logf(sum);
    // Under a causal mask ALiBi adds slope * key; the kernel adds slope * distance, which keeps its precision.
    if constexpr (Row::bias == Bias::alibi && Row::mask == Mask::causal)
        lse += slope_of(args, sequence, head) * ln_2 * static_cast<float>(center);
    // One more logit, without a value; of several splits the first has it.
    if (args.sink.data && first_split) {
        const float sink = static_cast<const float*>(args.sink.data)[head * args.sink.stride_nhead];
        const float larger = fmaxf(lse, sink);
        const float with_sink =
            larger == minus_infinity() ? larger : larger + log1pf(expf(fminf(lse, sink) - larger));
        if (with_sink != minus_infinity()) normalize *= expf(lse - with_sink);
        lse = with_sink;
    }
    return {normalize, lse};
}

}  // namespace catalog::cuda
