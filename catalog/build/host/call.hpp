// One launch, checked: what the argument struct says, reduced to what a work item needs.
#pragma once

#include "../abi/catalog_abi.h"
#include "mask.hpp"
#include "pack.hpp"

namespace catalog::host {

// One sequence of one batch entry: where it starts in each tensor, and its lengths.
struct Sequence {
    std::int64_t batch;            // index along the batch axis; 0 in group mode
    std::int64_t first_q, first_k;  // first token; 0 in batch mode
    std::int64_t seqlen_q, seqlen_k;
};

template <bool group>
inline Sequence sequence(const catalog_args& args, std::int64_t batch) {
    if constexpr (group) {
        const std::int32_t* q = args.seqstart_q + batch;
        const std::int32_t* k = args.seqstart_k + batch;
        return {0, q[0], k[0], q[1] - q[0], k[1] - k[0]};
    } else {
        return {batch, 0, 0, args.seqlen_q, args.seqlen_k};
    }
}

template <class T>
inline Rows<T> rows_of(const catalog_tensor& tensor, std::int64_t batch, std::int64_t head, std::int64_t first) {
    const std::int64_t offset = batch * tensor.stride_batch + head * tensor.stride_nhead + first * tensor.stride_seqlen;
    return {static_cast<T*>(tensor.data) + offset, tensor.stride_seqlen};
}

template <Mask mask>
inline Window window(const catalog_args& args, const Sequence& sequence) {
    if constexpr (mask == Mask::none) return {-1, -1, 0, sequence.seqlen_k};
    // No distance within the sequence exceeds this; a larger window would only overflow.
    const std::int64_t longest = sequence.seqlen_q + sequence.seqlen_k;
    const std::int64_t diagonal =
        args.mask_corner == CATALOG_BOTTOM_RIGHT ? sequence.seqlen_k - sequence.seqlen_q : 0;
    return {std::min(args.window_left, longest), std::min(args.window_right, longest), diagonal, sequence.seqlen_k};
}

template <class Row>
inline bool valid_mask(const catalog_args& args) {
    if constexpr (Row::mask == Mask::none) return true;
    if (args.mask_corner != CATALOG_TOP_LEFT && args.mask_corner != CATALOG_BOTTOM_RIGHT) return false;
    return Row::mask == Mask::generic || (args.window_left < 0 && args.window_right == 0);
}

inline bool valid_hdim(std::int64_t hdim, int row_hdim, bool padded) {
    return padded ? 1 <= hdim && hdim <= row_hdim : hdim == row_hdim;
}

template <bool group>
inline bool valid_lengths(const catalog_args& args) {
    if constexpr (group) {
        if (args.batch > 0 && (!args.seqstart_q || !args.seqstart_k)) return false;
        for (std::int64_t b = 0; b < args.batch; ++b) {
            const Sequence s = sequence<group>(args, b);
            if (s.first_q < 0 || s.first_k < 0 || s.seqlen_q < 0 || s.seqlen_k < 0) return false;
            if (s.seqlen_q > args.seqlen_q) return false;  // work items are laid out for the longest sequence
        }
    }
    return true;
}

template <class Row>
inline bool has_tensors(const catalog_args& args) {
    bool queries = false, keys = false;
    for (std::int64_t b = 0; b < args.batch; ++b) {
        const Sequence s = sequence<Row::group>(args, b);
        queries |= s.seqlen_q > 0;
        keys |= s.seqlen_q > 0 && s.seqlen_k > 0;
    }
    if (args.nhead_q == 0) return true;
    if (queries && (!args.q.data || !args.o.data || (Row::lse && !args.lse.data))) return false;
    return !keys || (args.k.data && args.v.data);
}

template <class Row>
inline catalog_status check(const catalog_args* args) {
    if (!args) return CATALOG_BAD_ARGUMENT;
    if (args->struct_bytes != sizeof(catalog_args) || args->abi_version != CATALOG_ABI_VERSION)
        return CATALOG_ABI_MISMATCH;
    const bool valid = args->batch >= 0 && args->nhead_q >= 0 && args->nhead_k >= 0 && args->seqlen_q >= 0 &&
                       args->seqlen_k >= 0 && args->num_threads >= 0 &&
                       (args->nhead_k > 0 ? args->nhead_q % args->nhead_k == 0 : args->nhead_q == 0) &&
                       valid_hdim(args->hdim_q, Row::hdim_q, Row::pad_d) &&
                       valid_hdim(args->hdim_v, Row::hdim_v, Row::pad_dv) && valid_mask<Row>(*args) &&
                       valid_lengths<Row::group>(*args) && has_tensors<Row>(*args);
    return valid ? CATALOG_OK : CATALOG_BAD_ARGUMENT;
}

}  // namespace catalog::host
