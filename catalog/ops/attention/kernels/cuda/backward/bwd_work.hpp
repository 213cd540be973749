// The main stage of backward: which block of the grid works on what, and the order in which blocks add to dQ.
//
// Heads of a section share the L2 cache. Their blocks follow each other with the heads fastest: those with most queries
// first, so that the grid ends evenly. Where the order of additions is fixed, those of the last keys come first: under
// a causal mask each block then starts at tiles that are its own, and reaches the others' after they have left them.
#pragma once

#include "operation/workspace.hpp"
#include "bwd_slices.hpp"

namespace catalog::cuda {

struct BackwardMaps {
    CUtensorMap q, k, v, grad_o, dk, dv, dq_acc;
};

// Heads of keys, of all sequences, that blocks work on side by side; the grid is (section * tiles of keys, sections).
struct Sections {
    int heads, section;
};

// Bytes of Q, dO and dQ of a section, which stay in the L2 cache while the blocks of their heads are worked on.
inline constexpr std::int64_t section_bytes = 32 << 20;

template <class Row>
inline Sections sections_of(const catalog_args& args) {
    constexpr std::int64_t element_bytes = sizeof(typename Row::dtype);
    const std::int64_t heads = args.batch * args.nhead_k;
    const std::int64_t row_bytes = args.hdim_q * (element_bytes + 4) + args.hdim_v * element_bytes;
    const std::int64_t head_bytes = args.nhead_q / args.nhead_k * args.seqlen_q * row_bytes;
    const std::int64_t fitting = section_bytes / std::max<std::int64_t>(1, head_bytes);
    const std::int64_t least = divide_up(heads, largest_grid);
    return {static_cast<int>(heads), static_cast<int>(std::clamp(fitting, least, heads))};
}

// Counters behind dQ, of each tile of queries of each head: how many blocks have added to it. Every sequence has places
// of its own, however long it is.
inline __host__ __device__ std::int64_t counters_of_head(const catalog_args& args, int tile_rows) {
    return static_cast<std::uint64_t>(args.tokens_q) / static_cast<unsigned>(tile_rows) + args.batch;
}

__device__ __forceinline__ void store_wide_number(std::uint32_t at, std::int64_t number) {
    asm volatile("st.shared.s64 [%0], %1;" ::"r"(at), "l"(number) : "memory");
}

// Tiles of an entry of the block mask.
template <class Row>
__device__ __forceinline__ int tiles_of_entry(const catalog_args& args) {
    return static_cast<int>(args.block_mask_q) / Row::tile_m0;
}

// What a block works on: keys from first_key on, against the tiles [begin, end) of queries of every head of the group.
template <class Row>
struct BackwardWork {
    using Tile = BackwardTile<Row>;

    Sequence sequence;
    int index, first_key, head_k, heads;  // index: of the sequence
    int begin, end;
    int diagonal, left, right;  // key - query - diagonal lies in [-left, right]

    // For blocks of the last section that have no head the sequence has no keys.
    __device__ __forceinline__ BackwardWork(const catalog_args& args, const Sections& sections)
        : heads(heads_per_key_head(args)) {
        const int place = blockIdx.x / Tile::slices, places = gridDim.x / Tile::slices;
        const int head = blockIdx.y * sections.section + place % sections.section;
        index = head / static_cast<int>(args.nhead_k);
        head_k = head % static_cast<int>(args.nhead_k);
        const int block = place / sections.section;
        first_key = (Row::deterministic ? places / sections.section - 1 - block : block) * Tile::n;
        sequence.seqlen_k = 0;
        if (head >= sections.heads) return;
        find_queries<Row>(args, index, sequence);
        find_keys<Row>(args, index, sequence);
        const int longest = sequence.seqlen_q + sequence.seqlen_k;
        const bool last = Row::mask == Mask::none || args.mask_corner == CATALOG_BOTTOM_RIGHT;
        diagonal = last ? sequence.seqlen_k - sequence.seqlen_q : 0;
        left = bound(Row::mask == Mask::generic ? args.window_left : -1, longest);
        right = bound(Row::mask == Mask::none ? -1 : Row::mask == Mask::causal ? 0 : args.window_right, longest);
        const int last_key = min(first_key + Tile::n, sequence.seqlen_k) - 1;
        begin = max(0, first_key - right - diagonal) / Tile::m;
        end = (max(0, min(sequence.seqlen_q, last_key + left - diagonal + 1)) + Tile::m - 1) / Tile::m;
        begin = min(begin, end);
    }

