// Division of a launch among threads.
#pragma once

#include <atomic>

#include "block_mask.hpp"
#include "call.hpp"
#include "launch.hpp"
#include "host/pieces.hpp"
#include "scratch.hpp"

namespace catalog::host {

// Query rows count the heads of a group fastest: row r is query r / heads of the group's head r % heads. So the rows of
// a tile see nearly the same keys, and the heads of one decode step fill one tile.
struct WorkItem {
    std::int64_t split, sequence, group, first_row;
};

// Work items of a launch: chunks of query rows, for every split and group of heads of every sequence.
class WorkList {
   public:
    std::int64_t size() const { return pieces.size(); }

    // The last chunks of a sequence come first: under a causal mask they see the most keys, and the longest item must
    // not start last.
    WorkItem operator[](std::int64_t index) const {
        const Piece piece = pieces[index];
        const std::int64_t first_row = (piece.chunks - 1 - piece.chunk) * chunk;
        return {piece.column / groups, piece.sequence, piece.column % groups, first_row};
    }

    // Large chunks share packed K/V tiles among more rows, small ones keep all threads busy. False: out of memory.
    template <class Row>
    bool fill(const catalog_args& args, int threads) {
        constexpr int items_per_thread = 4;
        groups = Row::block_mask ? args.nhead_q : args.nhead_k;
        const auto divide = [&] {
            return pieces.divide(args.batch, groups * args.num_splits, chunk, [&](std::int64_t sequence) {
                return sequence_of<Row>(args, sequence).seqlen_q * heads_of_item<Row>(args);
            });
        };
        chunk = Scratch<Row>::item_rows;
        if (!divide()) return false;
        while (chunk > Row::tile_m0 && size() < items_per_thread * threads) {
            chunk -= Row::tile_m0;
            divide();
        }
        return true;
    }

    std::int64_t chunk;  // query rows per item

   private:
    Pieces pieces;
    std::int64_t groups;  // of heads
};

// Calls body(index, scratch) for every index below `items`, on all threads, each with its own scratch.
template <class Memory, class Body>
inline catalog_status for_items(const catalog_args& args, int threads, std::int64_t items, Body body) {
    std::atomic<bool> out_of_memory = false;
    parallel_for(args, threads, items, [&](std::int64_t index) {
        if (Memory* const scratch = thread_scratch<Memory>())
            body(index, *scratch);
        else
            out_of_memory = true;
    });
    return out_of_memory ? CATALOG_NO_MEMORY : CATALOG_OK;
}

}  // namespace catalog::host
