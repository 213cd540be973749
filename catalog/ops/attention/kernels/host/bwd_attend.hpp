// The backward pass of one work item: some keys of a K/V head, against all query rows that read them.
//
// With P = exp(S - LSE) and Z the dropout factors, dV = (Z * P)^T dO, dP = Z * (dO V^T), dS = P * (dP - delta); and
// from S = scale Q K^T + bias follow dQ = scale dS K, dK = scale dS^T Q, dbias = dS. Under a soft cap, S = c tanh(scale
// Q K^T / c), dS is multiplied by 1 - (S / c)^2 before. An item owns its keys, so its dK and dV are complete; its dQ is
// one part of the sum.
#pragma once

#include "bwd_scratch.hpp"
#include "call.hpp"
#include "host/gemm.hpp"
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

   public:
    Backward(const catalog_args& args, const KeyItem& item, Memory& scratch)
        : args(args),
          item(item),
          scratch(scratch),
          seq(sequence_of<Row>(args, item.sequence)),
          window(window_of<Row>(args, seq, keys_of_split(seq.seqlen_k, item.split, args.num_splits, Row::tile_n0))),
          scores(args, seq, window),
          heads(heads_per_kv_head(args)),
          rows(seq.seqlen_q * heads),
          hdim_q(Row::pad_d ? static_cast<int>(args.hdim_q) : Row::hdim_q),
          hdim_v(Row::pad_dv ? static_cast<int>(args.hdim_v) : Row::hdim_v) {}

    void run() {
        if constexpr (Row::store_randval)
            if (args.randval.data) store_randval();
        if (window.keys.empty()) clear_dq(0, rows);
        for (std::int64_t key = window.keys.begin; key < window.keys.end; key += Row::tile_n0) {
            const KeyRange range{key, std::min(key + Row::tile_n0, window.keys.end)};
            load_keys(range);
            for (std::int64_t row = 0; row < rows; row += Row::tile_m0)
                attend_tile(range, row, static_cast<int>(std::min<std::int64_t>(Row::tile_m0, rows - row)));
            store_keys(range);
        }
    }

   private:
    // As in a forward item, rows count the heads of the group fastest.
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
        for (std::int64_t head = item.head_k * heads; head < (item.head_k + 1) * heads; ++head)
            for (std::int64_t query = 0; query < seq.seqlen_q; ++query)
                dropout.store(Dropout::row(args, seq, head, query), window.keys,
                              row_of<std::uint8_t>(args.randval, head, query));
    }

    // Clears dQ of rows that see none of the item's first keys, for later keys to add to.
    void clear_dq(std::int64_t first_row, std::int64_t count) const {
        for (std::int64_t row = first_row; row < first_row + count; ++row)
            std::fill_n(dq_acc(item.head_k * heads + row % heads, row / heads), hdim_q, 0.0f);
    }

    void load_keys(KeyRange range) {
        const int count = static_cast<int>(range.end - range.begin);
        std::fill_n(scratch.dk[0], count * Memory::columns_q, 0.0f);
        std::fill_n(scratch.dv[0], count * Memory::columns_v, 0.0f);
        if (rows == 0) return;  // K and V may be absent then
        const auto k = keys_of<const T>(args.k, range.begin), v = keys_of<const T>(args.v, range.begin);
        pack_transposed<Row::warp_n0, Memory::depth_q>(k, count, hdim_q, scratch.k_transposed);
        pack_transposed<Row::warp_n0, Memory::depth_v>(v, count, hdim_v, scratch.v_transposed);
        pack_columns<Row::warp_n0, Row::tile_n0>(k, count, hdim_q, scratch.k);
    }

    // Q is packed times scale * log2(e), or scale / cap, and dK has only the scale.
    void store_keys(KeyRange range) const {
        const int count = static_cast<int>(range.end - range.begin);
        const float rest = Row::logits ? args.logits_soft_cap : ln_2;
        const Rows<T> dk = keys_of<T>(args.dk, range.begin), dv = keys_of<T>(args.dv, range.begin);
        for (int key = 0; key < count; ++key) {
            for (int d = 0; d < hdim_q; d += lanes)
                store_first(dk[key] + d, load(scratch.dk[key] + d) * rest, hdim_q - d);
            for (int d = 0; d < hdim_v; d += lanes) store_first(dv[key] + d, load(scratch.dv[key] + d), hdim_v - d);
        }
    }

    void attend_tile(KeyRange range, std::int64_t first_row, int count) {
        const KeyRange first = visible(first_row), last = visible(first_row + count - 1);
        KeyRange seen = intersect(range, seen_by_some(first, last));
        const bool first_keys = range.begin == window.keys.begin;
        if (seen.empty()) {
            if (first_keys) clear_dq(first_row, count);
            return;
        }
        const int first_key = static_cast<int>(seen.begin - range.begin) / Memory::key_step * Memory::key_step;
        seen.begin = range.begin + first_key;

        const int keys = static_cast<int>(seen.end - seen.begin);
        const int columns = round_up(keys, Row::warp_n0);
        const bool all_visible = seen_by_all(first, last).contains({seen.begin, seen.begin + columns});
        load_rows(first_row, count);
        multiply_panels<Row::warp_m0, Row::warp_n0, Memory::row_q, 1>(
            scratch.q[0], scratch.k_transposed + first_key * Memory::depth_q, Memory::depth_q, Row::warp_n0, count,
            keys, hdim_q, store_to<Memory::row_p>(scratch.p[0]));
        multiply_panels<Row::warp_m0, Row::warp_n0, Memory::row_v, 1>(
            scratch.grad_o[0], scratch.v_transposed + first_key * Memory::depth_v, Memory::depth_v, Row::warp_n0, count,
            keys, hdim_v, store_to<Memory::row_p>(scratch.ds[0]));
        for (int i = 0; i < count; ++i) {
            const BackwardRow& row = scratch.row[i];
            scores.finish(row.head, row.query, seen.begin, columns, nullptr, scratch.p[i]);
            if (!all_visible) scores.hide_masked(row.query, seen.begin, columns, scratch.p[i]);
            differentiate(row, seen.begin, columns, scratch.p[i], scratch.ds[i]);
            if constexpr (Row::dbias) store_dbias(row, seen.begin, keys, scratch.ds[i]);
        }
        // Weights of columns after the last key are zeros, because whole register blocks are faster.
        add_to_keys(count, first_key, std::min(round_up(keys, Row::warp_m1), columns));
        add_to_dq(first_keys, count, first_key, keys);
    }

    void load_rows(std::int64_t first_row, int count) {
        std::int64_t head = first_row % heads, query = first_row / heads;
        for (int i = 0; i < count; ++i) {
            const std::int64_t head_q = item.head_k * heads + head;
            pack_row(row_of<const T>(args.q, head_q, query), hdim_q, scores.query_scale(head_q, query),
                     Memory::columns_q, scratch.q[i]);
            pack_row(row_of<const T>(args.grad_o, head_q, query), hdim_v, 1.0f, Memory::columns_v, scratch.grad_o[i]);
            const float lse = *row_of<const float>(args.lse, head_q, query);
            // Every weight of a row that sees no key is 0, not exp(-infinity + infinity).
            scratch.row[i] = {head_q, query,
                              lse == -infinity ? infinity : (lse - scores.shift(head_q, query)) * log2_e,
                              *row_of<const float>(args.delta, head_q, query), dq_acc(head_q, query)};
            if (++head == heads) head = 0, ++query;
        }
    }

    // Columns after the head dim become zeros, as parts of register blocks.
    static void pack_row(const T* row, int hdim, float scale, int columns, float* packed) {
        for (int d = 0; d < columns; d += lanes) store(packed + d, load_first(row + d, hdim - d) * scale);
    }

    // S becomes Z * P for dV, and dP becomes dS, times the slope of the soft cap.
    void differentiate(const BackwardRow& row, std::int64_t first_key, int columns, float* p, float* ds) const {
        if constexpr (Row::dropout)
            dropout.factors(Dropout::row(args, seq, row.head, row.query), first_key, columns, scratch.factors);
        [[maybe_unused]] const float cap = args.logits_soft_cap * log2_e;
        for (int j = 0; j < columns; j += lanes) {
            const Float weight = exp2_or_infinity(load(p + j) - row.lse);
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

    // dV += P^T dO and dK += dS^T Q, for the keys of the tile from `first_key` on.
    void add_to_keys(int count, int first_key, int keys) {
        multiply_panels<Row::warp_m1, Row::warp_n1, 1, Memory::row_p>(
            scratch.p[0], scratch.grad_o[0], 1, Memory::row_v, keys, hdim_v, count,
            add_to<Memory::columns_v>(scratch.dv[first_key]));
        multiply_panels<Row::warp_m1, Row::warp_n1, 1, Memory::row_p>(
            scratch.ds[0], scratch.q[0], 1, Memory::row_q, keys, hdim_q, count,
            add_to<Memory::columns_q>(scratch.dk[first_key]));
    }

    // dQ += scale dS K; at the item's first keys it is stored instead of added.
    void add_to_dq(bool first_keys, int count, int first_key, int keys) {
        constexpr bool whole = !Row::pad_d && Memory::columns_dq == Row::hdim_q;
        multiply_panels<Row::warp_m0, Row::warp_n0, Memory::row_p, 1>(
            scratch.ds[0], scratch.k + first_key * Row::warp_n0, Row::tile_n0, Row::warp_n0, count, hdim_q, keys,
            [&](int row, int column, Float sum) {
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
    const int hdim_q, hdim_v;
};

}  // namespace catalog::host
