// The backward pass of one work item: some keys of a K/V head, against all query rows that read them.
//
// With P = exp(S - LSE) and Z the dropout factors, dV = (Z * P)^T dO, dP = Z * (dO V^T), dS = P * (dP - delta); and
// from S = scale Q K^T + bias follow dQ = scale dS K, dK = scale dS^T Q, dbias = dS. Under a soft cap, S = c tanh(scale
// Q K^T / c), dS is multiplied by 1 - (S / c)^2 before. An item owns its keys, so its dK and dV are complete; its dQ is
// one part of the sum.
//
// Under a block mask tiles of keys end where blocks do, and tiles of queries are cut from runs that see the block.
#pragma once

#include "block_mask.hpp"
#include "bwd_products.hpp"
#include "call.hpp"
#include "philox.hpp"
#include "scores.hpp"

namespace catalog::host {

struct KeyItem {
    std::int64_t split, sequence, head_k;
};

template <class Row>
class Backward {
    using T = typename Row::dtype;
    using Memory = BackwardScratch<Row>;
    using Form = typename Products<Row>::Form;

   public:
    Backward(const catalog_args& args, const KeyItem& item, Memory& scratch)
        : args(args),
          item(item),
          scratch(scratch),
          seq(sequence_of<Row>(args, item.sequence)),
          window(window_of<Row>(args, seq, keys_of_split(seq.seqlen_k, item.split, args.num_splits, Row::tile_n0))),
          scores(args, seq, window),
          heads(heads_of_item<Row>(args)),
          rows(seq.seqlen_q * heads),
          first_head(item.head_k * heads_per_kv_head(args)),
          end_head(first_head + heads_per_kv_head(args)),
          hdim_q(Row::pad_d ? static_cast<int>(args.hdim_q) : Row::hdim_q),
          hdim_v(Row::pad_dv ? static_cast<int>(args.hdim_v) : Row::hdim_v) {}

    void run() {
        if constexpr (Row::store_randval)
            if (args.randval.data) store_randval();
        if (Row::block_mask || window.keys.empty())
            for (std::int64_t head = first_head; head < end_head; head += heads) clear_dq(head, 0, rows);
        const BlockMask<Row> blocks(args, seq, first_head);
        KeyRange range = blocks.tile_at(window.keys.begin, window.keys.end);
        for (; !range.empty(); range = blocks.tile_at(range.end, window.keys.end)) {
            load_keys(range);
            for (std::int64_t head = first_head; head < end_head; head += heads) attend_rows(range, head);
            const float rest = !Form::scales_queries ? args.scale : Row::logits ? args.logits_soft_cap : ln_2;
            products.store_gradients(static_cast<int>(range.end - range.begin), rest, keys_of<T>(args.dk, range.begin),
                                     keys_of<T>(args.dv, range.begin));
        }
    }

   private:
    // As in a forward item, rows count the heads of the group fastest; under a block mask they are those of one head.
    KeyRange visible(std::int64_t row) const { return window.visible(row / heads); }

    template <class Element>
    Element* row_of(const catalog_tensor& tensor, std::int64_t head, std::int64_t query) const {
        return rows_of<Element>(tensor, seq.batch, head, seq.first_q)[query];
    }

    float* dq_acc(std::int64_t head, std::int64_t query) const {
        return rows_of<float>(args.dq_acc, seq.batch, head, seq.first_q, item.split)[query];
    }

    template <class Element>
    Rows<Element> keys_of(const catalog_tensor& tensor, std::int64_t first_key) const {
        return rows_of<Element>(tensor, seq.batch, item.head_k, seq.first_k).from(first_key);
    }

    void store_randval() const {
        for (std::int64_t head = first_head; head < end_head; ++head)
            for (std::int64_t query = 0; query < seq.seqlen_q; ++query)
                dropout.store(Dropout::row(args, seq, head, query), window.keys,
                              row_of<std::uint8_t>(args.randval, head, query));
    }

    // Clears dQ of rows that see none of the item's first keys, for later keys to add to. `head` is that of row 0.
    void clear_dq(std::int64_t head, std::int64_t first_row, std::int64_t count) const {
        for (std::int64_t row = first_row; row < first_row + count; ++row)
            std::fill_n(dq_acc(head + row % heads, row / heads), hdim_q, 0.0f);
    }

    void load_keys(KeyRange range) {
        const int count = static_cast<int>(range.end - range.begin);
        products.clear_gradients(count);
        if (rows == 0) return;  // K and V may be absent then
        products.load_keys(keys_of<const T>(args.k, range.begin), keys_of<const T>(args.v, range.begin), count);
    }

    // The rows that attend to a tile's block, `head` being that of row 0.
    void attend_rows(KeyRange range, std::int64_t head) {
        const BlockMask<Row> blocks(args, seq, head);
        for (QueryRange run{0, 0};; run.begin = run.end) {
            run = blocks.run_from(run.begin, rows, range.begin);
            if (run.empty()) return;
            for (std::int64_t row = run.begin; row < run.end; row += Row::tile_m0)
                attend_tile(range, head, row, static_cast<int>(std::min<std::int64_t>(Row::tile_m0, run.end - row)));
        }
    }

