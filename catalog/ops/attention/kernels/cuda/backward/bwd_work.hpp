// The main stage of backward: which block of the grid works on what, and the order in which blocks add to dQ.
//
// Heads of a section share the L2 cache. Their blocks follow each other with the heads fastest: those with most queries
// first, so that the grid ends evenly. Where the order of additions is fixed, those of the last keys come first: under
// a causal mask each block then starts at tiles that are its own, and reaches the others' after they have left them. But
// so blocks end one after the other, the longest last. In every other section the first keys come first, and blocks start
// at the last tile: each is one tile behind the one before, and all end together. DASH (arXiv 2601.21824) pairs blocks
// like this. It gains 1 to 2 %.
#pragma once

#include "operation/workspace.hpp"
#include "cuda/divisor.hpp"
#include "bwd_slices.hpp"

namespace catalog::cuda {

struct BackwardMaps {
    CUtensorMap q, k, v, grad_o, dk, dv, dq_acc;
};

// Heads of keys, of all sequences, and how many of them blocks work on side by side. An item is a tile of keys of a head;
// a block starts with the one that has its number.
struct Sections {
    int heads, section, tiles;
    int count, items_of_section, items;  // of sections; with those of heads that the last section lacks
    int group;                           // heads of queries for each of keys
    // Items are divided by the heads of a section, tiles by those of a head, and heads by those of a sequence.
    Divisor of_section, of_head, of_sequence;
    int blocks = 0;
    std::int32_t* next = nullptr;  // counts the items that were taken after these; null where there are none

    // How many items have cleared their share of each section's dQ, see bwd_clear_ahead.hpp: null where they clear nothing.
    // `share`: rows of each head; `ahead`: sections between an item's own and the one whose dQ it clears.
    std::int32_t* cleared = nullptr;
    int share = 0, ahead = 0;
};

inline constexpr std::int64_t most_items = 0x7fff0000;  // every block asks once more after the last one

// Bytes of Q, dO and dQ of a section, which stay in the L2 cache while the blocks of their heads are worked on: fewer where
// dQ of other sections is cleared meanwhile. With more heads, fewer blocks wait for each other.
template <class Row>
inline constexpr std::int64_t section_bytes =
    (!BackwardTile<Row>::clears_ahead ? 32 : BackwardTile<Row>::uneven || Row::deterministic ? 16 : 8) << 20;

// The least number of items between one that clears sums and one that adds to them.
template <class Row>
inline constexpr std::int64_t items_ahead = BackwardTile<Row>::uneven ? 512 : 256;

template <class Row>
inline Sections sections_of(const catalog_args& args) {
    constexpr std::int64_t element_bytes = sizeof(typename Row::dtype);
    const std::int64_t heads = args.batch * args.nhead_k;
    const std::int64_t row_bytes = args.hdim_q * (element_bytes + 4) + args.hdim_v * element_bytes;
    const std::int64_t head_bytes = args.nhead_q / args.nhead_k * args.seqlen_q * row_bytes;
    const std::int64_t fitting = section_bytes<Row> / std::max<std::int64_t>(1, head_bytes);
    const std::int64_t section = std::clamp<std::int64_t>(fitting, 1, heads);
    const std::int64_t tiles = divide_up(args.seqlen_k, BackwardTile<Row>::n);
    const std::int64_t count = divide_up(heads, section), items = count * section * tiles;
    Sections found{static_cast<int>(heads),
                   static_cast<int>(section),
                   static_cast<int>(tiles),
                   static_cast<int>(count),
                   static_cast<int>(section * tiles),
                   static_cast<int>(items),
                   static_cast<int>(args.nhead_q / args.nhead_k),
                   Divisor(section),
                   Divisor(std::max<std::int64_t>(1, tiles)),
                   Divisor(args.nhead_k)};
    if (items * BackwardTile<Row>::slices > most_items) found.items = -1;
    found.ahead = static_cast<int>(divide_up(items_ahead<Row>, std::max<std::int64_t>(1, section * tiles)));
    return found;
}

// Counters behind dQ, of each tile of queries of each head: how many blocks have added to it. Every sequence has places
// of its own, however long it is.
inline __host__ __device__ std::int64_t counters_of_head(std::int64_t tokens_q, std::int64_t batch, int tile_rows) {
    return static_cast<std::uint64_t>(tokens_q) / static_cast<unsigned>(tile_rows) + batch;
}

__device__ __forceinline__ void store_wide_number(std::uint32_t at, std::int64_t number) {
    asm volatile("st.shared.s64 [%0], %1;" ::"r"(at), "l"(number) : "memory");
}

__device__ __forceinline__ std::int64_t load_wide_number(std::uint32_t at) {
    std::int64_t number;
    asm volatile("ld.shared.s64 %0, [%1];" : "=l"(number) : "r"(at) : "memory");
    return number;
}

// Tiles of an entry of the block mask.
template <class Row>
__device__ __forceinline__ int tiles_of_entry(const catalog_args& args) {
    return computed_here(static_cast<int>(args.block_mask_q)) / Row::tile_m0;
}

// The head of keys of an item, its section, and its first key.
template <class Row>
struct Item {
    int head, section, first_key;

