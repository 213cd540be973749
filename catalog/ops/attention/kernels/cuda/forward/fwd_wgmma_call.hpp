// One launch of the forward kernel for Hopper, checked: what its blocks need of the arguments. Host code.
#pragma once

#include <algorithm>
#include <cstdint>

#include "operation/workspace.hpp"
#include "cuda/common/call.hpp"
#include "cuda/common/dropout.hpp"
#include "cuda/common/ragged_rows.hpp"
#include "cuda/common/sequence.hpp"

namespace catalog::cuda {

// Factors of Q, K or V. Strides in elements; `block`: the tokens that share one.
struct Descales {
    const float* data;
    std::int64_t batch, nhead, of_block;
    int block;

    __device__ __forceinline__ float of(int sequence, int head, int token) const {
        return data[sequence * batch + head * nhead + token / block * of_block];
    }
};

// The pages of K and V, with the names of catalog_args: see PageTable. A block of keys consists of parts of `part_rows`,
// each within a page; those of `whole_rows` are loaded through the maps, which is less work.
struct KeyPages {
    catalog_tensor block_table, seqlens_k, kv_indptr, kv_page_indices, kv_last_page_lens;
    std::int64_t page_size, pages_per_sequence, num_pages, num_page_indices, seqlen_k;
    Divisor divide;
    int part_rows, whole_rows;
    PageSteps of_keys, of_values;
    CUtensorMap k_map, v_map;
};

// What is read before the first load stands first: parameters come from memory, a line at a time.
struct FwdCall {
    // Tiles: `blocks` of every head of every sequence, `section_heads` heads at a time. Where tiles differ in work
    // every section takes a whole number of rounds, `section_rounds`; otherwise 0.
    int blocks, heads, tiles;
    int section_heads, section_rounds, rounds;
    int grid;  // blocks of the grid; in group mode one for each tile
    int nhead_q, seqlen_q, seqlen_k;
    bool bottom_right;
    bool skewed;  // sequences differ so much in length that blocks look for their tiles
    // Rounds are divided by those of a section; numbers of tiles by those of a section, of a row of it, and of a row of
    // the last one; heads by those of a sequence, and by those that share keys.
    Divisor of_rounds, of_section, of_row, of_last_row, of_sequence, of_kv_head;
    int window_left, window_right;  // negative: unbounded
    ByteStrides q, k, v;
    const std::int32_t *seqstart_q, *seqstart_k, *seqlens_q, *seqlens_k;
    CUtensorMap q_map, k_map, v_map;
    ByteStrides o, lse;
    void* o_data;
    float* lse_data;
    int hdim_v;
    float scale;     // of Q K^T: in units of the base 2, or with a soft cap the argument of 2^x in tanh
    float soft_cap;  // in units of the base 2
    // Of rows with these features.
    const float* alibi_slopes;
    std::int64_t alibi_stride_batch, alibi_stride_nhead;
    const float* sink;
    std::int64_t sink_stride;
    int sinks;         // first keys that are visible although left of the window
    int min_seqlen_q;  // sequences of this many queries or fewer are skipped
    const void* bias;
    ByteStrides bias_strides;
    Dropout dropout;
    std::uint8_t* randval;
    ByteStrides randval_strides;
    Descales q_descales, k_descales, v_descales;
    const std::uint8_t* block_mask;
    ByteStrides block_mask_strides;
    int block_mask_q, block_mask_kv;  // in tiles
    KeyPages pages;
};

// Of the panels in which a tensor of this head dim is loaded: rows of 128 bytes where these divide it, or 64.
template <class Row, int hdim>
inline constexpr int loaded_row_bytes = hdim * sizeof(typename Row::dtype) % 128 == 0 ? 128 : 64;
template <class Row, int hdim>
inline constexpr int loaded_columns = loaded_row_bytes<Row, hdim> / sizeof(typename Row::dtype);

inline constexpr float log2_e = 0x1.715476p+0f;
inline constexpr float ln_2 = 0x1.62e43p-1f;

// The number of bytes of K and V that stay in the L2 cache while the blocks of their heads are worked on.
inline constexpr std::int64_t section_bytes = 32 << 20;

template <class Row>
inline bool valid_fwd(const catalog_args& args) {
    if (!valid_sizes(args) || args.num_splits != 1 || !valid_mask<Row::mask>(args)) return false;
    if (!valid_hdims<Row>(args)) return false;
    if (Row::logits && !(args.logits_soft_cap > 0.0f)) return false;
    // All keys of a tile share their factors.
    if (Row::qscale == Qscale::blockscale &&
        (args.block_scale_size_q < 1 || args.block_scale_size_kv < 1 ||
         (args.block_scale_size_kv < args.seqlen_k && args.block_scale_size_kv % Row::tile_n0 != 0)))
        return false;
    // The largest score is that of the largest product.
    return args.scale >= 0.0f;
}

// The swizzled rows of a part begin with a group of eight.
template <class Row>
inline bool valid_parts(const catalog_args& args) {
    return !Row::paged_kv || (valid_pages<Row>(args) && args.page_size % 8 == 0);
}

// Whether TMA and 16-byte accesses reach every row.
inline bool aligned_rows(const catalog_tensor& tensor, const ByteStrides& strides) {
    return (reinterpret_cast<std::uintptr_t>(tensor.data) | strides.batch | strides.nhead | strides.seqlen) % 16 == 0;
}

inline Descales descales_of(const catalog_tensor& tensor, std::int64_t block) {
    return {static_cast<const float*>(tensor.data), tensor.stride_batch, tensor.stride_nhead, tensor.stride_seqlen,
            static_cast<int>(std::min(block, most_tokens))};
}

// Which tiles are worked on side by side: of heads whose keys and values fit into the L2 cache. `resident` is how many
// blocks run at a time, each of which takes a tile a round. Causal tiles of all heads by length would read keys from
// the device's memory round after round: at 2048 tokens that takes a fifth longer.
template <class Row>
inline void plan_rounds(const catalog_args& args, std::int64_t resident, FwdCall& call) {
    const std::int64_t group = call.of_kv_head.divisor, heads = call.heads;
    const std::int64_t row_bytes = (args.hdim_q + args.hdim_v) * sizeof(typename Row::dtype);
    const std::int64_t head_bytes = std::max<std::int64_t>(1, args.seqlen_k * row_bytes);
    const std::int64_t fitting = std::max<std::int64_t>(1, section_bytes / head_bytes) * group;
    const bool even = Row::mask == Mask::none || (Row::mask == Mask::generic && args.window_left >= 0);
    std::int64_t section = std::min(heads, fitting);
    call.skewed = false;
    if (Row::mode == Mode::group) {
        // Sequences that differ in length are left to the hardware, which gives a block that is done the next tile: the
        // longest of all heads come first. A block without a tile costs a microsecond: no more of them than sequences.
        if (Row::mask != Mask::none) section = heads;
        const std::int64_t most = (args.tokens_q + args.batch * (Row::tile_m0 - 1)) / Row::tile_m0 * args.nhead_q;
        call.skewed = most < call.tiles;
        resident = call.tiles = static_cast<int>(std::min<std::int64_t>(most, call.tiles));
    } else if (!even) {
        section = divide_up(divide_up(heads, divide_up(heads, fitting)), group) * group;
    }
    const bool whole_rounds = Row::mode == Mode::batch && !even;
    call.grid = static_cast<int>(std::min<std::int64_t>(resident, call.tiles));
    call.section_heads = static_cast<int>(section);
    call.of_section = Divisor(section * call.blocks);
    call.of_row = Divisor(section);
    call.of_last_row = Divisor(heads % section ? heads % section : section);
    call.section_rounds = whole_rounds ? static_cast<int>(divide_up(section * call.blocks, call.grid)) : 0;
    call.of_rounds = Divisor(std::max(call.section_rounds, 1));
    call.rounds = static_cast<int>(whole_rounds ? divide_up(heads, section) * call.section_rounds
                                                : divide_up(call.tiles, call.grid));
}

// CATALOG_OK with tiles == 0: there is nothing to do. plan_rounds() follows.
template <class Row>
inline catalog_status prepare_fwd(const catalog_args* given, FwdCall& call) {
    using T = typename Row::dtype;
    using O = typename Row::otype;
    constexpr bool group = Row::mode == Mode::group;
    if (const catalog_status status = check_abi(given); status != CATALOG_OK) return status;
    const catalog_args& args = *given;
    if (!valid_fwd<Row>(args)) return CATALOG_BAD_ARGUMENT;
    call.tiles = 0;
    if (!has_queries(args)) return CATALOG_OK;

    const bool keys = has_keys(args);
    if (!args.q.data || !args.o.data || (keys && (!args.k.data || !args.v.data))) return CATALOG_BAD_ARGUMENT;
    if (group && (!args.seqstart_q || (!Row::paged_kv && !args.seqstart_k))) return CATALOG_BAD_ARGUMENT;
    if (!valid_parts<Row>(args)) return CATALOG_BAD_ARGUMENT;
    if (Row::lse && !args.lse.data) return CATALOG_BAD_ARGUMENT;
    if (Row::bias == Bias::alibi && !args.alibi_slopes.data) return CATALOG_BAD_ARGUMENT;
    if (Row::bias == Bias::bias && keys && !args.bias.data) return CATALOG_BAD_ARGUMENT;
    if (keys && !valid_factors<Row>(args)) return CATALOG_BAD_ARGUMENT;
    if (!valid_block_mask<Row>(args)) return CATALOG_BAD_ARGUMENT;

    // In group mode the sequences lie one behind the other, and have no stride.
    const std::int64_t batch = group ? 1 : args.batch;
    const std::int64_t rows_q = group ? most_tokens : args.seqlen_q;
    call.q = byte_strides<T>(args.q, batch, args.nhead_q, rows_q, args.hdim_q * sizeof(T));
    call.k = key_strides<Row>(args, args.k, args.hdim_q);
    call.v = key_strides<Row>(args, args.v, args.hdim_v);
    call.o = byte_strides<O>(args.o, batch, args.nhead_q, rows_q, args.hdim_v * sizeof(O));
    call.lse = byte_strides<float>(args.lse, batch, args.nhead_q, rows_q, 0);
    // A tensor without elements may be anything; nothing is read through its map.
    const catalog_tensor& k = keys ? args.k : args.q;
    const catalog_tensor& v = keys ? args.v : args.q;
    if (!keys) call.k = call.v = call.q;
    if (!aligned_rows(args.q, call.q) || !aligned_rows(k, call.k) || !aligned_rows(v, call.v) ||
        !aligned_rows(args.o, call.o))
        return CATALOG_BAD_ARGUMENT;
    constexpr int columns_q = loaded_columns<Row, Row::hdim_q>, columns_v = loaded_columns<Row, Row::hdim_v>;
    if (Row::paged_kv && !(valid_steps(call.k) && valid_steps(call.v))) return CATALOG_BAD_ARGUMENT;
    const int part_rows = rows_of_part<Row>(args);
    if (!make_ragged_map<T>(call.q_map, args.q.data, call.q.seqlen, args.hdim_q, columns_q, 64) ||
        !make_ragged_map<T>(call.k_map, k.data, call.k.seqlen, args.hdim_q, columns_q, part_rows) ||
        !make_ragged_map<T>(call.v_map, v.data, call.v.seqlen, args.hdim_v, columns_v, part_rows))
        return CATALOG_BAD_ARGUMENT;
    if constexpr (Row::paged_kv) {
        call.pages = {args.block_table, args.seqlens_k, args.kv_indptr, args.kv_page_indices, args.kv_last_page_lens,
                      args.page_size, args.pages_per_sequence, args.num_pages, args.num_page_indices, args.seqlen_k,
                      Divisor(args.page_size), part_rows, -1, steps_of(call.k), steps_of(call.v)};
        if (make_page_map<T>(call.pages.k_map, k, args, args.hdim_q, call.k, columns_q, part_rows) &&
            make_page_map<T>(call.pages.v_map, v, args, args.hdim_v, call.v, columns_v, part_rows))
            call.pages.whole_rows = part_rows;
    }

    call.o_data = args.o.data;
    call.lse_data = static_cast<float*>(args.lse.data);
    call.alibi_slopes = static_cast<const float*>(args.alibi_slopes.data);
    call.alibi_stride_batch = args.alibi_slopes.stride_batch;
    call.alibi_stride_nhead = args.alibi_slopes.stride_nhead;
    call.sink = static_cast<const float*>(args.sink.data);
    call.sink_stride = args.sink.stride_nhead;
    call.seqstart_q = args.seqstart_q;
    call.seqstart_k = args.seqstart_k;
    call.seqlens_q = static_cast<const std::int32_t*>(args.seqlens_q.data);
    call.seqlens_k = static_cast<const std::int32_t*>(args.seqlens_k.data);
    call.nhead_q = static_cast<int>(args.nhead_q);
    call.of_sequence = Divisor(args.nhead_q);
    call.of_kv_head = Divisor(args.nhead_q / args.nhead_k);
    call.seqlen_q = static_cast<int>(args.seqlen_q);
    call.seqlen_k = static_cast<int>(args.seqlen_k);
    call.hdim_v = static_cast<int>(args.hdim_v);
    // No distance within a sequence is larger.
    const auto side = [](std::int64_t keys) { return static_cast<int>(std::clamp<std::int64_t>(keys, -1, 1 << 30)); };
    call.window_left = side(args.window_left);
    call.window_right = side(args.window_right);
    call.dropout = dropout_of(args);
    call.randval = static_cast<std::uint8_t*>(args.randval.data);
    call.randval_strides = byte_strides<std::uint8_t>(args.randval, batch, args.nhead_q, rows_q, 0);
    call.bias = args.bias.data;
    call.bias_strides = byte_strides<BiasElement<Row>>(args.bias, batch, args.nhead_q, rows_q, 0);
    const bool in_blocks = Row::qscale == Qscale::blockscale;
    call.q_descales = descales_of(args.q_descale, in_blocks ? args.block_scale_size_q : most_tokens);
    call.k_descales = descales_of(args.k_descale, in_blocks ? args.block_scale_size_kv : most_tokens);
    call.v_descales = descales_of(args.v_descale, in_blocks ? args.block_scale_size_kv : most_tokens);
    call.block_mask = static_cast<const std::uint8_t*>(args.block_mask.data);
    const catalog_tensor& bitmap = args.block_mask;
    call.block_mask_strides = {bitmap.stride_batch, bitmap.stride_nhead, bitmap.stride_seqlen};
    call.block_mask_q = static_cast<int>(args.block_mask_q / Row::tile_m0);
    call.block_mask_kv = static_cast<int>(args.block_mask_kv / Row::tile_n0);
    call.min_seqlen_q = static_cast<int>(std::clamp<std::int64_t>(args.min_seqlen_q, 0, most_tokens));
    call.sinks = static_cast<int>(std::clamp<std::int64_t>(args.sink_size, 0, most_tokens));
    call.bottom_right = args.mask_corner == CATALOG_BOTTOM_RIGHT;
    // Above zero, lest an unseen key's -infinity become a NaN.
    call.scale = std::max(args.scale, 1e-30f) * (Row::logits ? 2.0f / args.logits_soft_cap : 1.0f) * log2_e;
    call.soft_cap = args.logits_soft_cap * log2_e;

    const std::int64_t blocks = divide_up(args.seqlen_q, Row::tile_m0), heads = args.batch * args.nhead_q;
    if (heads > most_tokens || blocks * heads > most_tokens) return CATALOG_BAD_ARGUMENT;
    call.blocks = static_cast<int>(blocks);
    call.heads = static_cast<int>(heads);
    call.tiles = static_cast<int>(blocks * heads);
    return CATALOG_OK;
}

}  // namespace catalog::cuda
