// From sums to elements of the result: by TMA where it can store it, else by threads; parts of the depth as they are.
#pragma once

#include "conv_call.hpp"
#include "cuda/cluster.hpp"
#include "cuda/gemm_pieces.hpp"
#include "cuda/kernel_launch.hpp"

namespace catalog::cuda {

// A tile of C by its phase, its group and its first element, and a part of its depth: steps of 64 channels, and then of 32.
struct ConvTile {
    int phase, group, row, column, first_step, end_whole, end_step;
};

template <class Row>
__device__ __forceinline__ ConvTile find_tile(const ConvCall<Row::ndim>& call, int tile, int part) {
    int phase = 0;
    while (phase + 1 < call.phase_count && tile >= call.phases[phase + 1].first_tile) ++phase;
    const auto& of = call.phases[phase];
    const int within = tile - of.first_tile, across = call.tiles_n.quotient(within);
    const int down = call.of_groups.quotient(across);
    const int least = call.of_splits.quotient(of.steps), longer = of.steps - least * call.splits;  // have one more
    const int first = part * least + min(part, longer), end = first + least + (part < longer);
    return {phase,
            across - down * call.groups,
            down * Row::tile_m,
            (within - across * static_cast<int>(call.tiles_n.divisor)) * Row::tile_n,
            first,
            max(first, min(end, of.whole_steps)),
            end};
}

// Parts of tiles that a block computes: one of a cluster's, or those of all tiles, part after part.
template <class Row>
class ConvItems {
    using Call = ConvCall<Row::ndim>;

   public:
    int index;

    __device__ __forceinline__ explicit ConvItems(const Call& call) : index(first(call)), call(call) {}

    __device__ __forceinline__ bool exist() const { return index < call.tiles * call.splits; }
    __device__ __forceinline__ void next() { index += static_cast<int>(gridDim.x); }

    __device__ __forceinline__ ConvTile tile() const {
        const int part = call.of_tiles.quotient(index);
        return find_tile<Row>(call, index - part * call.tiles, part);
    }

   private:
    static __device__ __forceinline__ int first(const Call& call) {
        const int block = static_cast<int>(blockIdx.x);
        if (!call.in_cluster) return block;
        const int tile = call.of_splits.quotient(block);
        return (block - tile * call.splits) * call.tiles + tile;
    }

    const Call& call;
};

// A position of a phase, the width first.
template <int axes>
struct ConvPosition {
    int image, at[axes];

    __device__ __forceinline__ ConvPosition(const ConvPhase<axes>& phase, int index) {
#pragma unroll
        for (int i = 0; i < axes; ++i) {
            const int next = phase.count[i].quotient(index);
            at[i] = index - next * static_cast<int>(phase.count[i].divisor);
            index = next;
        }
        image = index;
    }
};

// An element of the filter within a phase, and the 64 channels of a piece of the depth, or of 64 columns. The depth has all
// elements of 64 channels one after the other, which read the same lines of the images; columns have all channels of an
// element.
template <int axes, bool is_column>
struct ConvPiece {
    int block, tap[axes];

    __device__ __forceinline__ ConvPiece(const ConvCall<axes>& call, const ConvPhase<axes>& phase, int index) {
        if constexpr (is_column) index = take(block, index, call.blocks);
#pragma unroll
        for (int i = 0; i < axes; ++i) index = take(tap[i], index, phase.taps[i]);
        if constexpr (!is_column) block = index;
    }

    __device__ __forceinline__ void next(const ConvCall<axes>& call, const ConvPhase<axes>& phase) {
        if constexpr (is_column)
            if (!wraps(block, call.blocks)) return;
#pragma unroll
        for (int i = 0; i < axes; ++i)
            if (!wraps(tap[i], phase.taps[i])) return;
        if constexpr (!is_column) ++block;
    }

    __device__ __forceinline__ int element(const ConvCall<axes>& call, const ConvPhase<axes>& phase) const {
        int element = 0;
#pragma unroll
        for (int i = axes - 1; i >= 0; --i)
            element = element * call.filter[i] + phase.first_tap[i] + phase.tap_step[i] * tap[i];
        return element;
    }

