// What a block of the forward kernel works on: a tile of queries of one head, and the keys that they see.
#pragma once

#include "fwd_wgmma_call.hpp"
#include "cuda/common/block_mask.hpp"
#include "cuda/common/mask.hpp"
#include "cuda/ring.hpp"

namespace catalog::cuda {

// A tile of queries: of the head and sequence `instance`.
struct TileIndex {
    int block, head, batch;

    __device__ __forceinline__ TileIndex() : block(0), head(-1), batch(0) {}

    // The tile that this block of the grid works on in its turn `round`; none where head < 0. Heads come in sections,
    // whose keys stay in the L2 cache, and within a section the tiles with most keys first. Every second round goes
    // backwards, so that the blocks whose tiles are longer in one round have the shorter ones of the next.
    __device__ __forceinline__ TileIndex(const FwdCall& call, int round, bool last_block_first) : head(-1) {
        const int blocks = call.grid, place = static_cast<int>(blockIdx.x);
        int section, index;
        if (call.section_rounds > 0) {
            section = call.of_rounds.quotient(round);
            const int of_section = round - section * call.section_rounds;
            index = of_section * blocks + ((section + of_section) % 2 ? blocks - 1 - place : place);
        } else {
            index = round * blocks + (round % 2 ? blocks - 1 - place : place);
            section = call.of_section.quotient(index);
            index -= section * static_cast<int>(call.of_section.divisor);
        }
        const int first_head = section * call.section_heads, heads = min(call.section_heads, call.heads - first_head);
        if (index >= heads * call.blocks) return;
        const int row = (heads == call.section_heads ? call.of_row : call.of_last_row).quotient(index);
        const int instance = first_head + index - row * heads;
        block = last_block_first ? call.blocks - 1 - row : row;
        batch = call.of_sequence.quotient(instance);
        head = instance - batch * call.nhead_q;
    }

    __device__ __forceinline__ bool exists() const { return head >= 0; }

    // Keeps the compiler from finding the tile later.
    __device__ __forceinline__ void pin() { asm volatile("" : "+r"(block), "+r"(head), "+r"(batch)); }
};

// The number of queries of a sequence in group mode; none where it is skipped.
template <class Row>
__device__ __forceinline__ int packed_queries(const FwdCall& call, int batch) {
    const int stored = min(call.seqstart_q[batch + 1] - call.seqstart_q[batch], call.seqlen_q);
    const int queries = max(call.seqlens_q ? min(stored, call.seqlens_q[batch]) : stored, 0);
    return !Row::skip_min_seqlen_q || queries > call.min_seqlen_q ? queries : 0;
}

// The tile of this block of the grid among those that have queries, sequence after sequence; under a mask the tiles of a
// sequence with most keys first. By one warp.
template <class Row>
__device__ __forceinline__ TileIndex find_packed_tile(const FwdCall& call) {
    const int lane = static_cast<int>(threadIdx.x) % 32, place = static_cast<int>(blockIdx.x);
    const int sequences = call.of_sequence.quotient(call.heads);
    TileIndex tile;
    for (int first = 0, before = 0; first < sequences; first += 32) {
        const int queries = first + lane < sequences ? packed_queries<Row>(call, first + lane) : 0;
        const int blocks = (queries + Row::tile_m0 - 1) / Row::tile_m0;
        int end = blocks;  // of one head, up to the end of the lane's sequence
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_up_sync(all_lanes, end, distance);
            if (lane >= distance) end += other;
        }
        end += before;
        const std::uint32_t behind = __ballot_sync(all_lanes, place < end * call.nhead_q);
        if (behind) {
            const int found = __ffs(behind) - 1, count = __shfl_sync(all_lanes, blocks, found);
            const int of_sequence = place - __shfl_sync(all_lanes, end - blocks, found) * call.nhead_q;
            const int row = call.of_sequence.quotient(of_sequence), column = of_sequence / count;
            tile.batch = first + found;
            tile.head = Row::mask != Mask::none ? of_sequence - row * call.nhead_q : column;
            tile.block = Row::mask != Mask::none ? count - 1 - row : of_sequence - column * count;
            break;
        }
        before = __shfl_sync(all_lanes, end, 31);
    }
    return tile;
}

template <class Row>
struct Work {
    static constexpr bool group = Row::mode == Mode::group;
    static constexpr bool masked = Row::mask != Mask::none;
    static constexpr bool has_gaps = Row::sink || Row::block_mask;

    int head, batch, first_query;  // the tile's first, of its sequence
    int seqlen_q, seqlen_k;
    std::int64_t first_q, first_k;  // tokens in front of the sequence
    int diagonal;                   // query i and key i + diagonal are aligned
    int window_left, window_right;  // at least as large as any distance where they are unbounded
    int first_block, end_block;     // of keys
    int sinks;                      // first keys that queries see although left of the window; 0 unless Row::sink
    KeyRange gap;                   // blocks between sinks and window, which nobody sees; for Row::sink
    const FwdCall& call;
    mutable NamedEntries entries;  // of the block mask; the one found has the block that is visited

