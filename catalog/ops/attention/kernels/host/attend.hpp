// Attention of one work item: some query rows of a group of heads that share a K/V head, against the keys they see.
#pragma once

#include "call.hpp"
#include "direct_tiles.hpp"
#include "host/math.hpp"
#include "philox.hpp"
#include "scores.hpp"
#include "tile.hpp"
#include "work.hpp"

namespace catalog::host {

// `partial`: O and LSE of one split are written to the workspaces o_acc and lse_acc.
template <class Row, bool partial>
class Attention {
    using T = QueryElement<Row>;
    using Memory = Scratch<Row>;
    static_assert(!Row::block_mask || mask_step_kv % Memory::step == 0, "a tile that ends with a block has whole steps");

   public:
    Attention(const catalog_args& args, const WorkItem& item, std::int64_t most_rows, Memory& scratch)
        : args(args),
          item(item),
          scratch(scratch),
          seq(sequence_of<Row>(args, item.sequence)),
          window(window_of<Row>(
              args, seq,
              partial ? keys_of_split(seq.seqlen_k, item.split, args.num_splits, Row::tile_n0)
                      : KeyRange{0, seq.seqlen_k})),
          scores(args, seq, window),
          heads(heads_of_item<Row>(args)),
          blocks(args, seq, item.group * heads),
          rows(std::min(most_rows, seq.seqlen_q * heads - item.first_row)),
          hdim_q(Row::pad_d ? static_cast<int>(args.hdim_q) : Row::hdim_q),
          hdim_v(Row::pad_dv ? static_cast<int>(args.hdim_v) : Row::hdim_v) {}

    void run() {
        // Depends on the sequence, not on the item: results must not depend on how threads divide the work.
        const std::int64_t all_rows = seq.seqlen_q * heads;
        if (has_direct_tiles<Row> && FewInTiles::pays(all_rows, hdim_q, hdim_v))
            attend<FewInTiles>();
        else if (reads_tables && FewBytes::pays(all_rows, hdim_q, hdim_v) && has_byte_tables())
            attend<FewBytes>();
        else if (FewRows::pays(all_rows, hdim_q, hdim_v))
            attend<FewRows>();
        else if (DirectTile<Row>::pays(all_rows, hdim_q, hdim_v))
            attend<DirectTile<Row>>();
        else
            attend<typename Copied<Row>::Tile>();
        finish();
    }

   private:
#if defined(__AVX512F__)
    static constexpr bool pairs_few = std::is_same_v<UnitOf<Row>, BrainPair>;
    static constexpr bool reads_tables = has_bytes<Row> && !pairs_few;
    using Plain = FloatReader<typename Row::dtype>;
    using Tables = FloatReaderOfTables<typename Row::dtype>;
    using FewBytes = DirectTile<Row, float, std::conditional_t<reads_tables, Tables, Plain>>;
#else  // where it has been timed
    static constexpr bool pairs_few = false, reads_tables = false;
    using FewBytes = DirectTile<Row>;
#endif
    using FewRows = DirectTile<Row, std::conditional_t<pairs_few, BrainPair, float>>;
    using FewInTiles = std::conditional_t<has_direct_tiles<Row>, DirectTiles<Row>, FewRows>;

    template <class Element>
    Element* row_of(const catalog_tensor& tensor, const ItemRow& row) const {
        const std::int64_t split = partial ? item.split : 0;
        return rows_of<Element>(tensor, seq.batch, row.head, seq.first_q, split)[row.query];
    }

    template <class Tile>
    void start() {
        std::int64_t query = item.first_row / heads, head = item.first_row % heads;
        for (std::int64_t i = 0; i < rows; ++i) {
            const std::int64_t head_q = item.group * heads + head;
            ItemRow& row = scratch.row[i] = {head_q, query, scores.query_scale(head_q, query), {}};
            Tile::pack_query(scratch, i, row_of<const T>(args.q, row), hdim_q);
            std::fill_n(scratch.o[i], Memory::columns, 0.0f);
            if (++head == heads) head = 0, ++query;
        }
    }

    template <class Tile>
    void attend() {
        start<Tile>();
        const KeyRange seen =
            seen_by_some(window.visible(scratch.row[0].query), window.visible(scratch.row[rows - 1].query));
        const std::int64_t first_key = std::max(window.keys.begin, blocks.tile_begin(seen.begin));
        if constexpr (Row::sink)
            attend_keys<Tile>(window.keys.begin, std::min({window.sinks, first_key, seen.end}));
        attend_keys<Tile>(first_key, seen.end);
    }

