// Steps between Q K^T and the softmax: scales of quantised tensors, soft cap, bias, ALiBi.
//
// Scores are in base 2, that is multiplied by log2(e), so that the softmax needs no further factor.
#pragma once

#include <type_traits>

#include "call.hpp"
#include "host/fp8.hpp"
#include "kv.hpp"
#include "softmax.hpp"

namespace catalog::host {

inline constexpr float log2_e = 0x1.715476p+0f;
inline constexpr float ln_2 = 0x1.62e43p-1f;

// 0, 1, 2, ...
inline Float iota() {
    Float x;
    for (int i = 0; i < lanes; ++i) x[i] = static_cast<float>(i);
    return x;
}

inline Float abs(Float x) { return (Float)((Bits)x & 0x7fffffff); }

// Error: at most 2 ulp near zero, where the quotient would cancel, and 2^-23 elsewhere.
inline Float tanh(Float x) {
    const Float size = abs(x), square = x * x;
    const Float t = exp2(size * (-2.0f * log2_e));
    const Float far = (1.0f - t) / (1.0f + t);
    Float p = splat(0x1.664f48p-6f);  // Taylor: 62/2835, -17/315, 2/15, -1/3
    p = p * square - 0x1.ba1ba2p-5f;
    p = p * square + 0x1.111112p-3f;
    p = p * square - 0x1.555556p-2f;
    const Float near = size * square * p + size;
    const Float result = size < 0.25f ? near : far;
    return (Float)((Bits)result | ((Bits)x & 0x80000000));
}

// The scores of one work item: a head of K and V of one sequence.
template <class Row>
class Scores {
   public:
    Scores(const catalog_args& args, const Sequence& seq, const Window& window)
        : args(args), seq(seq), window(window) {}

    // The factor of Q before Q K^T.
    float query_scale(std::int64_t head, std::int64_t query) const {
        float scale = args.scale * (Row::logits ? 1.0f / args.logits_soft_cap : log2_e);
        if constexpr (Row::qscale != Qscale::none && has_query_bytes<Row>) scale *= q_descale(head, query);
        if constexpr (Row::qscale == Qscale::pertensor) scale *= *list_of<float>(args.k_descale);
        return scale;
    }

    // Turns Q K^T into scores, for the keys from `key` on. `key_scales` are the factors of quantised keys.
    void finish(std::int64_t head, std::int64_t query, std::int64_t key, int columns, const float* key_scales,
                float* scores) const {
        if constexpr (has_key_scales<Row>)
            each(columns, scores, [&](int j, Float s) { return s * load(key_scales + j); });
        if constexpr (Row::logits) {
            const float cap = args.logits_soft_cap * log2_e;
            each(columns, scores, [&](int, Float s) { return tanh(s) * cap; });
        }
        if constexpr (Row::bias == Bias::bias) {
            const auto* bias = rows_of<const BiasElement<Row>>(args.bias, seq.batch, head, seq.first_q)[query] + key;
            const std::int64_t stored = seq.seqlen_k - key;
            each(columns, scores, [&](int j, Float s) { return s + load_first(bias + j, stored - j) * log2_e; });
        }
        if constexpr (Row::bias == Bias::alibi) {
            const Float distance = iota() + static_cast<float>(key - window.center(query));
            const float slope = slope_of(head) * log2_e;
            each(columns, scores, [&](int j, Float s) {
                const Float d = distance + static_cast<float>(j);
                return s + (Row::mask == Mask::causal ? d : -abs(d)) * slope;
            });
        }
    }

    // Sets what the query does not see to -infinity, for the keys from `first_key` on.
    void hide_masked(std::int64_t query, std::int64_t first_key, int columns, float* scores) const {
        const auto column_of = [&](std::int64_t key) { return std::clamp<std::int64_t>(key - first_key, 0, columns); };
        const KeyRange seen = window.visible(query);
        const std::int64_t end = column_of(seen.end), begin = std::min(column_of(seen.begin), end);
        const std::int64_t sinks = Row::sink ? std::min(column_of(window.sinks), begin) : 0;
        std::fill(scores + sinks, scores + begin, -infinity);
        std::fill(scores + end, scores + columns, -infinity);
    }

    // The amount by which this query's scores are too small, in natural units. Under a causal mask ALiBi adds slope *
    // key; the kernel adds slope * (key - diagonal), which is as small as the distance and so more precise.
    float shift(std::int64_t head, std::int64_t query) const {
        if constexpr (Row::bias == Bias::alibi && Row::mask == Mask::causal)
            return slope_of(head) * static_cast<float>(window.center(query));
        return 0.0f;
    }

   private:
    float q_descale(std::int64_t head, std::int64_t query) const {
        const auto* descale = list_of<float>(args.q_descale);
        if constexpr (Row::qscale != Qscale::blockscale) return *descale;
        return descale[seq.index * args.q_descale.stride_batch + head * args.q_descale.stride_nhead +
                       query / args.block_scale_size_q * args.q_descale.stride_seqlen];
    }

    float slope_of(std::int64_t head) const {
        return list_of<float>(
            args.alibi_slopes)[seq.index * args.alibi_slopes.stride_batch + head * args.alibi_slopes.stride_nhead];
    }

    template <class Body>
    static void each(int columns, float* scores, Body body) {
        for (int j = 0; j < columns; j += lanes) store(scores + j, body(j, load(scores + j)));
    }

    const catalog_args& args;
    const Sequence& seq;
    const Window& window;
};

}  // namespace catalog::host
