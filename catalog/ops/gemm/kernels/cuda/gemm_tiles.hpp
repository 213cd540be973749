// Which tiles of C a block computes, one after the other: those of products of the same size, or those of groups.
#pragma once

#include "cuda/tensor_map.hpp"
#include "gemm_call.hpp"

namespace catalog::cuda {

// A tile by the coordinates of its first element, and which rows of C and which part of the depth are its product's.
struct GemmTile {
    int batch, m, n;
    int first_m, end_m;
    int first_k, end_k;
};

// The place of a tile among `across` columns of tiles: bands of `band` rows, each column by column. `bands(index)` and
// `columns(index, height)` divide by the tiles of a band, and by those of one of its columns.
struct TilePlace {
    int row, column;

    template <class Bands, class Columns>
    __device__ __forceinline__ TilePlace(int index, int down, int across, int band, Bands&& bands, Columns&& columns) {
        const int first = bands(index) * band, height = min(band, down - first);
        const int in_band = index - first * across;
        column = columns(in_band, height);
        row = first + in_band - column * height;
    }
};

// TMA begins at multiples of 16 bytes along the axis in which a matrix is contiguous.
inline constexpr int first_multiple = 8;

// The first row of a tile that would begin at `m`, of a product whose rows are those from `first` to `end`.
template <class Row>
__device__ __forceinline__ int shifted_row(const GemmCall& call, int m, int first, int end) {
    constexpr int multiple = GemmShape<Row>::a_along ? 1 : first_multiple;
    return call.shifts ? max(first, min(m, (end - Row::tile_m + multiple - 1) / multiple * multiple)) : m;
}

// The first column of a tile that would begin at `n`. A tile has columns of one block of scales.
template <class Row>
__device__ __forceinline__ int shifted_column(const GemmCall& call, int n) {
    constexpr int multiple = first_multiple;
    if (Row::scales == Scales::block || !call.shifts) return n;
    return max(0, min(n, (call.n - Row::tile_n + multiple - 1) / multiple * multiple));
}

// Those of products of the same size. A block takes a part of their depth; or the blocks of a cluster have tiles one
// below the other, which are counted as one.
template <class Row>
class ProductTiles {
   public:
    __device__ __forceinline__ explicit ProductTiles(const GemmCall& call) : call(call) {
        const int place = static_cast<int>(blockIdx.x), part = place & (call.parts() - 1);
        const int steps = (call.k + Row::tile_k - 1) / Row::tile_k;
        index = place >> call.log_blocks;
        below = Row::cluster_m > 1 ? place % Row::cluster_m : 0;
        first = steps * part >> call.log_parts;  // far from overflowing: there are at most 2^24 steps
        end = steps * (part + 1) >> call.log_parts;
        find();
    }

    __device__ __forceinline__ bool exists() const { return index < call.tiles; }
    __device__ __forceinline__ int first_step() const { return first; }
    __device__ __forceinline__ int end_step() const { return end; }
    __device__ __forceinline__ GemmTile tile() const { return now; }

    __device__ __forceinline__ void next() {
        index += call.clusters;
        find();
    }

   private:
    // Of an index beyond the last tile nothing is used.
    __device__ __forceinline__ void find() {
        const int batch = call.of_product.quotient(index), band = static_cast<int>(call.height.divisor);
        const TilePlace place(
            index - batch * static_cast<int>(call.of_product.divisor), call.tiles_m, call.tiles_n, band,
            [&](int tile) { return call.of_band.quotient(tile); },
            [&](int tile, int height) { return (height == band ? call.height : call.last_height).quotient(tile); });
        const int m = (place.row * Row::cluster_m + below) * Row::tile_m, n = place.column * Row::tile_n;
        now = {batch, shifted_row<Row>(call, m, 0, call.m), shifted_column<Row>(call, n), 0, call.m, 0, call.k};
    }

    const GemmCall& call;
    int index, below, first, end;
    GemmTile now;
};

// Those of all groups. Where groups are starts in the device's memory: the host knows how many tiles there may be.
template <class Row>
class GroupTiles {
   public:
    __device__ __forceinline__ explicit GroupTiles(const GemmCall& call)
        : call(call), index(static_cast<int>(blockIdx.x)) {
        find();
    }

    __device__ __forceinline__ bool exists() const { return group < call.groups; }
    __device__ __forceinline__ int first_step() const { return 0; }
    __device__ __forceinline__ int end_step() const {
        return ((Row::along_depth ? end - start : call.k) + Row::tile_k - 1) / Row::tile_k;
    }

    __device__ __forceinline__ void next() {
        index += call.clusters;
        find();
    }

    __device__ __forceinline__ GemmTile tile() const {
        const TilePlace place(
            index - before, down(), call.tiles_n, static_cast<int>(call.height.divisor),
            [&](int tile) { return call.of_band.quotient(tile); },
            [](int tile, int height) { return tile / height; });
        const int m = place.row * Row::tile_m, n = place.column * Row::tile_n;
        if constexpr (Row::along_depth)
            return {group, shifted_row<Row>(call, m, 0, call.m), shifted_column<Row>(call, n), 0, call.m, start, end};
        return {group, shifted_row<Row>(call, start + m, start, end), shifted_column<Row>(call, n), start, end, 0, call.k};
    }

   private:
    __device__ __forceinline__ int down() const {
        return Row::along_depth ? call.tiles_m : (end - start + Row::tile_m - 1) / Row::tile_m;
    }

    // The group that has the tile of this index.
    __device__ __forceinline__ void find() {
        for (; group < call.groups; ++group) {
            start = __ldg(call.starts + group);
            end = __ldg(call.starts + group + 1);
            const int tiles = down() * call.tiles_n;
            if (index - before < tiles) return;
            before += tiles;
        }
    }

    const GemmCall& call;
    int index, group = 0, before = 0, start = 0, end = 0;
};

template <class Row>
using GemmTiles = std::conditional_t<Row::grouped, GroupTiles<Row>, ProductTiles<Row>>;

// Rows of a matrix that are those of a group, as a ragged map counts them.
__device__ __forceinline__ RaggedRows rows_of_group(std::int64_t row_bytes, int first, int end) {
    return {row_bytes * first, row_bytes, end - first};
}

}  // namespace catalog::cuda