    // Keys from `first` up to `end`; K and V may be NULL if there are none.
    template <class Tile>
    void attend_keys(std::int64_t first, std::int64_t end) {
        const KvSource<Row> source(args, seq, item.group * heads / heads_per_kv_head(args));
        auto tile_of = [&, turn = 0](KeyRange range) mutable {
            const auto count = static_cast<int>(range.end - range.begin);
            return source.tile(range.begin, count, scratch.room[turn ^= 1]);
        };
        const auto from = [&](std::int64_t key) {
            return blocks.next_tile(key, end, scratch.row[0].query, scratch.row[rows - 1].query);
        };
        KeyRange range = from(first);
        if (range.empty()) return;
        for (KvTile<Row> next = tile_of(range); !range.empty();) {
            const KvTile<Row> present = next;
            const KeyRange following = from(range.end);
            if (!following.empty()) next = tile_of(following);
            const Tile tile(scratch, present, next, hdim_q, hdim_v);
            if constexpr (has_key_scales<Row>) {
                source.scales(args.k_descale, range.begin, present.count, scratch.k_scales);
                source.scales(args.v_descale, range.begin, present.count, scratch.v_scales);
                std::fill(scratch.k_scales + present.count, scratch.k_scales + Row::tile_n0, 0.0f);
                std::fill(scratch.v_scales + present.count, scratch.v_scales + Row::tile_n0, 0.0f);
            }
            for (std::int64_t row = 0; row < rows; row += Row::tile_m0)
                attend_rows(tile, range, row, std::min<std::int64_t>(row + Row::tile_m0, rows));
            range = following;
        }
    }

    // The rows of a tile, up to `end`, that attend to its keys.
    template <class Tile>
    void attend_rows(const Tile& tile, KeyRange range, std::int64_t first_row, std::int64_t end) {
        if constexpr (Row::block_mask) {
            const std::int64_t last_query = item.first_row + end;
            for (QueryRange run{item.first_row + first_row, 0};; run.begin = run.end) {
                run = blocks.run_from(run.begin, last_query, range.begin);
                if (run.empty()) return;
                attend_tile(tile, range, run.begin - item.first_row, static_cast<int>(run.end - run.begin));
            }
        } else {
            attend_tile(tile, range, first_row, static_cast<int>(end - first_row));
        }
    }

    // The columns of a tile that each row sees; with sinks, all from the first one to the end of the row's window.
    void find_seen(KeyRange range, const ItemRow* row, int count) {
        const int keys = static_cast<int>(range.end - range.begin);
        const auto column_of = [&](std::int64_t key) {
            return static_cast<int>(std::clamp<std::int64_t>(key - range.begin, 0, keys));
        };
        const KeyRange first = window.visible(row[0].query), last = window.visible(row[count - 1].query);
        if (seen_by_all(first, last).contains(range)) {
            std::fill_n(scratch.seen, count, Columns{0, keys});
            return;
        }
        const bool has_sinks = Row::sink && range.begin < window.sinks;
        for (int i = 0; i < count; ++i) {
            const KeyRange sees = window.visible(row[i].query);
            const int begin = has_sinks ? 0 : column_of(sees.begin);
            scratch.seen[i] = {begin, std::max(begin, column_of(sees.end))};
        }
    }

    template <class Tile>
    void attend_tile(const Tile& tile, KeyRange range, std::int64_t first_row, int count) {
        ItemRow* const row = scratch.row + first_row;
        find_seen(range, row, count);
        if (scratch.seen[count - 1].end <= scratch.seen[0].begin) return;

        tile.multiply_q_k(first_row, count);
        weigh(tile, range.begin, row, count);
        tile.multiply_p_v(first_row, count);
    }

    // Turns a tile's products into the weights for P V. Compiled once for all kinds of tiles with float32 weights.
    template <class Tile>
    void weigh(const Tile& tile, std::int64_t first_key, ItemRow* row, int count) {
        if constexpr (!multiplies_pairs<Row> || std::is_same_v<Tile, DirectTile<Row>>)
            weigh_floats(first_key, row, count, Tile::block_rows);
        else if constexpr (has_direct_tiles<Row> && std::is_same_v<Tile, FewInTiles>)
            this->weigh_pairs(first_key, row, count, Tile::block_rows, tile.beside_weights(count));
        else
            this->weigh_pairs(first_key, row, count, Tile::block_rows, {{}, 0, 0});  // nothing is prefetched
    }

