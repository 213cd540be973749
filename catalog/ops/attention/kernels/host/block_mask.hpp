// Block masks: a bitmap with an entry for each block of queries and keys of a head, 0 where nobody attends to the block.
//
// Tiles of keys end where blocks do, and rows of a tile are attended in runs that see the same block. So blocks that are
// left out cost nothing, and their keys and values are never read. AMX works on 16 rows at a time, and a step of the
// softmax takes up to 32 keys: blocks are multiples of these.
#pragma once

#include "call.hpp"

namespace catalog::host {

inline constexpr int mask_step_q = 16, mask_step_kv = 32;

using QueryRange = KeyRange;

template <class Row>
inline bool valid_block_mask(const catalog_args& args) {
    if constexpr (!Row::block_mask) return true;
    const auto fits = [](std::int64_t size, int step) { return size > 0 && size % step == 0; };
    return fits(args.block_mask_q, mask_step_q) && fits(args.block_mask_kv, mask_step_kv);
}

// Query heads whose rows share tiles of keys: those of a K/V head, or one where each has a bitmap of its own.
template <class Row>
inline std::int64_t heads_of_item(const catalog_args& args) {
    return Row::block_mask ? 1 : heads_per_kv_head(args);
}

// The bitmap of a query head, or of none: then every block is attended to, and tiles only end at multiples of tile_n0.
template <class Row>
class BlockMask {
   public:
    BlockMask(const catalog_args& args, const Sequence& seq, std::int64_t head)
        : bits(rows_of<const std::uint8_t>(args.block_mask, seq.batch, head, 0)),
          queries(args.block_mask_q),
          keys(args.block_mask_kv) {}

    // The first key of the tile that holds `key`. It depends on nothing but the key, so that sums are the same for every
    // division of rows.
    std::int64_t tile_begin(std::int64_t key) const {
        if constexpr (Row::block_mask) return key - key % keys % Row::tile_n0;
        return key / Row::tile_n0 * Row::tile_n0;
    }

    // The tile that begins with `key`, without keys from `end` on.
    KeyRange tile_at(std::int64_t key, std::int64_t end) const {
        if constexpr (Row::block_mask) end = std::min(end, key - key % keys + keys);
        return {key, std::min(key + Row::tile_n0, end)};
    }

    // The first tile from `key` on that some of the queries from `first` to `last` attend to; empty if there is none.
    KeyRange next_tile(std::int64_t key, std::int64_t end, std::int64_t first, std::int64_t last) const {
        KeyRange tile = tile_at(key, end);
        if constexpr (Row::block_mask)
            while (!tile.empty() && run_from(first, last + 1, tile.begin).empty()) tile = tile_at(tile.end, end);
        return tile;
    }

    // The first run of queries from `query` on, and before `end`, that attend to the block of `key`.
    QueryRange run_from(std::int64_t query, std::int64_t end, std::int64_t key) const {
        if constexpr (!Row::block_mask) return {query, end};
        const std::int64_t block = key / keys;
        while (query < end && !bits[query / queries][block]) query = block_end(query, end);
        std::int64_t behind = query;
        while (behind < end && bits[behind / queries][block]) behind = block_end(behind, end);
        return {query, behind};
    }

   private:
    std::int64_t block_end(std::int64_t query, std::int64_t end) const {
        return std::min(query - query % queries + queries, end);
    }

    const Rows<const std::uint8_t> bits;
    const std::int64_t queries, keys;
};

}  // namespace catalog::host
