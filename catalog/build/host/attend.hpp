// Attention of one work item: some query rows of all heads that share a K/V head, against the keys they see.
#pragma once

#include <cmath>

#include "call.hpp"
#include "philox.hpp"
#include "scores.hpp"
#include "tile.hpp"
#include "work.hpp"

namespace catalog::host {

// `partial`: O and LSE of one split go to the workspaces o_acc and lse_acc.
template <class Row, bool partial>
class Attention {
    using T = typename Row::dtype;
    using Memory = Scratch<Row>;

   public:
    Attention(const catalog_args& args, const WorkItem& item, Memory& scratch)
        : args(args),
          item(item),
          scratch(scratch),
          seq(sequence_of<Row>(args, item.sequence)),
          window(window_of<Row>(
              args, seq,
              partial ? keys_of_split(seq.seqlen_k, item.split, args.num_splits, Row::tile_n0)
                      : KeyRange{0, seq.seqlen_k})),
          scores(args, seq, window),
          heads(heads_per_kv_head(args)),
          // A sequence shorter than the longest has fewer rows than the work list assumes.
          rows(std::min(item.rows, seq.seqlen_q * heads - item.first_row)),
          hdim_q(Row::pad_d ? static_cast<int>(args.hdim_q) : Row::hdim_q),
          hdim_v(Row::pad_dv ? static_cast<int>(args.hdim_v) : Row::hdim_v) {}

    void run() {
        if (rows <= 0) return;
        start();
        // Decided by the sequence, not by the item: results must not depend on how threads divide the work.
        if (DirectTile<Row>::pays(seq.seqlen_q * heads, hdim_q, hdim_v))
            attend<DirectTile<Row>>();
        else
            attend<PackedTile<Row>>();
        finish();
    }

   private:
    std::int64_t head_of(std::int64_t row) const { return item.head_k * heads + (item.first_row + row) % heads; }
    std::int64_t query_of(std::int64_t row) const { return (item.first_row + row) / heads; }
    KeyRange visible(std::int64_t row) const { return window.visible(query_of(row)); }

    template <class Element>
    Element* row_of(const catalog_tensor& tensor, std::int64_t row) const {
        const std::int64_t split = partial ? item.split : 0;
        return rows_of<Element>(tensor, seq.batch, head_of(row), seq.first_q, split)[query_of(row)];
    }

    void start() {
        for (std::int64_t row = 0; row < rows; ++row) {
            const std::int64_t head = head_of(row), query = query_of(row);
            pack_query(row_of<const T>(args.q, row), hdim_q, scores.query_scale(head, query), scratch.q[row]);
            std::fill_n(scratch.o[row], Memory::columns, 0.0f);
            scratch.state[row] = {};
        }
    }

    template <class Tile>
    void attend() {
        const KeyRange seen = seen_by_some(visible(0), visible(rows - 1));
        // Tiles start at multiples of tile_n0 whatever the item's first key: sums are the same for every division of rows.
        const std::int64_t first_key = std::max(window.keys.begin, seen.begin / Row::tile_n0 * Row::tile_n0);
        if constexpr (Row::sink)
            attend_keys<Tile>(window.keys.begin, std::min({window.sinks, first_key, seen.end}));
        attend_keys<Tile>(first_key, seen.end);
    }

    // Keys from `first` up to `end`; K and V may be NULL where there are none.
    template <class Tile>
    void attend_keys(std::int64_t first, std::int64_t end) {
        const KvSource<Row> source(args, seq, item.head_k);
        for (std::int64_t key = first; key < end; key += Row::tile_n0) {
            const KeyRange range{key, std::min(key + Row::tile_n0, end)};
            const int count = static_cast<int>(range.end - range.begin);
            const Tile tile(scratch, source.keys(key, count, scratch.gathered_k),
                            source.values(key, count, scratch.gathered_v), count, hdim_q, hdim_v);
            if constexpr (has_key_scales<Row>) {
                source.scales(args.k_descale, key, count, scratch.k_scales);
                source.scales(args.v_descale, key, count, scratch.v_scales);
                std::fill(scratch.k_scales + count, scratch.k_scales + Row::tile_n0, 0.0f);
                std::fill(scratch.v_scales + count, scratch.v_scales + Row::tile_n0, 0.0f);
            }
            for (std::int64_t row = 0; row < rows; row += Row::tile_m0)
                attend_tile(tile, range, row, static_cast<int>(std::min<std::int64_t>(Row::tile_m0, rows - row)));
        }
    }