    // Calls weigh(std::integral_constant<int, rows>, first) for rows that see the same columns of a tile, side by side.
    template <class Weigh>
    void weigh_side_by_side(int count, const Weigh& weigh) const {
        const Columns* const seen = scratch.seen;
        for (int i = 0; i < count;) {
            int rows = 1;
            while (rows < rows_beside && i + rows < count && seen[i + rows] == seen[i]) ++rows;
            if (rows == rows_beside)
                weigh(std::integral_constant<int, rows_beside>{}, i);
            else
                for (int r = 0; r < rows; ++r) weigh(std::integral_constant<int, 1>{}, i + r);
            i += rows;
        }
    }

    // `block`: rows of the register blocks of P V.
    __attribute__((noinline)) void weigh_floats(std::int64_t first_key, ItemRow* row, int count, int block) {
        weigh_side_by_side(count, [&](auto rows, int i) {
            const Columns seen = scratch.seen[i], whole = Memory::whole_vectors(seen);
            for (int r = i; r < i + rows; ++r) finish_scores(row[r], first_key, seen, whole, scratch.s[r]);
            softmax_rows<rows>(scratch.s[i] + whole.begin, Memory::row_s, whole.end - whole.begin,
                               [&](int r) -> RowState& { return row[i + r].state; }, scratch.rescale + i);
            for (int r = i; r < i + rows; ++r) {
                apply_factors(row[r], first_key, whole, scratch.s[r]);
                zero_unseen(scratch.seen, r, count, block, whole, scratch.s[r]);
            }
        });
    }

#if defined(CATALOG_BRAIN_PAIRS)

    // Scores that only need their scale get it in the softmax.
    __attribute__((noinline)) void weigh_pairs(std::int64_t first_key, ItemRow* row, int count, int block,
                                               typename TileAhead<Row>::Lines ahead) {
        constexpr bool plain = !Row::logits && !Row::sink && Row::bias == Bias::none && !has_key_scales<Row>;
        weigh_side_by_side(count, [&](auto rows, int i) {
            const Columns seen = scratch.seen[i], whole = Memory::whole_vectors(seen);
            const bool finishes = !plain || Row::dropout || !(seen == whole);
            const int columns = whole.end - whole.begin;
            float* const s = scratch.s[i] + whole.begin;
            auto* const p = scratch.p[i] + whole.begin / Memory::factors;
            float scale[rows];
            for (int r = 0; r < rows; ++r) {
                scale[r] = row[i + r].scale;
                if (!finishes) continue;
                float* const of_row = s + r * Memory::row_s;
                for (int j = 0; j < columns; j += lanes) store(of_row + j, load(of_row + j) * scale[r]);
                finish_scores(row[i + r], first_key, seen, whole, scratch.s[i + r]);
                scale[r] = 1;
            }
            const auto state = [&](int r) -> RowState& { return row[i + r].state; };
            if constexpr (Row::dropout || has_key_scales<Row>) {
                softmax_rows<rows>(s, Memory::row_s, columns, state, scratch.rescale + i);
                for (int r = 0; r < rows; ++r) {
                    apply_factors(row[i + r], first_key, whole, scratch.s[i + r]);
                    round_weights(s + r * Memory::row_s, columns, p + r * Memory::row_p);
                }
            } else {
                softmax_rows<rows, 2>(
                    columns, [&](int r, int j) { return load(s + r * Memory::row_s + j) * scale[r]; },
                    [&](int r, int j, const Float (&weights)[2]) {
                        store_weights(p + r * Memory::row_p + j / Memory::factors, weights[0], weights[1]);
                    },
                    state, scratch.rescale + i);
            }
            for (int r = i; r < i + rows; ++r)
                zero_unseen<Memory::step>(scratch.seen, r, count, block, whole, scratch.p[r]);
            ahead.ask_rows(TileAhead<Row>::beside_weights);
        });
    }

#endif

    // Turns products of the tile's columns `whole`, starting at `first_key`, into scores; -infinity for those not seen.
    void finish_scores(const ItemRow& row, std::int64_t first_key, Columns seen, Columns whole, float* s) const {
        const std::int64_t key = first_key + whole.begin;
        const int columns = whole.end - whole.begin;
        const float* key_scales = has_key_scales<Row> ? scratch.k_scales + whole.begin : nullptr;
        scores.finish(row.head, row.query, key, columns, key_scales, s + whole.begin);
        if (Row::sink || seen.begin != whole.begin || seen.end != whole.end)
            scores.hide_masked(row.query, key, columns, s + whole.begin);
    }

