// Attention of one work item: some query rows of all heads that share a K/V head, against the keys they see.
#pragma once

#include <cmath>

#include "call.hpp"
#include "tile.hpp"
#include "work.hpp"

namespace catalog::host {

inline constexpr float log2_e = 0x1.715476p+0f;
inline constexpr float ln_2 = 0x1.62e43p-1f;

template <class Row>
class Attention {
    using T = typename Row::dtype;
    using Memory = Scratch<Row>;

   public:
    Attention(const catalog_args& args, const WorkItem& item, Memory& scratch)
        : args(args),
          item(item),
          scratch(scratch),
          seq(sequence_of<Row::group>(args, item.batch)),
          window(window_of<Row::mask>(args, seq)),
          heads(heads_per_kv_head(args)),
          hdim_q(Row::pad_d ? static_cast<int>(args.hdim_q) : Row::hdim_q),
          hdim_v(Row::pad_dv ? static_cast<int>(args.hdim_v) : Row::hdim_v) {}

    void run() {
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
        return rows_of<Element>(tensor, seq.batch, head_of(row), seq.first_q)[query_of(row)];
    }

    void start() {
        for (std::int64_t row = 0; row < item.rows; ++row) {
            pack_query(row_of<const T>(args.q, row), hdim_q, args.scale * log2_e, scratch.q[row]);
            std::fill_n(scratch.o[row], Memory::columns, 0.0f);
            scratch.state[row] = {};
        }
    }

    template <class Tile>
    void attend() {
        const KeyRange seen = seen_by_some(visible(0), visible(item.rows - 1));
        if (seen.empty()) return;  // K and V may be NULL

        const auto keys = rows_of<const T>(args.k, seq.batch, item.head_k, seq.first_k);
        const auto values = rows_of<const T>(args.v, seq.batch, item.head_k, seq.first_k);
        // Tiles start at multiples of tile_n0 whatever the item's first key: sums are the same for every division of rows.
        const std::int64_t first_key = seen.begin / Row::tile_n0 * Row::tile_n0;
        for (std::int64_t key = first_key; key < seen.end; key += Row::tile_n0) {
            const KeyRange range{key, std::min(key + Row::tile_n0, seen.end)};
            const int count = static_cast<int>(range.end - range.begin);
            const Tile tile(scratch, keys.from(key), values.from(key), count, hdim_q, hdim_v);
            for (std::int64_t row = 0; row < item.rows; row += Row::tile_m0)
                attend_tile(tile, range, row, static_cast<int>(std::min<std::int64_t>(Row::tile_m0, item.rows - row)));
        }
    }

    template <class Tile>
    void attend_tile(const Tile& tile, KeyRange range, std::int64_t first_row, int rows) {
        const KeyRange first = visible(first_row), last = visible(first_row + rows - 1);
        const KeyRange seen = intersect(range, seen_by_some(first, last));
        if (seen.empty()) return;

        const int keys = static_cast<int>(seen.end - range.begin);
        const int columns = round_up(keys, Tile::column_step);
        tile.multiply_q_k(first_row, rows, keys);
        if (!seen_by_all(first, last).contains({range.begin, range.begin + columns}))
            hide_masked(range.begin, first_row, rows, columns);
        for (int row = 0; row < rows; ++row)
            scratch.rescale[row] = softmax_row(scratch.s[row], columns, scratch.state[first_row + row]);
        tile.multiply_p_v(first_row, rows, keys);
    }

    void hide_masked(std::int64_t first_key, std::int64_t first_row, int rows, int columns) {
        for (int row = 0; row < rows; ++row) {
            const KeyRange seen = visible(first_row + row);
            const std::int64_t begin = std::clamp<std::int64_t>(seen.begin - first_key, 0, columns);
            const std::int64_t end = std::clamp<std::int64_t>(seen.end - first_key, begin, columns);
            float* scores = scratch.s[row];
            std::fill(scores, scores + begin, -infinity);
            std::fill(scores + end, scores + columns, -infinity);
        }
    }

    void finish() {
        for (std::int64_t row = 0; row < item.rows; ++row) {
            const auto [max, sum] = scratch.state[row];
            const float normalize = sum == 0 ? 0.0f : 1.0f / sum;  // a row that sees no key is zero
            T* o = row_of<T>(args.o, row);
            for (int d = 0; d < hdim_v; d += lanes)
                store_first(o + d, load(scratch.o[row] + d) * normalize, hdim_v - d);
            if constexpr (Row::lse) *row_of<float>(args.lse, row) = max * ln_2 + std::log(sum);
        }
    }

    const catalog_args& args;
    const WorkItem& item;
    Memory& scratch;
    const Sequence seq;
    const Window window;
    const std::int64_t heads;
    const int hdim_q, hdim_v;
};

}  // namespace catalog::host