    void attend_tile(KeyRange range, std::int64_t head, std::int64_t first_row, int count) {
        const KeyRange first = visible(first_row), last = visible(first_row + count - 1);
        KeyRange seen = intersect(range, seen_by_some(first, last));
        const bool first_keys = !Row::block_mask && range.begin == window.keys.begin;
        if (seen.empty()) {
            if (first_keys) clear_dq(head, first_row, count);
            return;
        }
        const int first_key = static_cast<int>(seen.begin - range.begin) / Memory::key_step * Memory::key_step;
        seen.begin = range.begin + first_key;

        const int keys = static_cast<int>(seen.end - seen.begin);
        const int columns = round_up(keys, Row::warp_n0);
        const bool all_visible = seen_by_all(first, last).contains({seen.begin, seen.begin + columns});
        load_rows(head, first_row, count);
        for (int strip = 0; strip < count; strip += Memory::strip) {
            const int rows_of_strip = std::min(Memory::strip, count - strip);
            products.multiply_scores(strip, rows_of_strip, first_key, keys);
            for (int i = 0; i < rows_of_strip; ++i) {
                const BackwardRow& row = scratch.row[strip + i];
                const float scale = finish_scores(row, seen.begin, columns, all_visible, scratch.p[i]);
                differentiate(row, seen.begin, columns, scale, scratch.p[i], scratch.ds[i]);
                if constexpr (Row::dbias) store_dbias(row, seen.begin, keys, scratch.ds[i]);
            }
            products.keep_weights(strip, rows_of_strip, columns);
        }
        products.add_to_keys(count, first_key, keys);
        add_to_dq(first_keys, count, first_key, keys);
    }

    // Turns products into scores, but for the factor that is returned.
    float finish_scores(const BackwardRow& row, std::int64_t first_key, int columns, bool all_visible, float* s) const {
        constexpr bool plain = !Row::logits && Row::bias == Bias::none;
        float scale = Form::scales_queries ? 1.0f : scores.query_scale(row.head, row.query);
        if (!Form::scales_queries && !(plain && all_visible)) {
            for (int j = 0; j < columns; j += lanes) store(s + j, load(s + j) * scale);
            scale = 1;
        }
        scores.finish(row.head, row.query, first_key, columns, nullptr, s);
        if (!all_visible) scores.hide_masked(row.query, first_key, columns, s);
        return scale;
    }

    void load_rows(std::int64_t head_of_row_0, std::int64_t first_row, int count) {
        std::int64_t head = first_row % heads, query = first_row / heads;
        for (int i = 0; i < count; ++i) {
            const std::int64_t head_q = head_of_row_0 + head;
            products.load_row(i, row_of<const T>(args.q, head_q, query), row_of<const T>(args.grad_o, head_q, query),
                              scores.query_scale(head_q, query));
            const float lse = *row_of<const float>(args.lse, head_q, query);
            // Every weight of a row that sees no key is 0, not exp(-infinity + infinity).
            scratch.row[i] = {head_q, query,
                              lse == -infinity ? infinity : (lse - scores.shift(head_q, query)) * log2_e,
                              *row_of<const float>(args.delta, head_q, query), dq_acc(head_q, query)};
            if (++head == heads) head = 0, ++query;
        }
        products.finish_rows(count);
    }

    // `scale` times S becomes Z * P for dV, and dP becomes dS, times the slope of the soft cap.
    void differentiate(const BackwardRow& row, std::int64_t first_key, int columns, float scale, float* p,
                       float* ds) const {
        if constexpr (Row::dropout)
            dropout.factors(Dropout::row(args, seq, row.head, row.query), first_key, columns, scratch.factors);
        [[maybe_unused]] const float cap = args.logits_soft_cap * log2_e;
        for (int j = 0; j < columns; j += lanes) {
            const Float weight = exp2_or_infinity(load(p + j) * scale - row.lse);
            const Float factor = Row::dropout ? load(scratch.factors + j) : splat(1.0f);
            Float gradient = weight * (load(ds + j) * factor - row.delta);
            if constexpr (Row::logits) {
                // What is hidden, -infinity, is at the end of the range, where the slope is 0.
                const Float tanh = max(load(p + j), splat(-cap)) / cap;
                gradient = gradient * (1.0f - tanh * tanh);
            }
            store(p + j, weight * factor);
            store(ds + j, gradient);
        }
    }

    void store_dbias(const BackwardRow& row, std::int64_t first_key, int keys, const float* ds) const {
        T* dbias = row_of<T>(args.dbias, row.head, row.query) + first_key;
        for (int j = 0; j < keys; j += lanes) store_first(dbias + j, load(ds + j), keys - j);
    }

    // dQ += scale dS K; at the item's first keys it is stored instead of added.
    void add_to_dq(bool first_keys, int count, int first_key, int keys) {
        constexpr bool whole = !Row::pad_d && Memory::columns_dq == Row::hdim_q;
        products.add_to_dq(count, first_key, keys, [&](int row, int column, Float sum) {
            float* dq = scratch.row[row].dq + column;
            const int left = whole ? lanes : hdim_q - column;
            if (left > 0) store_first(dq, (first_keys ? Float{} : load_first(dq, left)) + sum * args.scale, left);
        });
    }

    const catalog_args& args;
    const KeyItem& item;
    Memory& scratch;
    const Sequence seq;
    const Window window;
    const Scores<Row> scores;
    const Dropout dropout{args};
    const std::int64_t heads, rows;
    const std::int64_t first_head, end_head;  // of the group
    const int hdim_q, hdim_v;
    const Form products{scratch, hdim_q, hdim_v};
};

}  // namespace catalog::host