    // Steps between the softmax and P V: dropout, and the factors of quantised values.
    void apply_factors(const ItemRow& row, std::int64_t first_key, Columns whole, float* p) const {
        if constexpr (Row::dropout)
            dropout.apply(Dropout::row(args, seq, row.head, row.query), first_key + whole.begin,
                          whole.end - whole.begin, p + whole.begin);
        if constexpr (has_key_scales<Row>)
            for (int j = whole.begin; j < whole.end; j += lanes) store(p + j, load(p + j) * load(scratch.v_scales + j));
    }

    void finish() {
        using Output = std::conditional_t<partial, float, typename Row::otype>;
        for (std::int64_t i = 0; i < rows; ++i) {
            const ItemRow& row = scratch.row[i];
            const auto [max, sum] = row.state;
            float normalize = sum == 0 ? 0.0f : 1.0f / sum;  // the output of a row that sees no key is zero
            float lse = max * ln_2 + log(sum) + scores.shift(row.head, row.query);
            // With several splits, the first one includes the sink.
            if (args.sink.data && item.split == 0) {
                const float with_sink = log_add(lse, list_of<float>(args.sink)[row.head * args.sink.stride_nhead]);
                if (with_sink != -infinity) normalize *= exp(lse - with_sink);
                lse = with_sink;
            }
            if constexpr (Row::qscale == Qscale::pertensor) normalize *= *list_of<float>(args.v_descale);
            Output* o = row_of<Output>(partial ? args.o_acc : args.o, row);
            for (int d = 0; d < hdim_v; d += lanes)
                store_first(o + d, load(scratch.o[i] + d) * normalize, hdim_v - d);
            if constexpr (partial || Row::lse) *row_of<float>(partial ? args.lse_acc : args.lse, row) = lse;
            if constexpr (Row::dropout)
                if (args.randval.data)
                    dropout.store(Dropout::row(args, seq, row.head, row.query), {0, seq.seqlen_k},
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
    const std::int64_t heads;
    const BlockMask<Row> blocks;  // of the item's head, if it has a bitmap
    const std::int64_t rows;
    const int hdim_q, hdim_v;
};

// Whether the tensors that will be read or written are present.
template <class Row, bool partial>
inline bool has_tensors(const catalog_args& args) {
    const Reads reads = reads_of<Row>(args);
    if (reads.queries) {
        const bool outputs = partial ? args.o_acc.data && args.lse_acc.data
                                     : args.o.data && (!Row::lse || args.lse.data);
        if (!args.q.data || !outputs || (Row::bias == Bias::alibi && !args.alibi_slopes.data)) return false;
        if (Row::qscale != Qscale::none && has_query_bytes<Row> && !args.q_descale.data) return false;
        if (Row::logits && !(args.logits_soft_cap > 0)) return false;
        if (Row::qscale == Qscale::blockscale && (args.block_scale_size_q < 1 || args.block_scale_size_kv < 1))
            return false;
    }
    // The single scale of a whole tensor is read even if there are no keys.
    if (reads.keys || (reads.queries && Row::qscale == Qscale::pertensor))
        if (Row::qscale != Qscale::none && !(args.k_descale.data && args.v_descale.data)) return false;
    if (reads.keys && (!args.k.data || !args.v.data || (Row::bias == Bias::bias && !args.bias.data))) return false;
    if (reads.keys && Row::block_mask && !args.block_mask.data) return false;
    return pages_exist<Row>(args);
}

template <class Row, bool partial>
inline std::int32_t launch_attention(const catalog_args* args) noexcept {
    if constexpr (std::is_same_v<UnitOf<Row>, HalfPair>)
        if (!amx::multiplies_halves()) return launch_attention<SplitRow<Row>, partial>(args);
    if (!is_supported<Row>()) return CATALOG_UNSUPPORTED;
    if (const catalog_status status = check_call<Row>(args); status != CATALOG_OK) return status;
    if (!valid_block_mask<Row>(*args) || !has_tensors<Row, partial>(*args)) return CATALOG_BAD_ARGUMENT;
    const int threads = threads_for(*args);
    WorkList list;
    if (!list.fill<Row>(*args, threads)) return CATALOG_NO_MEMORY;
    return for_items<Scratch<Row>>(*args, threads, list.size(), [&](std::int64_t index, Scratch<Row>& scratch) {
        const WorkItem item = list[index];
        [[maybe_unused]] const TileState<Row> tiles;
        Attention<Row, partial>(*args, item, list.chunk, scratch).run();
    });
}

}  // namespace catalog::host
