// One K/V tile and its two products with a query tile, packed, because many rows share it. For few rows: direct.hpp.
//
// scratch.seen has the columns of the tile that each row sees; both ends grow with the row. Products are made of
// register blocks. Blocks that no row sees are skipped: their scores are undefined, and weights must be zero wherever a
// row of a block does not see what its neighbour sees.
#pragma once

#include "host/gemm.hpp"
#include "host/tiles.hpp"
#include "copies.hpp"
#include "pipeline.hpp"
#include "scratch.hpp"

namespace catalog::host {

// Writes zeros to `p` where neighbours in a block of `block` rows see columns outside `weighed`, the row's own.
inline void zero_unseen(const Columns* seen, int row, int rows, int block, Columns weighed, float* p) {
    const int begin = seen[std::max(row - block + 1, 0)].begin, end = seen[std::min(row + block - 1, rows - 1)].end;
    std::fill(p + std::min(begin, weighed.begin), p + weighed.begin, 0.0f);
    std::fill(p + weighed.end, p + std::max(end, weighed.end), 0.0f);
}

// The same for pairs, in whole steps of columns: blocks begin and end with them.
template <int step, class Unit>
inline void zero_unseen(const Columns* seen, int row, int rows, int block, Columns weighed, Unit* p) {
    constexpr int factors = Units<Unit>::depth;
    const int begin = seen[std::max(row - block + 1, 0)].begin / step * step;
    const int end = round_up(seen[std::min(row + block - 1, rows - 1)].end, step);
    std::fill(p + std::min(begin, weighed.begin) / factors, p + weighed.begin / factors, Unit{});
    std::fill(p + weighed.end / factors, p + std::max(end, weighed.end) / factors, Unit{});
}

template <class Row>
struct PackedTile {
    using Memory = Scratch<Row>;

    static constexpr int block_rows = Row::warp_m1;  // of P V

    Memory& scratch;
    const int hdim_q, hdim_v;

    static void pack_query(Memory& scratch, std::int64_t row, const QueryElement<Row>* q, int hdim_q) {
        pack_scaled(q, hdim_q, scratch.row[row].scale, scratch.q[row]);
    }

    PackedTile(Memory& scratch, const KvTile<Row>& tile, const KvTile<Row>& /*next*/, int hdim_q, int hdim_v)
        : scratch(scratch), hdim_q(hdim_q), hdim_v(hdim_v) {
        pack_transposed<Row::warp_n0, Memory::depth>(tile.keys, tile.count, hdim_q, scratch.k);
        pack_columns<Row::warp_n1, Row::tile_n0>(tile.values, tile.count, hdim_v, scratch.v);
    }

    // S = Q K^T.
    void multiply_q_k(std::int64_t first_row, int rows) const {
        const Columns* seen = scratch.seen;
        constexpr int width = Row::warp_n0;
        int begin = 0, end = 0;  // the rows that see any of a block's columns
        for_blocks<width / lanes, 1>(0, (seen[rows - 1].end + lanes - 1) / lanes, [&](auto vectors, int vector) {
            constexpr int columns = vectors * lanes;
            const int column = vector * lanes;
            while (seen[begin].end <= column) ++begin;
            while (end < rows && seen[end].begin < column + columns) ++end;
            const Rows<const float> panel{scratch.k + column / width * width * Memory::depth + column % width, width};
            for_row_blocks<Row::warp_m0>(begin, end, [&](auto block, int row) {
                multiply_block<block, columns, Memory::row_q, 1>(scratch.q[first_row + row], panel, hdim_q,
                                                                 store_to<Memory::row_s>(scratch.s[row] + column));
            });
        });
    }

    // O = rescale * O + P V.
    void multiply_p_v(std::int64_t first_row, int rows) const {
        const Columns* seen = scratch.seen;
        constexpr int width = Row::warp_n1;
        for (int column = 0; column < hdim_v; column += width) {
            const Rows<const float> panel{scratch.v + column * Row::tile_n0, width};
            for_row_blocks<block_rows>(0, rows, [&](auto block, int row) {
                const int begin = seen[row].begin, end = seen[row + block - 1].end;
                float* o = scratch.o[first_row + row] + column;
                multiply_block<block, width, Memory::row_s, 1>(
                    scratch.s[row] + begin, panel.from(begin), end - begin, [&](int r, int j, Float sum) {
                        float* to = o + r * Memory::row_o + j;
                        store(to, load(to) * scratch.rescale[row + r] + sum);
                    });
            });
        }
    }
};

#if defined(CATALOG_BRAIN_PAIRS)

// The packed form for bf16, and for fp16 in tiles: products of pairs, in vectors or in AMX tiles. Scores are scaled by the
// softmax.
template <class Row>
struct PairTile {
    using T = QueryElement<Row>;
    using Memory = Scratch<Row>;
    using Unit = typename Memory::Unit;
    static constexpr int factors = Memory::factors, whole = Memory::whole;
    static_assert(sizeof(T) == 2);

    static constexpr bool in_tiles = Row::pipeline == Pipeline::host_amx;
    static constexpr int block_rows = Row::warp_m1;  // of P V
    static_assert(!in_tiles || (Row::tile_m0 % tile_rows == 0 && Row::warp_m0 == 2 * tile_rows &&
                                Row::warp_m1 == 2 * tile_rows && Row::warp_n0 == 2 * lanes && Row::warp_n1 == 2 * lanes),
                  "a register block is two tiles by two");

    Memory& scratch;
    const int depth, hdim_v;  // depth: of Q K^T, in units, whole vectors of pairs

