// Backward attention, last stage: dQ is the sum of the parts from the splits of the keys, in order.
#pragma once

#include "rows.hpp"

namespace catalog::host {

template <class Row>
inline void convert_row(const catalog_args& args, const QueryRow& at) {
    using T = typename Row::dtype;
    T* dq = at.of<T>(args.dq);
    for (std::int64_t d = 0; d < args.hdim_q; d += lanes) {
        Float sum = {};
        for (std::int64_t split = 0; split < args.num_splits; ++split)
            sum += load_first(at.of<const float>(args.dq_acc, split) + d, args.hdim_q - d);
        store_first(dq + d, sum, args.hdim_q - d);
    }
}

template <class Row>
inline std::int32_t launch_fmha_bwd_convert_dq(const catalog_args* args) noexcept {
    if (const catalog_status status = check_rows<Row>(args); status != CATALOG_OK) return status;
    if (!valid_hdim(args->hdim_q, Row::hdim_q, Row::pad_d)) return CATALOG_BAD_ARGUMENT;
    if (has_rows<Row>(*args) && !(args->dq.data && args->dq_acc.data)) return CATALOG_BAD_ARGUMENT;
    return for_rows<Row>(*args, [&](const QueryRow& at) { convert_row<Row>(*args, at); });
}

}  // namespace catalog::host