   private:
    // The innermost digit of an index, and what is left of the index.
    static __device__ __forceinline__ int take(int& digit, int index, int count) {
        const int left = index < count ? 0 : index / count;
        digit = index - left * count;
        return left;
    }

    static __device__ __forceinline__ bool wraps(int& digit, int count) {
        if (++digit < count) return false;
        digit = 0;
        return true;
    }
};

// Elements of the result, two columns at a time.
template <class Row>
class ConvResult {
    using T = typename Row::dtype;
    static constexpr int axes = Row::ndim;
    static constexpr bool weighs = Row::direction == Direction::bwd_weight;

   public:
    __device__ __forceinline__ ConvResult(const ConvCall<axes>& call, const ConvTile& tile)
        : call(call), tile(tile), phase(call.phases[tile.phase]) {}

    // Where a row begins, NULL if there is none; `row` counts in the tile.
    __device__ __forceinline__ T* row(int row) const {
        row += tile.row;
        T* const data = static_cast<T*>(call.result);
        if constexpr (weighs) {
            if (row >= call.rows) return nullptr;
            return data + static_cast<std::int64_t>(tile.group * call.rows + row) * call.stride_result;
        } else {
            if (row >= phase.rows) return nullptr;
            const ConvPosition<axes> position(phase, row);
            std::int64_t index = 0;
#pragma unroll
            for (int i = axes - 1; i >= 0; --i)
                index = index * call.extents[i] + phase.origin[i] + phase.spread[i] * position.at[i];
            return data + position.image * call.stride_result + index * call.groups * call.columns +
                   tile.group * call.columns;
        }
    }

    // 64 columns: where they begin in a row, and how many of them there are; `column` counts in the tile.
    struct Columns {
        std::int64_t begin;
        int count;
    };
    __device__ __forceinline__ Columns columns(int column) const {
        column += tile.column;
        if constexpr (weighs) {
            const int index = column / block_channels, elements = index / call.blocks;
            const int first = (index - elements * call.blocks) * block_channels;
            int taps = 1;
#pragma unroll
            for (int i = 0; i < axes; ++i) taps *= call.filter[i];
            return {static_cast<std::int64_t>(elements) * call.columns + first, elements < taps ? call.columns - first : 0};
        } else {
            return {column, call.columns - column};
        }
    }

    // Eight columns of one row.
    __device__ __forceinline__ void put(T* row, int column, const uint4& values) const {
        column += tile.column;
        if (!row || column >= call.columns) return;
        if (call.vectors) {
            *reinterpret_cast<uint4*>(row + column) = values;
        } else {
            const T* const elements = reinterpret_cast<const T*>(&values);
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (column + i < call.columns) row[column + i] = elements[i];
        }
    }

    __device__ __forceinline__ void put(T* row, const Columns& columns, int column, float x, float y) const {
        if (!row || column >= columns.count) return;
        T* const to = row + columns.begin + column;
        if (call.pairs) {
            *reinterpret_cast<std::uint32_t*>(to) = pack<T>(x, y);
        } else {
            to[0] = T(x);
            if (column + 1 < columns.count) to[1] = T(y);
        }
    }

   private:
    const ConvCall<axes>& call;
    const ConvTile& tile;
    const ConvPhase<axes>& phase;
};

// The sums of a tile's part as they lie in registers: four of each thread at a time.
template <class Row>
struct ConvSums {
    using Shape = ConvShape<Row>;
    static constexpr int threads = 128 * Shape::groups, chunks = Shape::blocks_p * Shape::tile_q / 8;
    static constexpr std::int64_t floats = std::int64_t{4} * chunks * threads;

    static __device__ __forceinline__ float4* place(float* sums, std::int64_t tile, int chunk, int thread) {
        return reinterpret_cast<float4*>(sums) + (tile * chunks + chunk) * threads + thread;
    }

    // The same of one tile in shared memory, in place of the stages.
    static __device__ __forceinline__ std::uint32_t place(std::uint32_t shared, int chunk, int thread) {
        return shared + (chunk * threads + thread) * 16;
    }
    static_assert(Shape::swapped || floats * 4 <= Shape::out);
};

// Where the sums of a thread's chunks go, which are two columns of two rows.
template <class Row>
class ConvChunks {
    using Shape = ConvShape<Row>;
    using T = typename Row::dtype;