    static void pack_query(Memory& scratch, std::int64_t row, const T* q, int hdim_q) {
        for (int d = 0; d < hdim_q; d += whole)
            store_read(scratch.q[row] + d / factors, load_along<ReadUnit<Unit>>(q + d, hdim_q - d), lanes);
    }

    PairTile(Memory& scratch, const KvTile<Row>& tile, const KvTile<Row>& /*next*/, int hdim_q, int hdim_v)
        : scratch(scratch), depth(round_up(hdim_q, whole) / factors), hdim_v(hdim_v) {
        const auto pack_keys = [&](auto keys) {
            pack_transposed<Row::warp_n0, Memory::depth / factors>(keys, tile.count, hdim_q, scratch.k);
        };
        const auto pack_values = [&](auto values) {
            pack_columns_of_pairs<Row::warp_n1, Row::tile_n0, Memory::step>(values, tile.count, hdim_v, scratch.v);
        };
        if constexpr (has_bytes<Row>) {
            using Reader = DepthReader<BrainPair, typename Row::dtype>;
            pack_keys(copied<Reader>(tile.keys, 0, tile.count, hdim_q, scratch, NothingAhead{}));
            pack_values(copied<Reader>(tile.values, 0, tile.count, hdim_v, scratch, NothingAhead{}));
        } else {
            pack_keys(tile.keys);
            pack_values(tile.values);
        }
    }

    // S = Q K^T.
    void multiply_q_k(std::int64_t first_row, int rows) const {
        const Columns* seen = scratch.seen;
        constexpr int width = Row::warp_n0;
        int begin = 0, end = 0;  // the rows that see any of a block's columns
        for_blocks<width / lanes, 1>(0, (seen[rows - 1].end + lanes - 1) / lanes, [&](auto vectors, int vector) {
            constexpr int columns = vectors * lanes;
            const int column = vector * lanes;
            while (seen[begin].end <= column) ++begin;
            while (end < rows && seen[end].begin < column + columns) ++end;
            const Unit* const panel =
                scratch.k + column / width * width * (Memory::depth / factors) + column % width;
            if constexpr (in_tiles) {
                for_tiles(begin / tile_rows * tile_rows, end, [&](auto tiles, int row) {
                    multiply_tiles<false, tiles, vectors>(scratch.q[first_row + row], tiles_of_rows(Memory::row_q),
                                                          panel, width, depth, scratch.s[row] + column, Memory::row_s);
                });
            } else {
                for_row_blocks<Row::warp_m0>(begin, end, [&](auto block, int row) {
                    store_products<block, columns>(scratch.q[first_row + row], panel, depth, scratch.s[row] + column);
                });
            }
        });
    }

    // O = rescale * O + P V.
    void multiply_p_v(std::int64_t first_row, int rows) const {
        constexpr int width = Row::warp_n1;
        if constexpr (in_tiles) scratch.rescale_sums(first_row, rows, hdim_v);
        for (int column = 0; column < hdim_v; column += width) {
            const Rows<const Unit> panel{scratch.v + column * (Row::tile_n0 / factors), width};
            if constexpr (in_tiles) {
                for_tiles(0, rows, [&](auto tiles, int row) {
                    const auto [begin, end] = units(row, std::min(row + tiles * tile_rows, rows));
                    multiply_tiles<true, tiles, width / lanes, Passing::b, PartProducts::large>(
                        scratch.p[row] + begin, tiles_of_rows(Memory::row_p), panel[begin], width, end - begin,
                        scratch.o[first_row + row] + column, Memory::row_o);
                });
            } else {
                for_row_blocks<block_rows>(0, rows, [&](auto block, int row) {
                    const auto [begin, end] = units(row, row + block);
                    add_products<block>(scratch.p[row] + begin, panel[begin], end - begin, scratch.rescale + row,
                                        scratch.o[first_row + row] + column);
                });
            }
        }
    }

   private:
    // Functions of their own: in a large function, g++ keeps sums of assembly in memory.
    template <int block, int columns>
    __attribute__((noinline)) static void store_products(const Unit* q, const Unit* k, int depth, float* s) {
        multiply_block<block, columns, Memory::row_q, 1>(q, Rows<const Unit>{k, Row::warp_n0}, depth,
                                                         store_to<Memory::row_s>(s));
    }

    template <int block>
    __attribute__((noinline)) static void add_products(const Unit* p, const Unit* v, int depth,
                                                       const float* rescale, float* o) {
        multiply_block<block, Row::warp_n1, Memory::row_p, 1>(
            p, Rows<const Unit>{v, Row::warp_n1}, depth, [&](int r, int j, Float sum) {
                float* to = o + r * Memory::row_o + j;
                store(to, load(to) * rescale[r] + sum);
            });
    }

    // Calls body(std::integral_constant<int, tiles>, first) for blocks of two tiles of rows, then of one; the last tile may
    // have rows after `end`, whose results nobody reads.
    template <class Body>
    static void for_tiles(int begin, int end, Body body) {
        for_blocks<2, 1>(begin / tile_rows, (end + tile_rows - 1) / tile_rows,
                         [&](auto tiles, int tile) { body(tiles, tile * tile_rows); });
    }

    // The units of weights of the rows from `row` to `end`.
    Columns units(int row, int end) const {
        constexpr int step = Memory::step;
        return {scratch.seen[row].begin / step * step / factors, round_up(scratch.seen[end - 1].end, step) / factors};
    }
};

#endif

// The packed form of a row's pipeline.
template <class Row, bool = multiplies_pairs<Row>>
struct Copied {
    using Tile = PackedTile<Row>;
};

#if defined(CATALOG_BRAIN_PAIRS)
template <class Row>
struct Copied<Row, true> {
    using Tile = PairTile<Row>;
};
#endif

}  // namespace catalog::host