    __device__ __forceinline__ Item(const Sections& sections, int item) {
        const int row = sections.of_section.quotient(item);
        section = sections.of_head.quotient(row);
        const int block = row - section * sections.tiles;
        head = section * sections.section + item - row * sections.section;
        first_key = (Row::deterministic && !is_ascending() ? sections.tiles - 1 - block : block) * BackwardTile<Row>::n;
    }

    // Whether blocks of the section add to dQ in the order of their keys, and from the last tile to the first.
    __device__ __forceinline__ bool is_ascending() const { return BackwardTile<Row>::alternates && section % 2; }

    // Not where the last section lacks the head, or the sequence is shorter.
    __device__ __forceinline__ bool exists(const catalog_args& args, const Sections& sections) const {
        if (head >= sections.heads) return false;
        Sequence sequence;
        find_keys<Row>(args, sections.of_sequence.quotient(head), sequence);
        return first_key < sequence.seqlen_k;
    }
};

// What a block works on, in shared memory: keys from first_key() on, against the tiles [begin(), end()) of queries of
// every head of the group. Who reads it has no registers to keep it.
struct WorkInMemory {
    std::uint32_t at;

    // The last item of a block is followed by one that does not exist.
    __device__ __forceinline__ bool exists() const { return first_key() < seqlen_k(); }

    __device__ __forceinline__ int seqlen_q() const { return number(of_seqlen_q); }
    __device__ __forceinline__ int seqlen_k() const { return number(of_seqlen_k); }
    // key - query - diagonal() lies in [-left(), right()].
    __device__ __forceinline__ int diagonal() const { return number(of_diagonal); }
    __device__ __forceinline__ int left() const { return number(of_left); }
    __device__ __forceinline__ int right() const { return number(of_right); }
    __device__ __forceinline__ int begin() const { return number(of_begin); }
    __device__ __forceinline__ int end() const { return number(of_end); }
    __device__ __forceinline__ int first_k() const { return number(of_first_k); }
    __device__ __forceinline__ int first_q() const { return number(of_first_q); }
    __device__ __forceinline__ int batch() const { return number(of_batch); }
    __device__ __forceinline__ int index() const { return number(of_index); }  // of the sequence
    __device__ __forceinline__ int head_k() const { return number(of_head_k); }
    __device__ __forceinline__ int heads() const { return number(of_heads); }  // of queries
    __device__ __forceinline__ int first_key() const { return number(of_first_key); }

    // Of a row of the block mask: those with the block's first 64 keys and its last. Not there without a mask.
    __device__ __forceinline__ int first_entry() const { return number(of_first_entry); }
    __device__ __forceinline__ int last_entry() const { return number(of_last_entry); }

    // The tile that is visited in a turn, which counts from begin() to end().
    template <class Row>
    __device__ __forceinline__ int tile(int turn) const {
        if constexpr (BackwardTile<Row>::alternates) return abs(number(of_mirror) - turn);
        if constexpr (!BackwardTile<Row>::rotates) return turn;
        const int tile = turn + number(of_first_turn);
        return tile < end() ? tile : tile - end() + begin();
    }

    // Where items clear dQ of other sections, or sections differ.
    __device__ __forceinline__ int section() const { return number(of_section); }

    // How many works of the block come before it, where there may be any.
    __device__ __forceinline__ unsigned count() const { return number(of_count); }
    template <class Row>
    __device__ __forceinline__ void store_count(unsigned count) const { store<Row, of_count>(static_cast<int>(count)); }

    // Where dQ's first row of a head is, in elements, and the counters of its tiles. The group's heads come in turn.
    __device__ __forceinline__ std::int64_t dq_offset() const { return wide_number(dq_at); }
    __device__ __forceinline__ std::int32_t* counters() const {
        return reinterpret_cast<std::int32_t*>(wide_number(counters_at));
    }

    // By the one thread that asks for them.
    template <class Row>
    __device__ __forceinline__ void next_head(const catalog_args& args) const {
        store_wide_number(at + dq_at, dq_offset() + args.dq_acc.stride_nhead);
        if constexpr (Row::deterministic)
            store_wide_number(at + counters_at,
                              wide_number(counters_at) + 4 * counters_of_head(computed_here(args.tokens_q), args.batch,
                                                                              BackwardTile<Row>::m));
    }