   public:
    // Of a block of 64 rows of a thread's warpgroup.
    __device__ __forceinline__ ConvChunks(const ConvResult<Row>& result, int block, int thread)
        : result(result), column(thread % 4 * 2) {
        const int row = (thread / 128 * Shape::blocks_p + block) * 64 + thread % 128 / 32 * 16 + thread % 32 / 4;
        above = result.row(row);
        below = result.row(row + 8);
    }

    // Eight columns from 8 * j on.
    __device__ __forceinline__ void put(int j, const float4& sum) const {
        const auto columns = result.columns(j / 8 * 64);
        result.put(above, columns, j % 8 * 8 + column, sum.x, sum.y);
        result.put(below, columns, j % 8 * 8 + column, sum.z, sum.w);
    }

   private:
    const ConvResult<Row>& result;
    const int column;
    T *above, *below;
};

__device__ __forceinline__ void add_to(float4& sum, const float4& x) {
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
}

// Of one warpgroup.
template <class Row>
class ConvEpilogue {
    using Shape = ConvShape<Row>;
    using Call = ConvCall<Row::ndim>;
    using Sums = float[Shape::blocks_p][Shape::tile_q / 2];
    static constexpr bool weighs = Row::direction == Direction::bwd_weight;
    static constexpr int in_block = Shape::tile_q / 8;  // chunks of a block of 64 rows

   public:
    __device__ __forceinline__ ConvEpilogue(const Call& call, std::uint32_t shared, int group)
        : call(call), shared(shared), group(group), thread(static_cast<int>(threadIdx.x) % 128), pieces(shared, group) {}

    __device__ __forceinline__ void store(const ConvTile& tile, std::int64_t index, const Sums& sums) {
        if constexpr (Shape::swapped) {
            if (call.plain)
                store_plain(tile, sums);
            else
                store_by_threads(tile, sums);
        } else if (call.in_cluster) {
            share(tile, sums);
        } else if (call.splits > 1) {
            keep(index, sums);
        } else if (call.plain) {
            store_plain(tile, sums);
        } else if (!weighs && call.vectors) {
            store_by_threads(tile, sums);
        } else {
            store_elements(tile, sums);
        }
    }

   private:
    // `put(chunk, x)` gets all sums, four at a time.
    template <class Put>
    static __device__ __forceinline__ void each_chunk(const Sums& sums, Put&& put) {
#pragma unroll
        for (int block = 0; block < Shape::blocks_p; ++block)
#pragma unroll
            for (int j = 0; j < in_block; ++j) {
                const float* const x = &sums[block][4 * j];
                put(block * in_block + j, make_float4(x[0], x[1], x[2], x[3]));
            }
    }

    __device__ __forceinline__ void keep(std::int64_t index, const Sums& sums) const {
        each_chunk(sums, [&](int chunk, const float4& x) {
            *ConvSums<Row>::place(call.sums, index, chunk, group * 128 + thread) = x;
        });
    }

    // The sum of all parts, in order; four loads are on their way at a time.
    __device__ __forceinline__ float4 sum_of_parts(std::uint32_t address) const {
        constexpr int at_once = 4;
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 1
        for (int first = 0; first < call.splits; first += at_once) {
            float4 x[at_once];
#pragma unroll
            for (int i = 0; i < at_once; ++i)
                x[i] = first + i < call.splits ? load_remote(shared_address_of(address, first + i)) : make_float4(0, 0, 0, 0);
#pragma unroll
            for (const float4& of : x) add_to(sum, of);
        }
        return sum;
    }

    // Each block of the cluster adds the parts of some columns.
    __device__ __forceinline__ void share(const ConvTile& tile, const Sums& sums) const {
        const int place = group * 128 + thread, rank = static_cast<int>(cluster_rank());
        named_barrier_sync(8, ConvSums<Row>::threads);  // the stages are no longer read
        each_chunk(sums, [&](int chunk, const float4& x) {
            store_shared(ConvSums<Row>::place(shared, chunk, place), x);
        });
        cluster_sync();
        const ConvResult<Row> result(call, tile);
#pragma unroll 1
        for (int block = 0; block < Shape::blocks_p; ++block) {
            const ConvChunks<Row> chunks(result, block, place);
#pragma unroll 2
            for (int j = in_block * rank / call.splits; j < in_block * (rank + 1) / call.splits; ++j) {
                const std::uint32_t address = ConvSums<Row>::place(shared, block * in_block + j, place);
                chunks.put(j, sum_of_parts(address));
            }
        }
    }

