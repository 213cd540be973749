// Combines the parts of a split forward: O is their mean weighted by exp(LSE of the part).
#pragma once

#include "host/math.hpp"
#include "rows.hpp"
#include "softmax.hpp"

namespace catalog::host {

template <class Row>
inline void combine_row(const catalog_args& args, const QueryRow& at) {
    using Output = typename Row::otype;
    const auto lse_of = [&](std::int64_t split) { return *at.of<const float>(args.lse_acc, split); };
    float max = -infinity;
    for (std::int64_t split = 0; split < args.num_splits; ++split) max = std::max(max, lse_of(split));
    const float reference = max == -infinity ? 0.0f : max;  // a row that sees no key
    float sum = 0.0f;
    for (std::int64_t split = 0; split < args.num_splits; ++split) sum += exp(lse_of(split) - reference);

    const float normalize = sum == 0 ? 0.0f : 1.0f / sum;
    Output* o = at.of<Output>(args.o);
    for (std::int64_t d = 0; d < args.hdim_v; d += lanes) {
        Float total = {};
        for (std::int64_t split = 0; split < args.num_splits; ++split) {
            const float weight = exp(lse_of(split) - reference) * normalize;
            total += load_first(at.of<const float>(args.o_acc, split) + d, args.hdim_v - d) * weight;
        }
        store_first(o + d, total, args.hdim_v - d);
    }
    if constexpr (Row::lse) *at.of<float>(args.lse) = reference + log(sum);
}

template <class Row>
inline std::int32_t launch_fmha_fwd_splitkv_combine(const catalog_args* args) noexcept {
    if (const catalog_status status = check_rows<Row>(args); status != CATALOG_OK) return status;
    if (has_rows<Row>(*args) &&
        (!args->o.data || !args->o_acc.data || !args->lse_acc.data || (Row::lse && !args->lse.data)))
        return CATALOG_BAD_ARGUMENT;
    return for_rows<Row>(*args, [&](const QueryRow& at) { combine_row<Row>(*args, at); });
}

}  // namespace catalog::host
