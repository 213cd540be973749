// What the host checks before a launch. It reads nothing that a pointer points to: lengths, pages and page numbers that
// lie in the device's memory are clamped there, see sequence.hpp.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "abi/check.hpp"
#include "cuda/block.hpp"
#include "cuda/traits.hpp"

namespace catalog::cuda {

// Longer sequences, and more rows of all heads that share a K/V head, could overflow positions of 32 bits.
inline constexpr std::int64_t most_tokens = 1ll << 29;

inline std::int64_t heads_per_kv_head(const catalog_args& args) {
    return args.nhead_k > 0 ? args.nhead_q / args.nhead_k : 0;
}

inline bool valid_sizes(const catalog_args& args) {
    const bool whole_groups = args.nhead_k > 0 ? args.nhead_q % args.nhead_k == 0 : args.nhead_q == 0;
    const auto fits = [](std::int64_t size) { return 0 <= size && size <= most_tokens; };
    return fits(args.batch) && fits(args.nhead_q) && fits(args.nhead_k) && whole_groups && fits(args.seqlen_q) &&
           fits(args.seqlen_k) && args.tokens_q >= 0 && fits(args.seqlen_q * heads_per_kv_head(args)) &&
           1 <= args.num_splits && args.num_splits <= 65535;
}

// `vector`: elements that are copied together.
inline bool valid_hdim(std::int64_t hdim, int row_hdim, bool padded, int vector = 8) {
    return padded ? 1 <= hdim && hdim <= row_hdim && hdim % vector == 0 : hdim == row_hdim;
}

// Rows are copied in pieces of 16 bytes.
template <class Row>
inline constexpr int in_vector = 16 / sizeof(typename Row::dtype);

template <class Row>
inline bool valid_hdims(const catalog_args& args) {
    return valid_hdim(args.hdim_q, Row::hdim_q, Row::pad_d, in_vector<Row>) &&
           valid_hdim(args.hdim_v, Row::hdim_v, Row::pad_dv, in_vector<Row>);
}

template <Mask mask>
inline bool valid_mask(const catalog_args& args) {
    if (args.mask_corner != CATALOG_TOP_LEFT && args.mask_corner != CATALOG_BOTTOM_RIGHT) return false;
    if constexpr (mask == Mask::causal) return args.window_left < 0 && args.window_right == 0;
    return true;
}

// Whether every row starts at a multiple of 16 bytes. `extents`: batch, nhead, seqlen; the stride of an axis of one
// element means nothing.
template <class Element>
inline bool aligned_rows(const catalog_tensor& tensor, std::int64_t batch, std::int64_t nhead, std::int64_t seqlen,
                         std::int64_t splits = 1) {
    constexpr std::int64_t elements = 16 / sizeof(Element);
    const auto aligned = [](std::int64_t extent, std::int64_t stride) { return extent <= 1 || stride % elements == 0; };
    return reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0 && aligned(batch, tensor.stride_batch) &&
           aligned(nhead, tensor.stride_nhead) && aligned(seqlen, tensor.stride_seqlen) &&
           aligned(splits, tensor.stride_split);
}

// Whether pages keep 16 bytes together: of a key along the head dim, of values along the tokens.
template <class Row>
inline constexpr bool is_vectorized = Row::kv_memory_layout == KvMemoryLayout::vectorized;

// Tokens along the seqlen axis of a tensor of queries.
template <class Row>
inline std::int64_t stored_queries(const catalog_args& args) {
    return Row::mode == Mode::group ? args.tokens_q : args.seqlen_q;
}

template <class Row, class Element>
inline bool aligned_queries(const catalog_args& args, const catalog_tensor& tensor, std::int64_t splits = 1) {
    const std::int64_t batch = Row::mode == Mode::group ? 1 : args.batch;
    return aligned_rows<Element>(tensor, batch, args.nhead_q, stored_queries<Row>(args), splits);
}

template <class Row>
inline bool aligned_keys(const catalog_args& args, const catalog_tensor& tensor) {
    using Element = typename Row::dtype;
    if constexpr (is_vectorized<Row>) return aligned_rows<Element>(tensor, args.num_pages, args.nhead_k, 1);
    if constexpr (Row::paged_kv) return aligned_rows<Element>(tensor, args.num_pages, args.nhead_k, args.page_size);
    if constexpr (Row::mode == Mode::group) return aligned_rows<Element>(tensor, 1, args.nhead_k, most_tokens);
    return aligned_rows<Element>(tensor, args.batch, args.nhead_k, args.seqlen_k);
}

// Whether some query may have to be answered; its row must then be there.
inline bool has_queries(const catalog_args& args) { return args.batch > 0 && args.nhead_q > 0 && args.seqlen_q > 0; }

inline bool has_keys(const catalog_args& args) { return has_queries(args) && args.seqlen_k > 0; }

template <class Row>
inline bool valid_pages(const catalog_args& args) {
    if constexpr (!Row::paged_kv) return true;
    const auto fits = [](std::int64_t size) { return 0 <= size && size <= most_tokens; };
    if (args.page_size < 1 || args.page_size > most_tokens || (is_vectorized<Row> && args.page_size % in_vector<Row>))
        return false;
    if (!fits(args.num_pages) || !fits(args.pages_per_sequence) || args.num_page_indices < 0) return false;
    if (args.batch == 0) return true;
    if constexpr (Row::kv_lookup_table == KvLookupTable::sglang)
        return args.kv_indptr.data && args.kv_last_page_lens.data &&
               (args.kv_page_indices.data || args.num_page_indices == 0);
    return args.seqlens_k.data && (args.block_table.data || args.pages_per_sequence == 0);
}

// Whether the queries of a tile see the same blocks of the block mask, and as many `keys` are in one block.
template <class Row, int keys = Row::tile_n0>
inline bool valid_block_mask(const catalog_args& args) {
    if constexpr (!Row::block_mask) return true;
    const auto fits = [](std::int64_t size, int tile) { return 0 < size && size <= 0x7fffffff && size % tile == 0; };
    return fits(args.block_mask_q, Row::tile_m0) && fits(args.block_mask_kv, keys) &&
           (args.block_mask.data || !has_keys(args));
}

// Whether there is a number of keys that share factors.
template <class Row>
inline bool valid_blocks(const catalog_args& args) {
    return Row::qscale != Qscale::blockscale || args.block_scale_size_kv > 0;
}

// Those of quantised tensors.
template <class Row>
inline bool valid_factors(const catalog_args& args) {
    const bool of_queries = !has_query_bytes<Row> || args.q_descale.data;
    return Row::qscale == Qscale::none || (of_queries && args.k_descale.data && args.v_descale.data);
}

// Q, K, V and what else shapes the scores.
template <class Row>
inline bool valid_inputs(const catalog_args& args) {
    if (!has_queries(args)) return true;
    if (!args.q.data || !aligned_queries<Row, QueryElement<Row>>(args, args.q)) return false;
    if (Row::bias == Bias::alibi && !args.alibi_slopes.data) return false;
    if (Row::logits && !(args.logits_soft_cap > 0)) return false;
    if (!has_keys(args)) return true;
    if (!valid_factors<Row>(args)) return false;
    if (Row::bias == Bias::bias && !args.bias.data) return false;
    if (!valid_block_mask<Row>(args)) return false;
    return args.k.data && args.v.data && aligned_keys<Row>(args, args.k) && aligned_keys<Row>(args, args.v);
}

// The same for every family that multiplies Q and K.
template <class Row>
inline catalog_status check_call(const catalog_args* args) {
    if (const catalog_status status = check_abi(args); status != CATALOG_OK) return status;
    if (!valid_sizes(*args)) return CATALOG_BAD_ARGUMENT;
    if constexpr (Row::mode == Mode::group)
        if (args->batch > 0 && (!args->seqstart_q || (!Row::paged_kv && !args->seqstart_k)))
            return CATALOG_BAD_ARGUMENT;
    const bool valid = valid_hdims<Row>(*args) && valid_mask<Row::mask>(*args) && valid_pages<Row>(*args) &&
                       valid_blocks<Row>(*args) && valid_inputs<Row>(*args);
    return valid ? CATALOG_OK : CATALOG_BAD_ARGUMENT;
}

}  // namespace catalog::cuda