    template <class Tile>
    void attend_tile(const Tile& tile, KeyRange range, std::int64_t first_row, int count) {
        const KeyRange first = visible(first_row), last = visible(first_row + count - 1);
        const KeyRange seen = {range.begin, std::min(range.end, last.end)};
        const bool has_sinks = Row::sink && range.begin < window.sinks;
        if (seen.empty() || (seen.end <= first.begin && !has_sinks)) return;

        const int keys = static_cast<int>(seen.end - range.begin);
        const int columns = round_up(keys, Tile::column_step);
        tile.multiply_q_k(first_row, count, keys);
        const bool all_visible = seen_by_all(first, last).contains({range.begin, range.begin + columns});
        for (int i = 0; i < count; ++i) {
            const std::int64_t row = first_row + i;
            scores.finish(head_of(row), query_of(row), range.begin, columns, scratch.k_scales, scratch.s[i]);
            if (!all_visible) scores.hide_masked(query_of(row), range.begin, columns, scratch.s[i]);
            scratch.rescale[i] = softmax_row(scratch.s[i], columns, scratch.state[row]);
            weigh(row, range.begin, columns, scratch.s[i]);
        }
        tile.multiply_p_v(first_row, count, keys);
    }

    // What comes between the softmax and P V: dropout, and the factors of quantised values.
    void weigh(std::int64_t row, std::int64_t first_key, int columns, float* p) const {
        if constexpr (Row::dropout)
            dropout.apply(Dropout::row(args, seq, head_of(row), query_of(row)), first_key, columns, p);
        if constexpr (has_key_scales<Row>)
            for (int j = 0; j < columns; j += lanes) store(p + j, load(p + j) * load(scratch.v_scales + j));
    }

    void finish() {
        using Output = std::conditional_t<partial, float, typename Row::otype>;
        for (std::int64_t row = 0; row < rows; ++row) {
            const auto [max, sum] = scratch.state[row];
            const std::int64_t head = head_of(row), query = query_of(row);
            float normalize = sum == 0 ? 0.0f : 1.0f / sum;  // a row that sees no key is zero
            float lse = max * ln_2 + std::log(sum) + scores.shift(head, query);
            // Of several splits the first has the sink.
            if (args.sink.data && item.split == 0) {
                const float with_sink = log_add(lse, list_of<float>(args.sink)[head * args.sink.stride_nhead]);
                if (with_sink != -infinity) normalize *= std::exp(lse - with_sink);
                lse = with_sink;
            }
            if constexpr (Row::qscale == Qscale::pertensor) normalize *= *list_of<float>(args.v_descale);
            Output* o = row_of<Output>(partial ? args.o_acc : args.o, row);
            for (int d = 0; d < hdim_v; d += lanes)
                store_first(o + d, load(scratch.o[row] + d) * normalize, hdim_v - d);
            if constexpr (partial || Row::lse) *row_of<float>(partial ? args.lse_acc : args.lse, row) = lse;
            if constexpr (Row::dropout)
                if (args.randval.data)
                    dropout.store(Dropout::row(args, seq, head_of(row), query_of(row)), {0, seq.seqlen_k},
                                  row_of<std::uint8_t>(args.randval, row));
        }
    }

    const catalog_args& args;
    const WorkItem& item;
    Memory& scratch;
    const Sequence seq;
    const Window window;
    const Scores<Row> scores;
    const Dropout dropout{args};
    const std::int64_t heads, rows;
    const int hdim_q, hdim_v;
};

// Whether the tensors that will be read or written are there.
template <class Row, bool partial>
inline bool has_tensors(const catalog_args& args) {
    const Reads reads = reads_of<Row>(args);
    if (reads.queries) {
        const bool outputs = partial ? args.o_acc.data && args.lse_acc.data
                                     : args.o.data && (!Row::lse || args.lse.data);
        if (!args.q.data || !outputs || (Row::bias == Bias::alibi && !args.alibi_slopes.data)) return false;
        if (Row::qscale != Qscale::none && !args.q_descale.data) return false;
        if (Row::logits && !(args.logits_soft_cap > 0)) return false;
        if (Row::qscale == Qscale::blockscale && (args.block_scale_size_q < 1 || args.block_scale_size_kv < 1))
            return false;
    }
    // The one scale of a whole tensor is read even where there are no keys.
    if (reads.keys || (reads.queries && Row::qscale == Qscale::pertensor))
        if (Row::qscale != Qscale::none && !(args.k_descale.data && args.v_descale.data)) return false;
    if (reads.keys && (!args.k.data || !args.v.data || (Row::bias == Bias::bias && !args.bias.data))) return false;
    return pages_exist<Row>(args);
}

template <class Row, bool partial>
inline std::int32_t launch_attention(const catalog_args* args) noexcept {
    if (const catalog_status status = check_call<Row>(args); status != CATALOG_OK) return status;
    if (!has_tensors<Row, partial>(*args)) return CATALOG_BAD_ARGUMENT;
    const int threads = threads_for(*args);
    const WorkList list = work_list<Row>(*args, threads);
    return for_items<Scratch<Row>>(threads, list.size(), [&](std::int64_t index, Scratch<Row>& scratch) {
        const WorkItem item = list[index];
        Attention<Row, partial>(*args, item, scratch).run();
    });
}

}  // namespace catalog::host