    __device__ __forceinline__ Work(const FwdCall& call, const TileIndex& index) : call(call) {
        head = index.head;
        batch = index.batch;
        first_query = index.block * Row::tile_m0;
        first_q = first_k = 0;
        seqlen_q = call.seqlen_q;
        seqlen_k = call.seqlen_k;
        if constexpr (group) {
            first_q = call.seqstart_q[batch];
            seqlen_q = packed_queries<Row>(call, batch);
            if constexpr (!Row::paged_kv) {
                first_k = call.seqstart_k[batch];
                seqlen_k = static_cast<int>(call.seqstart_k[batch + 1] - first_k);
            }
        } else if (call.seqlens_q) {
            seqlen_q = min(seqlen_q, call.seqlens_q[batch]);
        }
        if constexpr (Row::paged_kv)
            seqlen_k = paged_length<Row>(call.pages, batch);
        else if (call.seqlens_k)
            seqlen_k = min(seqlen_k, call.seqlens_k[batch]);
        seqlen_q = max(seqlen_q, 0);
        seqlen_k = max(seqlen_k, 0);

        diagonal = !masked || call.bottom_right ? seqlen_k - seqlen_q : 0;
        constexpr int unbounded = 1 << 30;
        window_left = Row::mask == Mask::generic && call.window_left >= 0 ? call.window_left : unbounded;
        window_right = Row::mask == Mask::causal                                 ? 0
                       : Row::mask == Mask::generic && call.window_right >= 0 ? call.window_right
                                                                                : unbounded;

        sinks = Row::sink ? min(call.sinks, seqlen_k) : 0;
        const KeyRange blocks = blocks_of(first_query, Row::tile_m0);
        first_block = blocks.begin;
        end_block = blocks.end;
        if constexpr (Row::sink) {
            gap = {(sinks + Row::tile_n0 - 1) / Row::tile_n0, visible(first_query).begin / Row::tile_n0};
            if (end_block <= gap.end) end_block = min(end_block, gap.begin);  // the windows are empty
        }
        if constexpr (Row::block_mask) {
            const int entry_blocks = call.block_mask_kv;
            const int first = entries.next(*this, first_block / entry_blocks);
            if (exists(first)) {
                first_block = max(first_block, first * entry_blocks);
                const int last = entries.last(*this, (end_block - 1) / entry_blocks, first);
                end_block = min(end_block, (last + 1) * entry_blocks);
            } else {
                end_block = first_block;
            }
        }
    }

    // In blocks of tile_n0 keys: those that some of `count` queries from `query` on see; those behind the sequence's
    // end see none. From the first block on where there are sinks.
    __device__ __forceinline__ KeyRange blocks_of(int query, int count) const {
        const int last_query = min(query + count, seqlen_q) - 1;
        const int first_key = Row::sink && sinks > 0 ? 0 : visible(query).begin;
        const KeyRange keys{first_key, visible(last_query).end};
        const int begin = keys.begin / Row::tile_n0;
        const bool any = query <= last_query && keys.begin < keys.end;
        return {begin, any ? (keys.end + Row::tile_n0 - 1) / Row::tile_n0 : begin};
    }

    // Blocks are visited from the last to the first: from one that ends a gap to the gap's other side.
    __device__ __forceinline__ void cross_gap(int& block) const {
        if constexpr (Row::sink)
            if (block == gap.end) block = min(gap.begin, gap.end);
        if constexpr (Row::block_mask)
            if (block == entries.found() * call.block_mask_kv && block > first_block)
                block = (entries.last(*this, entries.found() - 1, 0) + 1) * call.block_mask_kv;
    }

    // How many blocks are visited, of rows without a bitmap.
    __device__ __forceinline__ int visited_blocks() const {
        static_assert(!Row::block_mask);
        const int all = end_block - first_block;
        if constexpr (!Row::sink) return all;
        return end_block > gap.end ? all - max(gap.end - max(gap.begin, first_block), 0) : all;
    }

    // Entries of the block mask, up to the last block. There are no registers to keep where they are.
    __device__ __forceinline__ bool exists(int entry) const { return entry * call.block_mask_kv < end_block; }
    __device__ __forceinline__ bool is_named(int entry) const {
        const ByteStrides& strides = call.block_mask_strides;
        const std::int64_t row = first_query / Row::tile_m0 / call.block_mask_q;
        return call.block_mask[batch * strides.batch + head * strides.nhead + row * strides.seqlen + entry] != 0;
    }

    __device__ __forceinline__ bool has_queries() const { return first_query < seqlen_q; }
    __device__ __forceinline__ bool has_keys() const { return first_block < end_block; }

    // Keys that a query sees, without sinks. Lengths are at most 2^29: nothing overflows.
    __device__ __forceinline__ KeyRange visible(int query) const {
        if constexpr (!masked) return {0, seqlen_k};
        const int center = query + diagonal;
        const int begin = Row::mask == Mask::generic ? max(center - window_left, 0) : 0;
        return {begin, min(center + window_right + 1, seqlen_k)};
    }
};

}  // namespace catalog::cuda
