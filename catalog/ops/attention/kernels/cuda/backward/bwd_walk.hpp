// The main stage of backward: which tiles of queries a block visits, and when it adds to dQ of each.
//
// Under a block mask these are the tiles whose queries see some of the block's keys. The warps that load find them, each
// by itself; one of them tells those that multiply, and ends with a visit that is none.
#pragma once

#include "bwd_work.hpp"
#include "cuda/common/block_mask.hpp"

namespace catalog::cuda {

// The row of a bitmap that a tile of queries reads. `head` counts from the group's first.
__device__ __forceinline__ const std::uint8_t* bitmap_row(const catalog_args& args, const WorkInMemory& work, int head,
                                                          int row) {
    return static_cast<const std::uint8_t*>(args.block_mask.data) +
           offset_of(args.block_mask, work.batch(), work.head_k() * work.heads() + head, row);
}

// The column of a bitmap that a block reads: its keys are in one entry of a row, or 64 of them each in two. Whatever it
// takes to find it is read again: those who load have no registers to keep it.
template <class Row>
struct BlockColumn {
    const catalog_args& args;
    const WorkInMemory work;
    const int head;

    __device__ __forceinline__ int tiles() const { return tiles_of_entry<Row>(args); }
    __device__ __forceinline__ bool exists(int entry) const { return entry * tiles() < work.end(); }
    __device__ __forceinline__ bool is_named(int entry) const { return halves(entry) != 0; }

    // Whether queries of an entry see the first 64 keys, and the last 64: a bit each.
    __device__ __forceinline__ int halves(int entry) const {
        const std::uint8_t* const row = bitmap_row(args, work, head, entry);
        return (row[work.first_entry()] != 0) | (row[work.last_entry()] != 0) << 1;
    }
};

// The tiles of a head that a block visits, in order, before work.end(). `head` counts from the group's first. Under a
// block mask, by a warp.
template <class Row, bool = Row::block_mask>
class TileWalk {
   public:
    __device__ __forceinline__ TileWalk(const catalog_args&, const WorkInMemory& work, int) : work(work) {}
    __device__ __forceinline__ int first() const { return work.begin(); }
    __device__ __forceinline__ int after(int tile) const { return tile + 1; }

   private:
    const WorkInMemory& work;
};

template <class Row>
class TileWalk<Row, true> {
   public:
    __device__ __forceinline__ TileWalk(const catalog_args& args, const WorkInMemory& work, int head)
        : column{args, work, head}, first_tile(max(work.begin(), enter(work.begin() / column.tiles()))) {}

    __device__ __forceinline__ int first() const { return first_tile; }

    __device__ __forceinline__ int after(int tile) {
        const int next_entry = entries.found() + 1;
        return tile + 1 < next_entry * column.tiles() ? tile + 1 : enter(next_entry);
    }

    // Of the present tile: BlockColumn::halves.
    __device__ __forceinline__ int halves() const { return column.halves(entries.found()); }

   private:
    __device__ __forceinline__ int enter(int entry) { return entries.next(column, entry) * column.tiles(); }

    const BlockColumn<Row> column;
    NamedEntries entries;
    const int first_tile;
};

// Scores under ALiBi and a causal mask are slope * (key - center); they should be slope * key.
template <class Row>
inline constexpr bool shifts_lse = Row::bias == Bias::alibi && Row::mask == Mask::causal;

// The LSE of a row in base 2; infinity where a row sees no key, so that its weights are 0. `center`: its query + diagonal.
template <class Row>
__device__ __forceinline__ float lse_of_weights(float lse, float slope, int center) {
    if constexpr (shifts_lse<Row>) lse -= slope * static_cast<float>(center);
    return lse == -infinity() ? infinity() : lse * log2_e;
}

template <class Row>
__device__ __forceinline__ float delta_of_weights(const catalog_args& args, float delta) {
    return BackwardTile<Row>::scales_ds ? delta * args.scale : delta;
}

// A tile that the block visits, of a head that counts from the group's first; none where tile < 0. In shared memory.
struct Visit {
    int tile, head, halves;

    __device__ __forceinline__ void store(std::uint32_t at) const {
        asm volatile("st.shared.v2.s32 [%0], {%1, %2};" ::"r"(at), "r"(tile), "r"(head << 2 | halves) : "memory");
    }

    static __device__ __forceinline__ Visit load(std::uint32_t at) {
        Visit visit;
        asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(visit.tile), "=r"(visit.head) : "r"(at) : "memory");
        visit.halves = visit.head & 3;
        visit.head >>= 2;
        return visit;
    }
};

// The order in which blocks add to a tile of dQ: the last keys first, or the first ones in every other section. A block
// waits only for blocks that come before it in the grid, which are running or done: so all of them end. Since all visit
// tiles in the same order, a block that has once waited for the one before follows it without waiting again.
//
// A counter says how many blocks have added to its tile. Under a block mask not all blocks do, and it says how many
// there are from the last keys to those of the block that has added.
//
// FlashAttention-3 orders its additions by such counters too.
//
// A block that passes its turn on must release the counter, though it has waited for its additions: TMA reports
// them as written before the L2 cache has made them. With relaxed counters, backward of head dim 256 is a tenth faster, but
// its bits are not always the same.
template <class Row>
struct Turns {
    const catalog_args& args;
    const WorkInMemory work;
    const int head;  // counts from the group's first

    // Whether all blocks before this one have added to a tile of the head. Not under a block mask.
    __device__ __forceinline__ bool has_come(int tile) const {
        return load_acquire(work.counters() + tile) >= before(tile);
    }

    __device__ __forceinline__ void wait(int tile) const {
        if constexpr (Row::block_mask) {
            const int before = up_to(block_before(tile));
            while (load_acquire(work.counters() + tile) < before) {
            }
        } else {
            while (!has_come(tile)) {
            }
        }
    }

    // By the thread that has added, once its additions are written.
    __device__ __forceinline__ void pass(int tile) const {
        fence_proxy_async_global();
        if constexpr (Row::block_mask)
            store_release(work.counters() + tile, up_to(work.first_key() / Row::tile_n0));
        else
            add_release(work.counters() + tile, 1);
    }

   private:
    // The number of blocks before this one that visit a tile.
    __device__ __forceinline__ int before(int tile) const {
        const int block = work.first_key() / Row::tile_n0;
        if (BackwardTile<Row>::alternates && work.section() % 2) return block;
        return last_key_of(tile) / Row::tile_n0 - block;
    }

    // The last key that a tile sees.
    __device__ __forceinline__ int last_key_of(int tile) const {
        const int last = (tile + 1) * Row::tile_m0 - 1 + work.diagonal() + work.right();
        return min(last, work.seqlen_k() - 1);
    }

    // The number of blocks from the last one to this.
    __device__ __forceinline__ int up_to(int block) const { return blocks() - block; }
    __device__ __forceinline__ int blocks() const { return (work.seqlen_k() - 1) / Row::tile_n0 + 1; }

    // The next block of keys that visits a tile too, as its TileWalk does; blocks() if there is none.
    __device__ __forceinline__ int block_before(int tile) const {
        const int keys = static_cast<int>(args.block_mask_kv), last_key = last_key_of(tile);
        const std::uint8_t* const named = bitmap_row(args, work, head, tile / tiles_of_entry<Row>(args));
        int key = work.first_key() + Row::tile_n0;
        for (int entry = key / keys; key < work.seqlen_k(); key = ++entry * keys) {
            const int block = key / Row::tile_n0;
            if (block * Row::tile_n0 > last_key) break;
            if (named[entry]) return block;
        }
        return blocks();
    }
};

}  // namespace catalog::cuda
