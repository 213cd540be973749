// Who does what when blocks take equal shares of all keys of all sequences (the idea of Stream-K).
//
// The tiles of keys of all work items are numbered one behind the other: items of one sequence by their tile of rows,
// then by K/V head. Block b has a range of these numbers, so it may begin and end in the middle of an item.
#pragma once

#include "mma_rows.hpp"

namespace catalog::cuda {

// What the host computes for a launch.
template <class Row>
struct StreamGrid {
    MmaGrid<Row> mma;
    Divisor blocks;
    bool uniform;          // all sequences have as many tiles as the first
    std::uint64_t launch;  // see StreamParts
};

// Keys of a tile of rows that are attended to: tiles from `begin` on, a multiple of tile_n0, to `end`.
template <class Row>
__device__ __forceinline__ int tiles_of(KeyRange seen) {
    const int begin = seen.begin / Row::tile_n0 * Row::tile_n0;
    return max(1, (seen.end - begin + Row::tile_n0 - 1) / Row::tile_n0);
}

// Neighbours among the blocks of the grid.
struct StreamBlocks {
    int first, count;
};

// The items of a block, in order.
template <class Row>
class StreamItems {
    static constexpr int tile_n0 = Row::tile_n0;

   public:
    Sequence seq;
    int head_k, row_tile;
    int tiles;        // of the item; one where no key is seen
    int tile, count;  // those of this block: the first, and how many
    KeyRange seen;    // by some row of the item

    __device__ __forceinline__ StreamItems(const catalog_args& args, const StreamGrid<Row>& grid)
        : args(&args), grid(&grid) {
        total = count_tiles();
        share = grid.blocks.quotient(total);
        position = first_of(static_cast<int>(blockIdx.x));
        left = first_of(static_cast<int>(blockIdx.x) + 1) - position;
        if (left > 0) find(position);
    }

    // Whether other blocks have part in the item.
    __device__ __forceinline__ bool shared() const { return count < tiles; }

    // The number of the first tile, which tells items apart.
    __device__ __forceinline__ int first_tile() const { return position; }

    // Whether there is an item.
    __device__ __forceinline__ bool exist() const { return left > 0; }

    __device__ __forceinline__ void advance() {
        left -= count;
        position += count;
        tile = 0;
        if (left == 0) return;
        if (++head_k == static_cast<int>(args->nhead_k)) {
            head_k = 0;
            do next_row_tile();
            while (tiles == 0 && left > 0);
        }
        count = min(tiles, left);
    }

    __device__ __forceinline__ MmaWork<Row, false> work() const { return {grid->mma, seq, head_k, row_tile}; }

    // The first key of the block's tiles.
    __device__ __forceinline__ int first_key() const { return seen.begin / tile_n0 * tile_n0 + tile * tile_n0; }

    // The blocks that have part in the item.
    __device__ __forceinline__ StreamBlocks blocks() const {
        const int first = block_of(position - tile);
        return {first, block_of(position - tile + tiles - 1) - first + 1};
    }

   private:
    // The block that has a tile, by its number.
    __device__ __forceinline__ int block_of(int number) const {
        const int larger = total - share * static_cast<int>(gridDim.x), of_larger = larger * (share + 1);
        return number < of_larger ? small_quotient(number, share + 1) : larger + small_quotient(number - of_larger, share);
    }

    __device__ __forceinline__ int first_of(int block) const {
        return block * share + min(block, total - share * static_cast<int>(gridDim.x));
    }

    // Of the sequence; `tiles` is 0 where it has no such rows.
    __device__ __forceinline__ void enter(int of_rows) {
        row_tile = of_rows;
        tiles = 0;
        const MmaWork<Row, false> rows(grid->mma, seq, 0, row_tile);
        if (rows.rows == 0) return;
        const Window<Row::mask> window = window_of<Row::mask>(*args, seq.seqlen_q, seq.seqlen_k, {0, seq.seqlen_k});
        seen = seen_by_some(window.visible(rows.row_at(0).query), window.visible(rows.row_at(rows.rows - 1).query));
        tiles = tiles_of<Row>(seen);
    }

    __device__ __forceinline__ void next_row_tile() {
        if (row_tile + 1 < grid->mma.tiles) return enter(row_tile + 1);
        if (seq.index + 1 < args->batch)
            seq = sequence_of<Row>(*args, seq.index + 1);
        else
            left = 0;  // lengths have changed
        enter(0);
    }

    // Of one head of the sequence.
    __device__ __forceinline__ int count_tiles_of_sequence() {
        int sum = 0;
        for (int of_rows = 0; of_rows < grid->mma.tiles; ++of_rows) {
            enter(of_rows);
            sum += tiles;
        }
        return sum * static_cast<int>(args->nhead_k);
    }

    // Of one of 32 neighbouring sequences, each lane's own.
    __device__ __forceinline__ int count_tiles_of_lane(int first) {
        const int index = first + static_cast<int>(threadIdx.x) % 32;
        if (index >= args->batch) return 0;
        seq = sequence_of<Row>(*args, index);
        return count_tiles_of_sequence();
    }

    __device__ __forceinline__ int count_tiles() {
        if (grid->uniform) {
            seq = sequence_of<Row>(*args, 0);
            of_sequence = count_tiles_of_sequence();
            return of_sequence * static_cast<int>(args->batch);
        }
        int sum = 0;
        for (int first = 0; first < args->batch; first += 32) sum += count_tiles_of_lane(first);
        return __reduce_add_sync(0xffffffff, sum);
    }

    // The item that has the tile of that number.
    __device__ __forceinline__ void find(int number) {
        int index = 0;
        if (grid->uniform) {
            index = small_quotient(number, of_sequence);
            number -= index * of_sequence;
        } else {
            for (;; index += 32) {
                if (index >= args->batch) {  // lengths have changed while they were read
                    left = 0;
                    return;
                }
                const int lane = static_cast<int>(threadIdx.x) % 32, own = count_tiles_of_lane(index);
                int until = own;  // the end of the lane's sequence
#pragma unroll
                for (int step = 1; step < 32; step *= 2) {
                    const int before = __shfl_up_sync(0xffffffff, until, step);
                    if (lane >= step) until += before;
                }
                const std::uint32_t later = __ballot_sync(0xffffffff, until > number);
                if (later) {
                    const int place = __ffs(later) - 1;
                    index += place;
                    number -= __shfl_sync(0xffffffff, until - own, place);
                    break;
                }
                number -= __shfl_sync(0xffffffff, until, 31);
            }
        }
        seq = sequence_of<Row>(*args, index);
        const int heads = static_cast<int>(args->nhead_k);
        for (enter(0); number >= tiles * heads && row_tile + 1 < grid->mma.tiles; enter(row_tile + 1))
            number -= tiles * heads;
        tiles = max(tiles, 1);
        head_k = small_quotient(number, tiles);
        tile = number - head_k * tiles;
        count = min(tiles - tile, left);
    }

    const catalog_args* args;
    const StreamGrid<Row>* grid;
    int of_sequence = 0;  // tiles of each sequence where they are uniform
    int total, share;     // tiles of all items, and of each block; the first blocks may have one more
    int position, left;   // tiles before those of the item and this block, and the block's from there on
};

}  // namespace catalog::cuda