    // What GemmPieces rounds.
    struct AsTheyAre {
        __device__ __forceinline__ auto operator()(const float* x, int, int) const {
            return [x](int i) { return x[i]; };
        }
    };

    __device__ __forceinline__ void store_plain(const ConvTile& tile, const Sums& sums) {
        pieces.store(sums, AsTheyAre{}, [&](std::uint32_t piece, int p, int q) {
            const int row = tile.row + (Shape::swapped ? q : p), column = tile.column + (Shape::swapped ? p : q);
            if constexpr (weighs) {
                const int index = column / block_channels, element = index / call.blocks;
                tma_store(&call.out, piece, (index - element * call.blocks) * block_channels, element, row, tile.group);
            } else if (row < call.phases[tile.phase].rows) {
                tma_store(&call.out, piece, column, row, tile.group);
            }
        });
    }

    __device__ __forceinline__ void store_by_threads(const ConvTile& tile, const Sums& sums) {
        const ConvResult<Row> result(call, tile);
        const auto first_p = [&](int block) { return (group * Shape::blocks_p + block) * 64; };
        constexpr int bands = Shape::swapped ? Shape::pieces_q : Shape::blocks_p, shares = Shape::piece_rows / 16;
        typename Row::dtype* rows[bands][shares];  // each is looked for once
#pragma unroll
        for (int band = 0; band < bands; ++band)
#pragma unroll
            for (int share = 0; share < shares; ++share)
                rows[band][share] =
                    result.row((Shape::swapped ? Shape::piece_q(band) : first_p(band)) + share * 16 + thread / 8);
        pieces.store_by_threads(sums, AsTheyAre{}, [&](int block, int piece, int share, const uint4& values) {
            const int first = Shape::swapped ? first_p(block) : Shape::piece_q(piece);
            result.put(rows[Shape::swapped ? piece : block][share], first + thread % 8 * 8, values);
        });
    }

    __device__ __forceinline__ void store_elements(const ConvTile& tile, const Sums& sums) const {
        const ConvResult<Row> result(call, tile);
        const int lane = thread % 32;
#pragma unroll
        for (int block = 0; block < Shape::blocks_p; ++block) {
            const int first = (group * Shape::blocks_p + block) * 64 + thread / 32 * 16 + lane / 4;
            auto* const above = result.row(first);
            auto* const below = result.row(first + 8);
#pragma unroll
            for (int piece = 0; piece < Shape::pieces_q; ++piece) {
                const auto columns = result.columns(64 * piece);
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const float* const x = &sums[block][32 * piece + 4 * j];
                    const int column = 8 * j + lane % 4 * 2;
                    result.put(above, columns, column, x[0], x[1]);
                    result.put(below, columns, column, x[2], x[3]);
                }
            }
        }
    }

    const Call& call;
    const std::uint32_t shared;
    const int group, thread;
    GemmPieces<ConvTraits<Row>, typename Row::dtype> pieces;
};

// Adds the sums of all parts, in order. Grid: tiles, chunks of their sums.
template <class Row>
__global__ __launch_bounds__(ConvSums<Row>::threads) void conv_add_parts(const __grid_constant__ ConvCall<Row::ndim> call) {
    using Shape = ConvShape<Row>;
    constexpr int in_block = Shape::tile_q / 8;
    const int index = static_cast<int>(blockIdx.x), chunk = static_cast<int>(blockIdx.y);
    const int thread = static_cast<int>(threadIdx.x);
    const ConvTile tile = find_tile<Row>(call, index, 0);
    const ConvResult<Row> result(call, tile);
    const ConvChunks<Row> chunks(result, chunk / in_block, thread);
    follow_last_kernel();
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
    for (int part = 0; part < call.splits; ++part)
        add_to(sum, *ConvSums<Row>::place(call.sums, std::int64_t{part} * call.tiles + index, chunk, thread));
    chunks.put(chunk % in_block, sum);
}

}  // namespace catalog::cuda
