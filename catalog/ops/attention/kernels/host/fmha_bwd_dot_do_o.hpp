// Backward attention, first stage: delta of a query row is the sum of dO * O over the head dim, less the LSE gradient.
//
// O contributes dS = P * (dP - sum of dO * O); LSE adds P * dLSE, because P is its derivative with respect to S.
#pragma once

#include "rows.hpp"
#include "softmax.hpp"

namespace catalog::host {

template <class Row>
inline void dot_row(const catalog_args& args, const QueryRow& at) {
    using Output = typename Row::otype;
    const Output *grad_o = at.of<const Output>(args.grad_o), *o = at.of<const Output>(args.o);
    Float sum = {};
    for (std::int64_t d = 0; d < args.hdim_v; d += lanes)
        sum += load_first(grad_o + d, args.hdim_v - d) * load_first(o + d, args.hdim_v - d);
    // The LSE of a row that sees no key is constant, so its gradient must not reach the keys.
    const bool has_dlse = args.dlse.data && *at.of<const float>(args.lse) != -infinity;
    *at.of<float>(args.delta) = reduce_sum(sum) - (has_dlse ? *at.of<const float>(args.dlse) : 0.0f);
}

template <class Row>
inline std::int32_t launch_fmha_bwd_dot_do_o(const catalog_args* args) noexcept {
    if (const catalog_status status = check_rows<Row>(args); status != CATALOG_OK) return status;
    if (!valid_hdim(args->hdim_v, Row::hdim_v, Row::pad_dv)) return CATALOG_BAD_ARGUMENT;
    const bool valid = args->grad_o.data && args->o.data && args->delta.data && (args->lse.data || !args->dlse.data);
    if (has_rows<Row>(*args) && !valid) return CATALOG_BAD_ARGUMENT;
    return for_rows<Row>(*args, [&](const QueryRow& at) { dot_row<Row>(*args, at); });
}

}  // namespace catalog::host
