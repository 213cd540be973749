// One K/V tile and its two products with a few query rows in AMX tiles. Keys are tiles as they lie in the tensor, so what
// is summed up is the transpose of the scores. For up to eight query rows, values are tiles where they lie, too (spread.hpp); for
// more, they become pairs of rows, a few at a time, in L1.
#pragma once

#include <algorithm>
#include <cstddef>

#include "direct.hpp"
#include "host/spread.hpp"

namespace catalog::host {

// Not with a block mask, which divides query rows into runs that begin anywhere.
template <class Row>
inline constexpr bool has_direct_tiles = Row::pipeline == Pipeline::host_amx && sizeof(typename Row::dtype) == 2 &&
                                         !Row::block_mask && !std::is_same_v<UnitOf<Row>, SplitHalf>;

template <class Row>
struct DirectTiles;

#if defined(CATALOG_BRAIN_PAIRS)

template <class Row>
struct DirectTiles {
    using Memory = Scratch<Row>;
    using T = typename Row::dtype;
    using Unit = typename Memory::Unit;
    using Ahead = TileAhead<Row>;

    static constexpr int factors = Memory::factors, block_rows = tile_rows;
    static constexpr int group = 2 * tile_rows;   // keys of a product
    static constexpr int panel = spread_columns;  // columns of values
    // Keys whose values stay in L1 until they are multiplied.
    static constexpr int stretch = Row::hdim_v <= 128 ? 64 : 32;
    static constexpr int line = 64;
    static constexpr int distance = Ahead::template distance<group>;
    static_assert(Memory::step % group == 0 && Row::tile_n0 % stretch == 0, "tiles have whole groups of keys");
    static_assert(Row::tile_m0 >= block_rows, "the rows of a sequence are never divided, so results do not depend on threads");

    // For 4 rows and more, vectors multiply for longer than memory takes to deliver the keys.
    static bool pays(std::int64_t rows, int hdim_q, int hdim_v) {
        return rows >= 4 && rows <= tile_rows && hdim_q % (tile_units * factors) == 0 && hdim_v % panel == 0;
    }

    Memory& scratch;
    const KvTile<Row> tile, next;
    const int hdim_q, hdim_v;

    // The queries are the columns of a tile for each 16 units of the depth.
    static void pack_query(Memory& scratch, std::int64_t row, const T* q, int hdim_q) {
        for (int d = 0; d < hdim_q; d += factors)
            std::memcpy(static_cast<void*>(scratch.shared_q + d / factors * tile_rows + row), q + d, sizeof(Unit));
    }

    DirectTiles(Memory& scratch, const KvTile<Row>& tile, const KvTile<Row>& next, int hdim_q, int hdim_v)
        : scratch(scratch), tile(tile), next(next), hdim_q(hdim_q), hdim_v(hdim_v) {}

    // S^T = K Q^T, of all queries. Keys that follow are prefetched meanwhile, and then values.
    void multiply_q_k(std::int64_t, int rows) const {
        const auto [begin, end] = columns_seen(rows);
        alignas(64) float products[group * tile_rows];
        for (int key = begin; key < end; key += group) {
            const int at = key + distance;
            auto ahead = at < end ? Ahead::keys(tile, at, group) : Ahead::values(tile, begin + at - end, group);
            const auto [keys, stride] = lines_of<group>(tile.keys, key, 0, hdim_q);
            multiply_tiles<false, 2, 1>(keys, ScatteredTiles{stride, distances}, scratch.shared_q, tile_rows,
                                        hdim_q / factors, products, tile_rows,
                                        [&] { ahead.ask_lines(group); });  // each reads a line of a key
            for (int first = 0; first < group; first += tile_rows) {
                Float of_keys[lanes];
                for (int i = 0; i < lanes; ++i) of_keys[i] = load(products + (first + i) * tile_rows);
                transpose(of_keys);
                for (int row = 0; row < rows; ++row) store(scratch.s[row] + key + first, of_keys[row]);
            }
        }
    }

    // What is prefetched while `rows` query rows are weighed: values that follow those that were asked for beside products.
    typename Ahead::Lines beside_weights(int rows) const {
        const int begin = Memory::whole_vectors(scratch.seen[0]).begin;
        return Ahead::values(tile, begin + distance, values_beside_weights(rows));
    }

    // O = rescale * O + P V. Values that follow are prefetched meanwhile, and then the next tile's keys.
    void multiply_p_v(std::int64_t first_row, int rows) const {
        if (rows > most_spread_rows || !add_in_place(first_row, rows)) add_joined(first_row, rows);
    }

   private:
    // Beside a step of a product with the weights, which reads 32 lines of values.
    static constexpr int lines_beside_product = 16;

    static constexpr int values_beside_weights(int rows) { return rows / 2 * Ahead::beside_weights; }

    // The columns of the tile that some row sees.
    Columns columns_seen(int rows) const {
        return Memory::whole_vectors({scratch.seen[0].begin, scratch.seen[rows - 1].end});
    }

