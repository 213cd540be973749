// Appends new keys and values to the tokens in the cache, and applies rotary embedding (RoPE) to keys and queries.
//
// Key t of a sequence with n cached tokens has position n + t. Query i has position n + i if the attention that follows
// is masked, otherwise n, as in flash-attn and CK Tile. If the cache has 8 bits and queries have 16, new tokens
// are divided by the cache's factors, if it has any.
#pragma once

#include "kv.hpp"
#include "launch.hpp"

namespace catalog::host {

template <class Row>
class Append {
    using T = QueryElement<Row>;
    using Cached = typename Row::dtype;
    static constexpr int width = round_up(Row::hdim_q, lanes);

   public:
    Append(const catalog_args& args, std::int64_t sequence)
        : args(args), sequence(sequence), cached(list_of<std::int32_t>(args.seqlens_k)[sequence]) {}

    void key(std::int64_t head, std::int64_t token) const {
        rotate(rows_of<const T>(args.k_new, sequence, head, token)[0], cached + token, factor_of(args.k_descale),
               slot(args.k, head, cached + token));
    }

    void value(std::int64_t head, std::int64_t token) const {
        copy(rows_of<const T>(args.v_new, sequence, head, token)[0], args.hdim_v, factor_of(args.v_descale),
             slot(args.v, head, cached + token));
    }

    void query(std::int64_t head, std::int64_t token) const {
        const bool masked = args.window_left >= 0 || args.window_right >= 0;
        rotate(rows_of<const T>(args.q, sequence, head, token)[0], masked ? cached + token : cached, 1.0f,
               rows_of<T>(args.q_out, sequence, head, token)[0]);
    }

   private:
    Cached* slot(const catalog_tensor& cache, std::int64_t head, std::int64_t position) const {
        if constexpr (!Row::paged_kv) return rows_of<Cached>(cache, sequence, head, position)[0];
        const std::int64_t page = page_of<Row>(args, sequence, position / args.page_size);
        return rows_of<Cached>(cache, page, head, position % args.page_size)[0];
    }

    // What a token is multiplied with on its way into the cache.
    static float factor_of(const catalog_tensor& descale) {
        return !std::is_same_v<T, Cached> && descale.data ? 1.0f / *list_of<float>(descale) : 1.0f;
    }

    template <class To>
    static void copy(const T* from, std::int64_t count, float factor, To* to) {
        if constexpr (std::is_same_v<T, To>)
            std::memcpy(to, from, count * sizeof(T));
        else
            for (std::int64_t d = 0; d < count; d += lanes)
                store_first(to + d, load_first(from + d, count - d) * factor, count - d);
    }

    static void read(const T* from, std::int64_t count, float* to) {
        for (std::int64_t d = 0; d < count; d += lanes) store(to + d, load_first(from + d, count - d));
    }

    template <class To>
    void rotate(const T* from, std::int64_t position, float factor, To* to) const {
        if constexpr (Row::rope == Rope::none) {
            copy(from, args.hdim_q, factor, to);
        } else {
            float x[width], cosine[width], sine[width];
            const std::int64_t pairs = args.rotary_dim / 2;
            read(from, args.hdim_q, x);
            read(rows_of<const T>(args.rotary_cos, 0, 0, position)[0], pairs, cosine);
            read(rows_of<const T>(args.rotary_sin, 0, 0, position)[0], pairs, sine);
            for (std::int64_t i = 0; i < pairs; ++i) {
                float& first = x[Row::rope == Rope::inter ? 2 * i : i];
                float& second = x[Row::rope == Rope::inter ? 2 * i + 1 : i + pairs];
                const float a = first, b = second;
                first = a * cosine[i] - b * sine[i];
                second = b * cosine[i] + a * sine[i];
            }
            for (std::int64_t d = 0; d < args.hdim_q; d += lanes)
                store_first(to + d, load(x + d) * factor, args.hdim_q - d);
        }
    }

    const catalog_args& args;
    const std::int64_t sequence;
    const std::int64_t cached;  // number of tokens before the new ones
};

// Checks that every token has a place in the cache, and every position a row in the rotary tables.
template <class Row>
inline bool valid_append(const catalog_args& args) {
    if (!valid_sizes(args) || args.seqlen_new < 0 || !valid_hdim(args.hdim_q, Row::hdim_q, Row::pad_d) ||
        !valid_hdim(args.hdim_v, Row::hdim_v, Row::pad_dv) || (Row::paged_kv && args.page_size < 1))
        return false;
    if (args.rotary_dim < 0 || args.rotary_dim % 2 || args.rotary_dim > args.hdim_q) return false;
    if (args.batch == 0) return true;
    if (!args.seqlens_k.data || (Row::paged_kv && args.pages_per_sequence > 0 && !args.block_table.data)) return false;
    const bool masked = args.window_left >= 0 || args.window_right >= 0;
    const std::int64_t positions = Row::rope == Rope::none ? 0 : masked ? args.seqlen_q : std::min<std::int64_t>(args.seqlen_q, 1);
    for (std::int64_t b = 0; b < args.batch; ++b) {
        const std::int64_t cached = list_of<std::int32_t>(args.seqlens_k)[b];
        if (cached < 0 || cached + std::max(args.seqlen_new, positions) > args.seqlen_k) return false;
    }
    const bool new_keys = args.seqlen_new > 0 && args.nhead_k > 0, queries = args.seqlen_q > 0 && args.nhead_q > 0;
    if (new_keys && !(args.k.data && args.v.data && args.k_new.data && args.v_new.data)) return false;
    if (queries && !(args.q.data && args.q_out.data)) return false;
    if (Row::rope != Rope::none && (new_keys || queries) && args.rotary_dim && !(args.rotary_cos.data && args.rotary_sin.data))
        return false;
    return pages_exist<Row>(args);
}

template <class Row>
inline std::int32_t launch_fmha_fwd_appendkv(const catalog_args* args) noexcept {
    if (const catalog_status status = check_abi(args); status != CATALOG_OK) return status;
    if (!valid_append<Row>(*args)) return CATALOG_BAD_ARGUMENT;

    const std::int64_t keys = args->nhead_k * args->seqlen_new, queries = args->nhead_q * args->seqlen_q;
    const std::int64_t items = args->batch * (keys + queries);
    constexpr std::int64_t chunk = 16;
    const auto append_item = [&](std::int64_t item) {
        const Append<Row> append(*args, item / (keys + queries));
        const std::int64_t row = item % (keys + queries);
        if (row < keys) {
            append.key(row / args->seqlen_new, row % args->seqlen_new);
            append.value(row / args->seqlen_new, row % args->seqlen_new);
        } else {
            append.query((row - keys) / args->seqlen_q, (row - keys) % args->seqlen_q);
        }
    };
    parallel_for(*args, items > 64 ? threads_for(*args) : 1, (items + chunk - 1) / chunk, [&](std::int64_t share) {
        for (std::int64_t item = share * chunk; item < std::min(items, (share + 1) * chunk); ++item) append_item(item);
    });
    return CATALOG_OK;
}

}  // namespace catalog::host
