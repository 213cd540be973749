// One launch after its checks: the argument struct, reduced to what a work item needs.
#pragma once

#include "abi/check.hpp"
#include "mask.hpp"
#include "host/pack.hpp"
#include "traits.hpp"

namespace catalog::host {

// One sequence: `batch` is its index along the batch axis, 0 in group mode; `index` its number in both modes.
struct Sequence {
    std::int64_t batch, index;
    std::int64_t first_q, first_k;  // first token; 0 in batch mode
    std::int64_t seqlen_q, seqlen_k;
};

template <class T>
inline const T* list_of(const catalog_tensor& tensor) {
    return static_cast<const T*>(tensor.data);
}

inline std::int64_t length_of(const catalog_tensor& lengths, std::int64_t index, std::int64_t stored) {
    return lengths.data ? list_of<std::int32_t>(lengths)[index] : stored;
}

// Tokens in the sequence's pages.
template <class Row>
inline std::int64_t paged_length(const catalog_args& args, std::int64_t index) {
    if constexpr (Row::kv_lookup_table == KvLookupTable::sglang) {
        const auto starts = list_of<std::int32_t>(args.kv_indptr);
        const std::int64_t pages = starts[index + 1] - starts[index];
        return pages > 0 ? (pages - 1) * args.page_size + list_of<std::int32_t>(args.kv_last_page_lens)[index] : 0;
    } else {
        return list_of<std::int32_t>(args.seqlens_k)[index];
    }
}

// The queries of a sequence, without keys.
template <class Row>
inline Sequence queries_of(const catalog_args& args, std::int64_t index) {
    constexpr bool group = Row::mode == Mode::group;
    Sequence seq{group ? 0 : index, index, 0, 0, args.seqlen_q, 0};
    if constexpr (group) {
        seq.first_q = args.seqstart_q[index];
        seq.seqlen_q = args.seqstart_q[index + 1] - seq.first_q;
    }
    seq.seqlen_q = length_of(args.seqlens_q, index, seq.seqlen_q);
    return seq;
}

template <class Row>
inline Sequence sequence_of(const catalog_args& args, std::int64_t index) {
    Sequence seq = queries_of<Row>(args, index);
    if constexpr (Row::paged_kv) {
        seq.seqlen_k = paged_length<Row>(args, index);
    } else {
        seq.seqlen_k = args.seqlen_k;
        if constexpr (Row::mode == Mode::group) {
            seq.first_k = args.seqstart_k[index];
            seq.seqlen_k = args.seqstart_k[index + 1] - seq.first_k;
        }
        seq.seqlen_k = length_of(args.seqlens_k, index, seq.seqlen_k);
    }
    if constexpr (Row::skip_min_seqlen_q)
        if (seq.seqlen_q <= args.min_seqlen_q) seq.seqlen_q = 0;
    return seq;
}

template <class T>
inline Rows<T> rows_of(const catalog_tensor& tensor, std::int64_t batch, std::int64_t head, std::int64_t first,
                       std::int64_t split = 0) {
    const std::int64_t offset = split * tensor.stride_split + batch * tensor.stride_batch + head * tensor.stride_nhead +
                                first * tensor.stride_seqlen;
    return {static_cast<T*>(tensor.data) + offset, tensor.stride_seqlen};
}

inline std::int64_t heads_per_kv_head(const catalog_args& args) {
    return args.nhead_k > 0 ? args.nhead_q / args.nhead_k : 0;
}

// The mask, limited to `keys`.
template <class Row>
inline Window window_of(const catalog_args& args, const Sequence& seq, KeyRange keys) {
    const std::int64_t diagonal = args.mask_corner == CATALOG_BOTTOM_RIGHT ? seq.seqlen_k - seq.seqlen_q : 0;
    // Without a mask, ALiBi measures distances from the last query and key.
    if constexpr (Row::mask == Mask::none) return {-1, -1, seq.seqlen_k - seq.seqlen_q, 0, keys};
    // No distance within the sequence exceeds this; a larger window could only overflow.
    const std::int64_t longest = seq.seqlen_q + seq.seqlen_k;
    const std::int64_t sinks = Row::sink ? std::min(args.sink_size, seq.seqlen_k) : 0;
    return {std::min(args.window_left, longest), std::min(args.window_right, longest), diagonal, sinks, keys};
}

inline bool valid_sizes(const catalog_args& args) {
    const bool whole_groups = args.nhead_k > 0 ? args.nhead_q % args.nhead_k == 0 : args.nhead_q == 0;
    return args.batch >= 0 && args.nhead_q >= 0 && args.nhead_k >= 0 && whole_groups && args.seqlen_q >= 0 &&
           args.seqlen_k >= 0 && args.num_splits >= 1 && args.num_threads >= 0;
}

inline bool valid_hdim(std::int64_t hdim, int row_hdim, bool padded) {
    return padded ? 1 <= hdim && hdim <= row_hdim : hdim == row_hdim;
}

template <Mask mask>
inline bool valid_mask(const catalog_args& args) {
    if (args.mask_corner != CATALOG_TOP_LEFT && args.mask_corner != CATALOG_BOTTOM_RIGHT) return false;
    if constexpr (mask == Mask::causal) return args.window_left < 0 && args.window_right == 0;
    return true;
}

template <class Row>
inline bool valid_pages(const catalog_args& args) {
    if constexpr (!Row::paged_kv) return true;
    if (args.page_size < 1 || (Row::page_size && args.page_size != Row::page_size)) return false;
    if (args.batch == 0) return true;
    if constexpr (Row::kv_lookup_table == KvLookupTable::sglang)
        return args.kv_indptr.data && args.kv_last_page_lens.data &&
               (args.kv_page_indices.data || args.num_page_indices == 0);
    return args.seqlens_k.data && (args.block_table.data || args.pages_per_sequence == 0);
}

// Checks that every sequence lies inside its tensors; work is laid out for the longest one.
template <class Row>
inline bool valid_sequences(const catalog_args& args) {
    constexpr bool group = Row::mode == Mode::group;
    if (group && args.batch > 0 && (!args.seqstart_q || (!Row::paged_kv && !args.seqstart_k))) return false;
    for (std::int64_t b = 0; b < args.batch; ++b) {
        const Sequence seq = sequence_of<Row>(args, b);
        if (seq.first_q < 0 || seq.first_k < 0 || seq.seqlen_q < 0 || seq.seqlen_k < 0) return false;
        std::int64_t stored_q = args.seqlen_q, stored_k = args.seqlen_k;
        if constexpr (group) {
            stored_q = args.seqstart_q[b + 1] - args.seqstart_q[b];
            if constexpr (!Row::paged_kv) stored_k = args.seqstart_k[b + 1] - args.seqstart_k[b];
        }
        if (seq.seqlen_q > stored_q || stored_q > args.seqlen_q || seq.seqlen_k > stored_k) return false;
    }
    return true;
}

// Whether any query, and any key, will be read.
struct Reads {
    bool queries = false, keys = false;
};

template <class Row>
inline Reads reads_of(const catalog_args& args) {
    Reads reads;
    for (std::int64_t b = 0; b < args.batch && args.nhead_q > 0; ++b) {
        const Sequence seq = sequence_of<Row>(args, b);
        reads.queries |= seq.seqlen_q > 0;
        reads.keys |= seq.seqlen_q > 0 && seq.seqlen_k > 0;
    }
    return reads;
}

// Common to all families that multiply Q and K.
template <class Row>
inline catalog_status check_call(const catalog_args* args) {
    if (const catalog_status status = check_abi(args); status != CATALOG_OK) return status;
    const bool valid = valid_sizes(*args) && valid_hdim(args->hdim_q, Row::hdim_q, Row::pad_d) &&
                       valid_hdim(args->hdim_v, Row::hdim_v, Row::pad_dv) && valid_mask<Row::mask>(*args) &&
                       valid_pages<Row>(*args) && valid_sequences<Row>(*args);
    return valid ? CATALOG_OK : CATALOG_BAD_ARGUMENT;
}

}  // namespace catalog::host