    // Columns of `count` rows where they lie, or a copy: of those on pages, and of fewer, which zeros follow instead of what
    // follows in memory.
    template <int count>
    SpreadLines lines_of(const KvRows<Row>& rows, int first, int column, int columns) const {
        if constexpr (std::is_same_v<KvRows<Row>, Rows<const T>>)
            if (first + count <= tile.count)
                return {reinterpret_cast<const std::byte*>(rows[first] + column), rows.stride * std::ptrdiff_t{sizeof(T)}};
        auto* const copies = reinterpret_cast<std::byte*>(scratch.k);
        constexpr std::ptrdiff_t row = std::max(Memory::depth, most_spread_panels * panel) * sizeof(T) + line;
        static_assert(count * row <= static_cast<std::ptrdiff_t>(sizeof scratch.k));
        for (int i = 0; i < count; ++i)
            if (first + i < tile.count)
                std::memcpy(copies + i * row, rows[first + i] + column, columns * sizeof(T));
            else
                std::memset(copies + i * row, 0, columns * sizeof(T));
        return {copies, row};
    }

    // With values where they lie. False, and O is as before, if some sum is no number.
    __attribute__((noinline)) bool add_in_place(std::int64_t first_row, int rows) const {
        const auto [begin, end] = columns_seen(rows);
        const int later = distance + values_beside_weights(rows), steps = (end - begin) / spread_depth;
        Unit* const weights = scratch.v;
        for (int row = 0; row < rows; ++row) spread_row(scratch.p[row] + begin / factors, steps, row, weights);
        alignas(64) float tiles[Memory::columns / panel * of_spread_tile];
        for_blocks<most_spread_panels, 2, 1>(0, hdim_v / panel, [&, begin = begin, end = end](auto across, int first) {
            auto ahead = Ahead::values(tile, 0, 0);
            const auto lines_of_step = [&](int step) {
                const int key = begin + step * spread_depth, at = key + later;
                if (first == 0)
                    ahead = at < end ? Ahead::values(tile, at, spread_depth) : Ahead::keys(next, at - end, spread_depth);
                return lines_of<spread_depth>(tile.values, key, first * panel, across * panel);
            };
            multiply_spread<false, across>(weights, steps, lines_of_step, tiles + first * of_spread_tile,
                                           [&] { ahead.ask_lines(spread_depth * hdim_v / panel / across); });
        });
        const SpreadSums sums{tiles, rows, hdim_v};
        if (!sums.are_finite()) return false;
        sums.for_vectors([&](int row, int column, Float sum) {
            float* const o = scratch.o[first_row + row] + column;
            store(o, load(o) * scratch.rescale[row] + sum);
        });
        return true;
    }

    // With pairs of values. Half of what is prefetched is asked for beside joins, half beside products.
    __attribute__((noinline)) void add_joined(std::int64_t first_row, int rows) const {
        scratch.rescale_sums(first_row, rows, hdim_v);
        const auto [begin, end] = columns_seen(rows);
        for (int key = begin; key < end; key += stretch) {
            const int count = std::min(stretch, end - key), at = key + distance + values_beside_weights(rows);
            auto ahead = at < end ? Ahead::values(tile, at, count) : Ahead::keys(next, at - end, count);
            join_values(key, count, ahead);
            for (int column = 0; column < hdim_v; column += panel)
                multiply_tiles<true, 1, 2>(scratch.p[0] + key / factors, tiles_of_rows(Memory::row_p),
                                           scratch.v + column * (stretch / factors), panel, count / factors,
                                           scratch.o[first_row] + column, Memory::row_o,
                                           [&] { ahead.ask_lines(lines_beside_product); });
        }
    }

    // Values become pairs, in panels of columns: the bits of either type. Zeros follow the last one.
    __attribute__((noinline)) void join_values(int key, int count, typename Ahead::Lines& ahead) const {
        for (int i = 0; i < count; i += factors) {
            const auto row = [&](int at) {
                return at < tile.count ? reinterpret_cast<const bf16*>(tile.values[at]) : zero_row<bf16, Memory::columns>;
            };
            const PairedRows<bf16> pair{row(key + i), row(key + i + 1)};
            Unit* const to = scratch.v + i / factors * panel;
            ahead.ask_rows(1);  // of the two that are read
            for (int d = 0; d < hdim_v; d += panel) {
                Bits joined[2];
                load_row(PairedRows<bf16>{pair.even + d, pair.odd + d}, joined);
                std::memcpy(static_cast<void*>(to + d * (stretch / factors)), joined, sizeof joined);
            }
        }
    }

    // Of tiles along the depth, in bytes.
    struct Distances {
        std::ptrdiff_t of[Memory::depth / (tile_units * factors) + 1] = {};
        constexpr Distances() {
            for (int i = 0; i <= Memory::depth / (tile_units * factors); ++i) of[i] = i * line;
        }
    };
    static constexpr Distances all_distances{};
    static constexpr const std::ptrdiff_t* distances = all_distances.of;
};

#endif

}  // namespace catalog::host