    // By one thread, which has few registers: all numbers of an item are stored as soon as they are known.
    template <class Row>
    __device__ __forceinline__ void find(const catalog_args& args, const Sections& sections, int item) const {
        constexpr int m = BackwardTile<Row>::m, n = BackwardTile<Row>::n;
        {
            const Item<Row> of(sections, item);
            store<Row, of_first_key>(of.first_key);
            store<Row, of_seqlen_k>(0);
            if constexpr (BackwardTile<Row>::clears_ahead || BackwardTile<Row>::alternates)
                store<Row, of_section>(of.section);
            if (of.head >= sections.heads) return;
            const int sequence = sections.of_sequence.quotient(of.head);
            store<Row, of_index>(sequence);
            store<Row, of_head_k>(of.head - sequence * static_cast<int>(sections.of_sequence.divisor));
            store<Row, of_heads>(sections.group);
        }
        Sequence sequence;
        find_queries<Row>(args, index(), sequence);
        store<Row, of_seqlen_q>(sequence.seqlen_q);
        store<Row, of_first_q>(static_cast<int>(sequence.first_q));
        store<Row, of_batch>(static_cast<int>(sequence.batch));
        find_keys<Row>(args, index(), sequence);
        store<Row, of_seqlen_k>(sequence.seqlen_k);
        store<Row, of_first_k>(static_cast<int>(sequence.first_k));
        if (!exists()) return;
        find_tiles<Row>(args, sequence.seqlen_q, sequence.seqlen_k);
        store_wide_number(at + dq_at, offset_of(args.dq_acc, batch(), head_k() * heads(), first_q()));
        if constexpr (Row::deterministic) {
            const std::int64_t first = Row::mode == Mode::group ? first_q() : index() * args.seqlen_q;
            const std::int64_t of_head = counters_of_head(args.tokens_q, args.batch, m);
            const std::int64_t counter =
                (slice_of<Row>() * args.nhead_q + head_k() * heads()) * of_head + first / m + index();
            const std::int32_t* const counters =
                static_cast<std::int32_t*>(args.dq_acc.data) + args.nhead_q * args.tokens_q * args.hdim_q + counter;
            store_wide_number(at + counters_at, reinterpret_cast<std::int64_t>(counters));
        }
        if constexpr (Row::block_mask) {
            const int keys = static_cast<int>(args.block_mask_kv);
            store<Row, of_first_entry>(first_key() / keys);
            store<Row, of_last_entry>(min(first_key() + max(n - 64, 0), seqlen_k() - 1) / keys);
        }
    }

    template <class Row>
    __device__ __forceinline__ void store_end() const {
        store<Row, of_seqlen_k>(0);
        store<Row, of_first_key>(0);
    }

   private:
    // Places of numbers of 32 bits, and in bytes those of 64. Under a block mask a block has one work, and no turns.
    enum Place {
        of_seqlen_q, of_seqlen_k, of_diagonal, of_left, of_right, of_begin, of_end, of_first_k, of_first_q, of_batch,
        of_index, of_head_k, of_heads, of_first_key, of_first_entry = 18, of_last_entry, of_count = 18, of_first_turn,
        of_mirror = of_first_turn, of_section
    };
    static constexpr int dq_at = 56, counters_at = 64;

    template <class Row>
    __device__ __forceinline__ void find_tiles(const catalog_args& args, int queries, int keys) const {
        using Tile = BackwardTile<Row>;
        const int longest = queries + keys, first = first_key();
        const bool last = Row::mask == Mask::none || args.mask_corner == CATALOG_BOTTOM_RIGHT;
        const int diagonal = last ? keys - queries : 0;
        const int left = bound(Row::mask == Mask::generic ? args.window_left : -1, longest);
        const std::int64_t window_right = Row::mask == Mask::causal ? 0 : args.window_right;
        const int right = bound(Row::mask == Mask::none ? -1 : window_right, longest);
        store<Row, of_diagonal>(diagonal);
        store<Row, of_left>(left);
        store<Row, of_right>(right);
        const int last_key = min(first + Tile::n, keys) - 1;
        const int end = (max(0, min(queries, last_key + left - diagonal + 1)) + Tile::m - 1) / Tile::m;
        const int begin = min(max(0, first - right - diagonal) / Tile::m, end);
        store<Row, of_begin>(begin);
        store<Row, of_end>(end);
        if constexpr (Tile::rotates) store<Row, of_first_turn>(end > begin ? first / Tile::m % (end - begin) : 0);
        if constexpr (Tile::alternates) store<Row, of_mirror>(section() % 2 ? begin + end - 1 : 0);
    }

