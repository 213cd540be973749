// How a launch is divided among threads.
#pragma once

#include "call.hpp"
#include "scratch.hpp"

namespace catalog::host {

// Query rows count the heads of a group fastest: row r is query r / heads of the group's head r % heads. So the rows of
// a tile see nearly the same keys, and the heads of one decode step fill one tile.
struct WorkItem {
    std::int64_t batch, head_k, first_row, rows;
};

// Work items of a launch: chunks of query rows, for every K/V head of every sequence.
struct WorkList {
    std::int64_t heads_k;
    std::int64_t columns;  // K/V heads of all sequences
    std::int64_t rows;     // query rows of the longest sequence
    std::int64_t chunk;    // query rows of one item

    std::int64_t chunks() const { return (rows + chunk - 1) / chunk; }
    std::int64_t size() const { return columns * chunks(); }

    // The last chunks come first: under a causal mask they see the most keys, and the longest item must not start last.
    WorkItem operator[](std::int64_t index) const {
        const std::int64_t column = index % columns;
        const std::int64_t first_row = (chunks() - 1 - index / columns) * chunk;
        return {column / heads_k, column % heads_k, first_row, std::min(chunk, rows - first_row)};
    }
};

// Large chunks share packed K/V tiles among more rows, small ones keep all threads busy.
template <class Row>
inline WorkList work_list(const catalog_args& args, int threads) {
    constexpr int items_per_thread = 4;
    WorkList list{args.nhead_k, args.batch * args.nhead_k, args.seqlen_q * heads_per_kv_head(args),
                  Scratch<Row>::item_rows};
    while (list.chunk > Row::tile_m0 && list.size() < items_per_thread * threads) list.chunk -= Row::tile_m0;
    return list;
}

// A sequence shorter than the longest has fewer rows than the work list assumes.
template <class Row>
inline WorkItem clip(WorkItem item, const catalog_args& args) {
    const std::int64_t rows = sequence_of<Row::group>(args, item.batch).seqlen_q * heads_per_kv_head(args);
    item.rows = std::min(item.rows, rows - item.first_row);
    return item;
}

}  // namespace catalog::host
