// How a launch is divided among threads.
#pragma once

#include <atomic>

#include "call.hpp"
#include "launch.hpp"
#include "scratch.hpp"

namespace catalog::host {

// Query rows count the heads of a group fastest: row r is query r / heads of the group's head r % heads. So the rows of
// a tile see nearly the same keys, and the heads of one decode step fill one tile.
struct WorkItem {
    std::int64_t split, sequence, head_k, first_row, rows;
};

// Work items of a launch: chunks of query rows, for every split and K/V head of every sequence.
struct WorkList {
    std::int64_t sequences, heads_k;
    std::int64_t columns;  // K/V heads of all sequences, once a split
    std::int64_t rows;     // query rows of the longest sequence
    std::int64_t chunk;    // query rows of one item

    std::int64_t chunks() const { return (rows + chunk - 1) / chunk; }
    std::int64_t size() const { return columns * chunks(); }

    // The last chunks come first: under a causal mask they see the most keys, and the longest item must not start last.
    WorkItem operator[](std::int64_t index) const {
        const std::int64_t column = index % columns, sequence = column / heads_k;
        const std::int64_t first_row = (chunks() - 1 - index / columns) * chunk;
        return {sequence / sequences, sequence % sequences, column % heads_k, first_row,
                std::min(chunk, rows - first_row)};
    }
};

// Large chunks share packed K/V tiles among more rows, small ones keep all threads busy.
template <class Row>
inline WorkList work_list(const catalog_args& args, int threads) {
    constexpr int items_per_thread = 4;
    WorkList list{args.batch, args.nhead_k, args.num_splits * args.batch * args.nhead_k,
                  args.seqlen_q * heads_per_kv_head(args), Scratch<Row>::item_rows};
    while (list.chunk > Row::tile_m0 && list.size() < items_per_thread * threads) list.chunk -= Row::tile_m0;
    return list;
}

// Calls body(index, scratch) for every index below `items`, on all threads; each has a scratch of its own.
template <class Memory, class Body>
inline catalog_status for_items(int threads, std::int64_t items, Body body) {
    std::atomic<bool> out_of_memory = false;
#pragma omp parallel num_threads(threads) if (items > 1)
    {
        Memory* scratch = thread_scratch<Memory>();
        if (!scratch) out_of_memory = true;
#pragma omp for schedule(dynamic)
        for (std::int64_t index = 0; index < items; ++index)
            if (scratch) body(index, *scratch);
    }
    return out_of_memory ? CATALOG_NO_MEMORY : CATALOG_OK;
}

}  // namespace catalog::host
