// One launch, checked: what the argument struct says, reduced to what a work item needs.
#pragma once

#include "../abi/catalog_abi.h"
#include "mask.hpp"
#include "pack.hpp"

namespace catalog::host {

struct Sequence {
    std::int64_t batch;             // index along the batch axis; 0 in group mode
    std::int64_t first_q, first_k;  // first token; 0 in batch mode
    std::int64_t seqlen_q, seqlen_k;
};

template <bool group>
inline Sequence sequence_of(const catalog_args& args, std::int64_t batch) {
    if constexpr (group) {
        const std::int64_t q = args.seqstart_q[batch], k = args.seqstart_k[batch];
        return {0, q, k, args.seqstart_q[batch + 1] - q, args.seqstart_k[batch + 1] - k};
    } else {
        return {batch, 0, 0, args.seqlen_q, args.seqlen_k};
    }
}

template <class T>
inline Rows<T> rows_of(const catalog_tensor& tensor, std::int64_t batch, std::int64_t head, std::int64_t first) {
    const std::int64_t offset = batch * tensor.stride_batch + head * tensor.stride_nhead + first * tensor.stride_seqlen;
    return {static_cast<T*>(tensor.data) + offset, tensor.stride_seqlen};
}

inline std::int64_t heads_per_kv_head(const catalog_args& args) {
    return args.nhead_k > 0 ? args.nhead_q / args.nhead_k : 0;
}

template <Mask mask>
inline Window window_of(const catalog_args& args, const Sequence& seq) {
    if constexpr (mask == Mask::none) return {-1, -1, 0, seq.seqlen_k};
    // No distance within the sequence exceeds this; a larger window would only overflow.
    const std::int64_t longest = seq.seqlen_q + seq.seqlen_k;
    const std::int64_t diagonal = args.mask_corner == CATALOG_BOTTOM_RIGHT ? seq.seqlen_k - seq.seqlen_q : 0;
    return {std::min(args.window_left, longest), std::min(args.window_right, longest), diagonal, seq.seqlen_k};
}

inline bool valid_sizes(const catalog_args& args) {
    const bool whole_groups = args.nhead_k > 0 ? args.nhead_q % args.nhead_k == 0 : args.nhead_q == 0;
    return args.batch >= 0 && args.nhead_q >= 0 && args.nhead_k >= 0 && whole_groups && args.seqlen_q >= 0 &&
           args.seqlen_k >= 0 && args.num_threads >= 0;
}

inline bool valid_hdim(std::int64_t hdim, int row_hdim, bool padded) {
    return padded ? 1 <= hdim && hdim <= row_hdim : hdim == row_hdim;
}

template <Mask mask>
inline bool valid_mask(const catalog_args& args) {
    if constexpr (mask == Mask::none) return true;
    if (args.mask_corner != CATALOG_TOP_LEFT && args.mask_corner != CATALOG_BOTTOM_RIGHT) return false;
    return mask == Mask::generic || (args.window_left < 0 && args.window_right == 0);
}

template <bool group>
inline bool valid_sequences(const catalog_args& args) {
    if constexpr (!group) return true;
    if (args.batch > 0 && (!args.seqstart_q || !args.seqstart_k)) return false;
    for (std::int64_t b = 0; b < args.batch; ++b) {
        const Sequence seq = sequence_of<group>(args, b);
        if (seq.first_q < 0 || seq.first_k < 0 || seq.seqlen_q < 0 || seq.seqlen_k < 0) return false;
        if (seq.seqlen_q > args.seqlen_q) return false;  // work is laid out for the longest sequence
    }
    return true;
}

template <class Row>
inline bool has_tensors(const catalog_args& args) {
    bool queries = false, keys = false;  // whether anything will be read
    for (std::int64_t b = 0; b < args.batch && args.nhead_q > 0; ++b) {
        const Sequence seq = sequence_of<Row::group>(args, b);
        queries |= seq.seqlen_q > 0;
        keys |= seq.seqlen_q > 0 && seq.seqlen_k > 0;
    }
    if (queries && (!args.q.data || !args.o.data || (Row::lse && !args.lse.data))) return false;
    return !keys || (args.k.data && args.v.data);
}

template <class Row>
inline catalog_status check(const catalog_args* args) {
    if (!args) return CATALOG_BAD_ARGUMENT;
    if (args->struct_bytes != sizeof(catalog_args) || args->abi_version != CATALOG_ABI_VERSION)
        return CATALOG_ABI_MISMATCH;
    const bool valid = valid_sizes(*args) && valid_hdim(args->hdim_q, Row::hdim_q, Row::pad_d) &&
                       valid_hdim(args->hdim_v, Row::hdim_v, Row::pad_dv) && valid_mask<Row::mask>(*args) &&
                       valid_sequences<Row::group>(*args) && has_tensors<Row>(*args);
    return valid ? CATALOG_OK : CATALOG_BAD_ARGUMENT;
}

}  // namespace catalog::host