    static __device__ __forceinline__ int bound(std::int64_t window, int longest) {
        return window < 0 ? longest : static_cast<int>(min(window, static_cast<std::int64_t>(longest)));
    }

    template <class Row, Place place>
    __device__ __forceinline__ void store(int number) const {
        static_assert(4 * place + 4 <= BackwardTile<Row>::work_bytes, "the next work lies behind");
        asm volatile("st.shared.s32 [%0], %1;" ::"r"(at + 4 * place), "r"(number) : "memory");
    }

    __device__ __forceinline__ int number(Place place) const {
        int number;
        asm volatile("ld.shared.s32 %0, [%1];" : "=r"(number) : "r"(at + 4 * place) : "memory");
        return number;
    }

    __device__ __forceinline__ std::int64_t wide_number(int offset) const { return load_wide_number(at + offset); }
};

// Of a block with one work.
struct NoCount {
    static constexpr unsigned load() { return 0; }
};

// How many works a thread is done with.
struct CountInMemory {
    std::uint32_t at;

    __device__ __forceinline__ unsigned load() const {
        unsigned count;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(count) : "r"(at) : "memory");
        return count;
    }
    __device__ __forceinline__ void store(unsigned count) const {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(count) : "memory");
    }
};

// The work of a block that comes after `count` others. It lies in one of the slots, which have barriers. There are enough
// for threads that take turns to add dQ to be late.
template <class Row>
struct WorkPlace : RingCount<BackwardTile<Row>::work_slots> {
    using Tile = BackwardTile<Row>;

    std::uint32_t base;

    __device__ __forceinline__ explicit WorkPlace(std::uint32_t base, unsigned count = 0)
        : RingCount<Tile::work_slots>{count}, base(base) {}

    __device__ __forceinline__ WorkInMemory work() const {
        return {base + Tile::work_at + this->stage() * Tile::work_bytes};
    }
    __device__ __forceinline__ std::uint32_t full() const { return barriers().full_work(this->stage()); }
    __device__ __forceinline__ std::uint32_t empty() const { return barriers().empty_work(this->stage()); }

    // Whether there is one.
    __device__ __forceinline__ bool wait() const {
        barrier_wait(full(), this->phase());
        return work().exists();
    }

    // By one thread: fills an empty slot with the next item.
    __device__ __forceinline__ void find_next(const catalog_args& args, const Sections& sections) const {
        barrier_wait(empty(), this->phase() ^ 1);
        find(args, sections, take_item(sections));
    }

    // Fills the slot with an item, or one after it that exists; past the last one none does.
    __device__ __forceinline__ void find(const catalog_args& args, const Sections& sections, int item) const {
        for (; item < sections.items; item = take_item(sections)) {
            work().template find<Row>(args, sections, item);
            if (work().exists()) break;
        }
        if (item >= sections.items) work().template store_end<Row>();
        if constexpr (Tile::persistent) {
            work().template store_count<Row>(this->count);
            barrier_arrive(full());
        }
    }

   private:
    __device__ __forceinline__ BackwardBarriers<Row> barriers() const { return {base + Tile::barriers_at}; }

    static __device__ __forceinline__ int take_item(const Sections& sections) {
        if constexpr (!Tile::persistent) return sections.items;
        return sections.next ? sections.blocks + atomicAdd(sections.next, 1) : sections.items;
    }
};

// The works of a block one after the other, by a warp: use(WorkInMemory).
template <class Row, class Use>
__device__ __forceinline__ void for_each_work(std::uint32_t base, const Use& use) {
    if constexpr (!BackwardTile<Row>::persistent) {
        use(WorkPlace<Row>(base).work());
    } else {
        // The count is in the work too: no register keeps it.
        for (unsigned count = 0; WorkPlace<Row>(base, count).wait();) {
            const WorkInMemory work = WorkPlace<Row>(base, count).work();
            use(work);
            count = work.count();
            barrier_arrive(WorkPlace<Row>(base, count).empty());
            ++count;
        }
    }
}

// By one thread of those that load, number `loader`, or a warp under a block mask. They count in shared memory: they have
// few registers.
template <class Row, int loader, class Use>
__device__ __forceinline__ void load_each_work(std::uint32_t base, const Use& use) {
    using Tile = BackwardTile<Row>;
    if constexpr (!Tile::persistent) {
        use(NoCount());
    } else {
        const CountInMemory count{base + Tile::counts_at + 4 * loader};
        for (count.store(0); WorkPlace<Row>(base, count.load()).wait(); count.store(count.load() + 1)) {
            use(count);
            barrier_arrive(WorkPlace<Row>(base, count.load()).empty());
        }
    }
}

}  // namespace catalog::cuda
