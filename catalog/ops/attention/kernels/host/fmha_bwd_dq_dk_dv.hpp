// Backward attention, main stage: dK, dV, dbias, and one part of dQ for each split of the keys.
//
// No two work items write the same element, so there are no atomics, and results depend only on num_splits: every row
// is deterministic.
#pragma once

#include "bwd_attend.hpp"
#include "work.hpp"

namespace catalog::host {

// Whether the tensors that will be read or written are present.
template <class Row>
inline bool has_backward_tensors(const catalog_args& args) {
    const Reads reads = reads_of<Row>(args);
    bool has_keys = false;
    for (std::int64_t b = 0; b < args.batch && args.nhead_k > 0; ++b)
        has_keys |= sequence_of<Row>(args, b).seqlen_k > 0;
    if (has_keys && !(args.dk.data && args.dv.data)) return false;
    if (reads.queries && !args.dq_acc.data) return false;
    if (!reads.keys) return true;
    return args.q.data && args.k.data && args.v.data && args.grad_o.data && args.lse.data && args.delta.data &&
           (Row::bias != Bias::bias || args.bias.data) && (Row::bias != Bias::alibi || args.alibi_slopes.data) &&
           (!Row::dbias || args.dbias.data) && (!Row::logits || args.logits_soft_cap > 0) &&
           (!Row::block_mask || args.block_mask.data);
}

template <class Row>
inline std::int32_t launch_fmha_bwd_dq_dk_dv(const catalog_args* args) noexcept {
    if (!is_supported<Row>()) return CATALOG_UNSUPPORTED;
    if (const catalog_status status = check_call<Row>(args); status != CATALOG_OK) return status;
    if (!valid_block_mask<Row>(*args) || !has_backward_tensors<Row>(*args)) return CATALOG_BAD_ARGUMENT;
    // Under a causal mask most queries see the first keys, so the longest items are started first.
    const std::int64_t columns = args->batch * args->nhead_k;
    return for_items<BackwardScratch<Row>>(
        *args, threads_for(*args), args->num_splits * columns, [&](std::int64_t index, BackwardScratch<Row>& scratch) {
            const std::int64_t column = index % columns;
            const KeyItem item{index / columns, column / args->nhead_k, column % args->nhead_k};
            [[maybe_unused]] const TileState<Row> tiles;
            Backward<Row>(*args, item, scratch).run();
        });
}

}  // namespace catalog::host