    // For all who come after: they have no registers to spare.
    __device__ __forceinline__ void store(const catalog_args& args, std::uint32_t to) const {
        const int numbers[14] = {sequence.seqlen_q,
                                sequence.seqlen_k,
                                diagonal,
                                left,
                                right,
                                begin,
                                end,
                                static_cast<int>(sequence.first_k),
                                static_cast<int>(sequence.first_q),
                                static_cast<int>(sequence.batch),
                                index,
                                head_k,
                                heads,
                                first_key};
#pragma unroll
        for (int i = 0; i < 14; ++i)
            asm volatile("st.shared.s32 [%0], %1;" ::"r"(to + 4 * i), "r"(numbers[i]) : "memory");
        const std::int64_t dq = offset_of(args.dq_acc, sequence.batch, head_k * heads, sequence.first_q);
        store_wide_number(to + 56, dq);
        if constexpr (Row::deterministic) {
            const std::int64_t first = Row::mode == Mode::group ? sequence.first_q : index * args.seqlen_q;
            const std::int64_t counters_of_slice = args.nhead_q * counters_of_head(args, Tile::m);
            const std::int64_t counter = slice_of<Row>() * counters_of_slice +
                                         head_k * heads * counters_of_head(args, Tile::m) + first / Tile::m + index;
            const std::int32_t* const counters =
                static_cast<std::int32_t*>(args.dq_acc.data) + args.nhead_q * args.tokens_q * args.hdim_q + counter;
            store_wide_number(to + 64, reinterpret_cast<std::int64_t>(counters));
        }
        if constexpr (Row::block_mask) {
            const int keys = static_cast<int>(args.block_mask_kv);
            const int entries[2] = {first_key / keys, min(first_key + max(Tile::n - 64, 0), sequence.seqlen_k - 1) / keys};
#pragma unroll
            for (int i = 0; i < 2; ++i)
                asm volatile("st.shared.s32 [%0], %1;" ::"r"(to + 72 + 4 * i), "r"(entries[i]) : "memory");
        }
    }

   private:
    static __device__ __forceinline__ int bound(std::int64_t window, int longest) {
        return window < 0 ? longest : static_cast<int>(min(window, static_cast<std::int64_t>(longest)));
    }
};

// BackwardWork in shared memory.
struct WorkInMemory {
    std::uint32_t at;

    __device__ __forceinline__ int seqlen_q() const { return number(0); }
    __device__ __forceinline__ int seqlen_k() const { return number(1); }
    __device__ __forceinline__ int diagonal() const { return number(2); }
    __device__ __forceinline__ int left() const { return number(3); }
    __device__ __forceinline__ int right() const { return number(4); }
    __device__ __forceinline__ int begin() const { return number(5); }
    __device__ __forceinline__ int end() const { return number(6); }
    __device__ __forceinline__ int first_k() const { return number(7); }
    __device__ __forceinline__ int first_q() const { return number(8); }
    __device__ __forceinline__ int batch() const { return number(9); }
    __device__ __forceinline__ int index() const { return number(10); }
    __device__ __forceinline__ int head_k() const { return number(11); }
    __device__ __forceinline__ int heads() const { return number(12); }  // of queries
    __device__ __forceinline__ int first_key() const { return number(13); }

    // Of a row of the block mask: those with the block's first 64 keys and its last. Not there without a mask.
    __device__ __forceinline__ int first_entry() const { return number(18); }
    __device__ __forceinline__ int last_entry() const { return number(19); }

    // Where dQ's first row of a head is, in elements, and the counters of its tiles. The group's heads come in turn.
    __device__ __forceinline__ std::int64_t dq_offset() const { return wide_number(56); }
    __device__ __forceinline__ std::int32_t* counters() const {
        return reinterpret_cast<std::int32_t*>(wide_number(64));
    }

    // By the one thread that asks for them.
    __device__ __forceinline__ void next_head(std::int64_t dq_elements, std::int64_t counters_of_head) const {
        store_wide_number(at + 56, dq_offset() + dq_elements);
        store_wide_number(at + 64, wide_number(64) + counters_of_head * 4);
    }

   private:
    __device__ __forceinline__ int number(int index) const {
        int number;
        asm volatile("ld.shared.s32 %0, [%1];" : "=r"(number) : "r"(at + 4 * index) : "memory");
        return number;
    }

    __device__ __forceinline__ std::int64_t wide_number(int offset) const {
        std::int64_t number;
        asm volatile("ld.shared.s64 %0, [%1];" : "=l"(number) : "r"(at + offset) : "memory");
        return number;
    }
};

}  // namespace catalog::cuda
