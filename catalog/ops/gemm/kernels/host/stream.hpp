// The product of few rows: B is read once, straight from the tensor, and not copied.
#pragma once

#include <algorithm>
#include <atomic>

#include "along.hpp"
#include "host/gemm.hpp"
#include "host/threads.hpp"
#include "transposed.hpp"

namespace catalog::host {

template <class Row, class OfPanels>
class StreamProduct {
    using T = typename Row::dtype;
    static constexpr bool in_blocks = scales_of<Row> == Scales::block;
    // An offset of B would have to be taken from each sum of a block: across columns, these are many.
    using Unit = std::conditional_t<in_blocks && !Row::b_along, OfPanels, typename Streamed<OfPanels>::type>;
    using Sum = SumOf<Row, Unit>;
    using Vector = std::conditional_t<std::is_same_v<Sum, float>, Float, Ints>;
    static constexpr int factors = Units<Unit>::depth, tile_m = Row::tile_m, tile_n = Row::tile_n;
    static constexpr int step = Row::tile_k / factors;

    // B by columns: a group of columns is multiplied at a time.
    static constexpr int group = Row::warp_tile_n, height = std::min<int>(Row::warp_tile_m, lanes);
    static constexpr int tiles_of_rows = (tile_m + height - 1) / height;

    // B by rows: a strip of columns is multiplied at a time.
    static constexpr int strip = Row::warp_tile_n, vectors = std::max(strip / lanes, 1);

    struct Scratch {
        static constexpr int row_s = tile_n + 16;
        alignas(64) Sum sums[tile_m * row_s];
        Vector of_columns[Row::b_along ? tiles_of_rows * group : 1];
        alignas(64) Unit b[Row::b_along ? 1 : step * strip];
    };

   public:
    StreamProduct(const catalog_args& args, std::int64_t batch, int threads)
        : args(args), batch(batch), threads(threads), units((args.k + factors - 1) / factors) {}

    static std::int64_t tiles(const catalog_args& args) { return (args.n + tile_n - 1) / tile_n; }

    // Not inlined: it is compiled once for whole products and for parts of them.
    __attribute__((noinline)) catalog_status run() {
        Room<Unit>& room = thread_room<struct PackedA, Unit>();
        packed_a = room.reserve(Row::b_along ? tiles_of_rows * units_of_tile() : units * tile_m);
        if (!packed_a || !reserve_blocks()) return CATALOG_NO_MEMORY;
        for (std::int64_t row = 0; row < args.m; row += tile_m)
            multiply_rows(row, static_cast<int>(std::min<std::int64_t>(tile_m, args.m - row)));
        room.release_above(kept_units);
        return out_of_memory ? CATALOG_NO_MEMORY : CATALOG_OK;
    }

   private:
    bool reserve_blocks() {
        if constexpr (in_blocks && Row::b_along) {
            const std::int64_t size = tiles_of_rows * blocks_of(args.k) * lanes;
            scales_of_lanes = thread_room<struct ScalesOfLanes, float>().reserve(size);
            starts_of_blocks = thread_room<struct StartsOfBlocks, std::int32_t>().reserve(offset_of<Unit> ? size : 0);
            return scales_of_lanes && starts_of_blocks;
        }
        return true;
    }

    void multiply_rows(std::int64_t row, int rows) {
        const auto from = factor_of<Row::a_along, T>(args.a, batch).from(row, 0);
        if constexpr (Row::b_along) {
            pack_along(from, rows);
            if constexpr (in_blocks) copy_scales(row, rows);
        } else {
            pack_across(from, rows);
        }
        const std::int64_t width = Row::b_along ? tile_n : width_of_shares(args.n, tile_n, threads);
        const std::int64_t shares = (args.n + width - 1) / width;
        parallel_for(args, threads, shares, [&](std::int64_t share) {
            Scratch* const scratch = thread_scratch<Scratch>();
            if (!scratch) {
                out_of_memory = true;
                return;
            }
            const std::int64_t column = share * width;
            const int columns = static_cast<int>(std::min(width, args.n - column));
            if constexpr (Row::b_along)
                multiply_along(*scratch, column, rows, columns);
            else
                multiply_across(*scratch, row, column, rows, columns);
            if constexpr (is_transposed<Row>)
                finish_transposed<Row>(args, batch, scratch->sums, Scratch::row_s, row, column, rows, columns);
            else
                finish<Row>(args, batch, scratch->sums, Scratch::row_s, row, column, rows, columns);
        });
    }

    // Columns of B are contiguous.
    using OfB = ColumnsOfB<Unit, T>;
    static_assert(!Row::b_along || Row::tile_k % OfB::whole == 0, "what is read at a time belongs to one step");

    std::int64_t units_of_tile() const { return (args.k + OfB::whole - 1) / OfB::whole * OfB::whole / factors * height; }

    void pack_along(Factor<Row::a_along, T> from, int rows) {
        for (int i = 0; i < tiles_of_rows && i * height < rows; ++i) {
            tiles_of_a[i].units = packed_a + i * units_of_tile();
            const int count = std::min(height, rows - i * height);
            if constexpr (in_blocks)
                pack_blocks(from.from(i * height, 0), i, count);
            else
                tiles_of_a[i].pack(from.from(i * height, 0), count, args.k, OfB::whole);
        }
    }

    // The same units, but each block of the depth has a start of its own.
    void pack_blocks(Factor<Row::a_along, T> from, int tile, int count) {
        static_assert(block_extent % OfB::whole == 0, "what is read at a time belongs to one block");
        RowsOfA<Unit> block = tiles_of_a[tile];
        [[maybe_unused]] std::int32_t* start = starts_of_blocks + (offset_of<Unit> ? tile * blocks_of(args.k) * lanes : 0);
        tiles_of_a[tile].rows = rows_in_lanes(count);
        for (std::int64_t k = 0; k < args.k; k += block_extent) {
            block.pack(from.from(0, k), count, std::min<std::int64_t>(block_extent, args.k - k), OfB::whole);
            block.units += block_extent / factors * block.rows;
            if constexpr (offset_of<Unit> != 0) {
                store(start, block.start);
                start += lanes;
            }
        }
    }

    // For each tile and block of the depth, a vector with the scale of each lane's row.
    void copy_scales(std::int64_t row, int rows) {
        const BlockScales scales(args, batch);
        float* to = scales_of_lanes;
        for (int tile = 0; tile * height < rows; ++tile) {
            const int of_row = lanes / tiles_of_a[tile].rows, last = std::min(height, rows - tile * height) - 1;
            for (std::int64_t k = 0; k < args.k; k += block_extent, to += lanes)
                for (int lane = 0; lane < lanes; ++lane)
                    to[lane] = scales.a(row + tile * height + std::min(lane / of_row, last), k);
        }
    }

    Vector start_of(int tile) const {
        if constexpr (in_blocks)
            return Vector{};
        else
            return tiles_of_a[tile].start;
    }

    // A B with fewer columns than a group has is multiplied in pairs of them, if rows are few, too, and it has not to be
    // converted: otherwise it would take a third of the time to compile.
    void multiply_along(Scratch& scratch, std::int64_t first_column, int rows, int columns) const {
        if constexpr (DepthReader<Unit, T>::is_stored)
            if (args.n < group && rows <= 8) return multiply_groups<2>(scratch, first_column, rows, columns);
        multiply_groups<group>(scratch, first_column, rows, columns);
    }

    // The last group of a tile begins with columns that are known already: so there is no code for fewer of them. If B has
    // fewer, each column is a whole group.
    template <int group>
    void multiply_groups(Scratch& scratch, std::int64_t first_column, int rows, int columns) const {
        const auto b = factor_of<true, T>(args.b, batch).from(first_column, 0);
        for (int column = 0; column < columns;) {
            const int missing = std::max(group - (columns - column), 0);
            const bool is_alone = first_column + column < missing;
            const int known = is_alone ? group - 1 : missing;
            multiply_group<group>(scratch, {b.from(is_alone ? column : column - known, 0).data, is_alone ? 0 : b.stride}, known,
                           first_column, column, rows);
            column += group - known;
        }
    }

    // A group of columns of B, of which the first `known` do not count; `column` is the first other one.
    template <int group>
    void multiply_group(Scratch& scratch, Factor<true, T> b, int known, std::int64_t first_column, int column,
                        int rows) const {
        const int tiles = (rows + height - 1) / height;
        for (int tile = 0; tile < tiles; ++tile)
            std::fill_n(scratch.of_columns + tile * group, group, start_of(tile));
        const std::int64_t next = first_column + column + 2 * group <= args.n ? group * b.stride : 0;
        constexpr std::int64_t step = std::min(Row::tile_k, most_ahead<T>), size = sizeof(T);
        for (std::int64_t k = 0; k < args.k; k += step) {
            const std::int64_t depth = std::min<std::int64_t>(step, args.k - k);
            const T* const piece = b.data + (k + step < args.k ? k + step : next);
            for (int tile = 0; tile < tiles; ++tile) {
                const RowsOfA<Unit>& a = tiles_of_a[tile];
                const OfB of_b{b.data + k, b.stride,
                               tile == 0 ? ReadAhead(next * size, piece, b.stride * size, step * size)
                                         : ReadAhead(0, b.data + k, b.stride * size, step * size)};
                Vector* const sums = scratch.of_columns + tile * group;
                with_rows<std::min(height, group == 2 ? 8 : height)>(a.rows, [&](auto held) {
                    const Unit* const units_of_a = a.units + k / factors * held;
                    if constexpr (in_blocks) {
                        const std::int64_t first = k / block_extent, of_tile = tile * blocks_of(args.k) + first;
                        const BlocksOfDepth<Unit> blocks{scales_of_lanes + of_tile * lanes,
                                                         BlockScales(args, batch).b_from(first_column + column) + first,
                                                         starts_of_blocks + (offset_of<Unit> ? of_tile * lanes : 0)};
                        of_b.template multiply_scaled<held, group>(units_of_a, depth, blocks, sums);
                    } else {
                        of_b.template multiply<held, group>(units_of_a, depth, sums);
                    }
                });
            }
        }
        for (int tile = 0; tile < tiles; ++tile) {
            with_rows(tiles_of_a[tile].rows, [&](auto held) {
                sums_of_rows<held>(scratch.of_columns + tile * group + known, group - known,
                                   scratch.sums + tile * height * Scratch::row_s + column);
            });
        }
    }

    // Calls body(std::integral_constant<int, rows>) for a power of two.
    template <int rows = height, class Body>
    static void with_rows(int held, Body body) {
        if (held == rows)
            body(std::integral_constant<int, rows>{});
        else if constexpr (rows > 1)
            with_rows<rows / 2>(held, body);
    }

    // The sums of all rows that the lanes have room for: those beyond A's are not read.
    template <int held>
    static void sums_of_rows(const Vector* of_columns, int columns, Sum* to) {
        static_assert(Row::tile_m % height == 0, "a tile of rows has its place among the sums");
        for (int column = 0; column < columns; ++column) {
            Sum lane[lanes];
            store(lane, sum_of_spans<lanes / held>(of_columns[column]));
#pragma GCC unroll 16
            for (int row = 0; row < held; ++row) to[row * Scratch::row_s + column] = lane[row * (lanes / held)];
        }
    }

    // Rows of B are contiguous: a few at a time in strips of columns, of which some are copied.
    using Reader = RowReader<Unit, T>;
    static_assert(Row::b_along || (tile_n % strip == 0 && vectors % Reader::vectors == 0 && tile_m % lanes == 0),
                  "tiles are whole vectors");

    void pack_across(Factor<Row::a_along, T> from, int rows) {
        pack_depth<Unit, tile_m, tile_m>(from, rows, args.k, packed_a);
        std::fill_n(start, tile_m, Sum{});
        if constexpr (offset_of<Unit> != 0)
            for (int row = 0; row < tile_m; row += lanes) {
                Vector of_offset = {};
                for (std::int64_t k = 0; k < units; ++k)
                    Units<Unit>::multiply_add(of_offset, load(packed_a + k * tile_m + row), Bits{} + offset_of<Unit>);
                store(start + row, Vector{} - of_offset);
            }
    }

    void multiply_across(Scratch& scratch, std::int64_t first_row, std::int64_t first_column, int rows,
                         int columns) const {
        for (int i = 0; i < round_up(rows, few_in_block); ++i)
            std::fill_n(scratch.sums + i * Scratch::row_s, round_up(columns, strip), start[i]);
        const auto b = factor_of<false, T>(args.b, batch).from(first_column, 0);
        constexpr std::int64_t size = sizeof(T);
        for (std::int64_t k = multiply_narrow(scratch, b, rows); k < args.k; k += Row::tile_k) {
            const int depth = static_cast<int>(std::min<std::int64_t>(Row::tile_k, args.k - k));
            const std::int64_t next = k + Row::tile_k + depth <= args.k ? Row::tile_k : 0;
            for (int first = 0; first < columns; first += most_ahead<T>) {
                const bool is_last = columns - first <= most_ahead<T>;
                const auto piece = is_last ? b.from(0, k + next) : b.from(first + most_ahead<T>, k);
                ReadAhead ahead(next * b.stride * size, piece.data, b.stride * size, columns * size);
                multiply_strips(scratch, b, first_row, first_column, k, rows, first,
                                is_last ? columns : first + most_ahead<T>, depth, ahead);
            }
        }
    }

    static constexpr int few_in_block = std::max(Row::warp_tile_m / 2, 1);
    static_assert(Row::b_along || tile_m % few_in_block == 0, "there are sums of whole blocks of rows");

    // Rows of a B of few columns, all read up to the same column beyond its end.
    struct NarrowRows {
        const T* data;
        std::int64_t stride;

        NarrowRows operator[](int unit) const { return {data + unit * factors * stride, stride}; }

        template <int vectors>
        friend void load_row(NarrowRows rows, typename Units<Unit>::Vector (&to)[vectors]) {
            static_assert(vectors == Reader::vectors);
            Reader::load(rows.data, rows.stride, to);
        }
    };

    // The product with a B whose rows are so short that they follow each other closely. Sums stay in registers for many
    // steps, which would take longer to begin than to compute. A row takes as long as a few, of which those beyond A's are
    // zeros. Returns the depth up to which it multiplied. Elements of 8 bits are not worth the time to compile it. Not
    // inlined: the other loops stay as fast as without it.
    __attribute__((noinline)) std::int64_t multiply_narrow(Scratch& scratch, Factor<false, T> b, int rows) const {
        constexpr int width = Reader::vectors * lanes, size = Row::warp_tile_m;
        constexpr std::int64_t many = 32 * Row::tile_k;
        std::int64_t k = 0;
        if constexpr (!in_blocks && sizeof(T) > 1) {
            if (b.stride > width || (copies_shared && rows > size)) return 0;
            for (; k + many <= args.k && can_read_beyond(width, k + many, b.stride); k += many)
                for_blocks<size, few_in_block>(0, round_up(rows, few_in_block), [&](auto block, int i) {
                    multiply_block<block, width, 1, tile_m>(packed_a + k / factors * tile_m + i,
                                                            NarrowRows{b.from(0, k).data, b.stride}, many / factors,
                                                            add_to<Scratch::row_s>(scratch.sums + i * Scratch::row_s));
                });
        }
        return k;
    }

    // The product to some depth with the columns of B from `first` to `end`.
    void multiply_strips(Scratch& scratch, Factor<false, T> b, std::int64_t first_row, std::int64_t first_column,
                         std::int64_t k, int rows, int first, int end, int depth, ReadAhead& ahead) const {
        const int of_step = (depth + factors - 1) / factors;
        const bool has_depth = depth == Row::tile_k;
        const Unit* const first_a = packed_a + k / factors * tile_m;
        for (int j = first; j < end;) {
            const auto from = b.from(j, k);
            const auto adding = [&](auto block, int i, auto multiply) {
                Sum* const sums = scratch.sums + i * Scratch::row_s + j;
                if constexpr (in_blocks) {
                    const BlockScales scales(args, batch);
                    float factor[block];
                    for (int r = 0; r < block; ++r) factor[r] = scales.of(first_row + i + r, first_column + j, k);
                    multiply(add_scaled_to<Scratch::row_s>(sums, factor));
                } else {
                    multiply(add_to<Scratch::row_s>(sums));
                }
            };
            // The first rows ask for what is read later.
            const auto multiply = [&](auto block, auto width, int i) {
                adding(block, i, [&](auto add) {
                    const auto with = [&](auto& asker) {
                        multiply_strip<block, width>(first_a + i, from.data, from.stride, asker, add);
                    };
                    if (i == 0)
                        ahead.visit(with);
                    else
                        with(nothing_ahead);
                });
            };
            if constexpr (few_rows > 0) {
                if (has_depth && rows <= few_rows && wide_strip(rows) <= end - j) {
                    for_blocks<few_rows, (few_rows + 1) / 2, 1>(0, rows, [&](auto block, int i) {
                        multiply(block, std::integral_constant<int, wide_strip(block)>{}, i);
                    });
                    j += wide_strip(rows);
                    continue;
                }
            }
            const bool copied = !has_depth || (copies_shared && rows > Row::warp_tile_m) ||
                                (j + strip > end && !can_read_beyond(first_column + j + strip, k + depth, b.stride));
            if (copied) {
                pack_depth<Unit, strip, strip>(from, std::min(strip, end - j), depth, scratch.b);
                if constexpr (offset_of<Unit> != 0)
                    for (int i = 0; i < of_step * strip; ++i) scratch.b[i].bits ^= offset_of<Unit>;
            }
            constexpr int size = Row::warp_tile_m;
            for_blocks<size, size / 2, (size + 2) / 4, 1>(0, rows, [&](auto block, int i) {
                if (copied)
                    adding(block, i, [&](auto add) {
                        multiply_block<block, strip, 1, tile_m>(first_a + i, Rows<const Unit>{scratch.b, strip}, of_step,
                                                                add);
                    });
                else
                    multiply(block, std::integral_constant<int, strip>{}, i);
            });
            j += strip;
        }
    }

    // Whether the first `depth` rows of B are followed by so much of it that each can be read up to a column beyond its
    // end: a strip that is narrower than it should be is then multiplied as others are, and what is beyond does not count.
    bool can_read_beyond(std::int64_t column, std::int64_t depth, std::int64_t stride) const {
        return (args.k - depth) * stride >= column - args.n;
    }

    // A few rows are multiplied by more columns at a time: an addition takes longer than it takes to begin the next one, so
    // there have to be several sums. Measured with AVX2 and AVX-512.
#if defined(__AVX512F__)
    static constexpr int few_rows = Row::warp_tile_m / 2;
    static constexpr int wide_strip(int) { return 2 * strip; }
#else
    static constexpr int few_rows = rows_share_vectors ? 0 : 2;
    static constexpr int wide_strip(int rows) { return vector_registers / 2 * lanes / rows; }
#endif

    // A strip for several blocks of rows is copied: it is converted once, and its rows do not displace each other from the
    // cache, as those a power of two apart would. Measured with AVX2.
    static constexpr bool copies_shared = !rows_share_vectors;

    template <int rows, int width, class Ahead, class Add>
    static void multiply_strip(const Unit* a, const T* b, std::int64_t stride, Ahead& ahead, Add add) {
        constexpr int vectors = std::max(width / lanes, 1);
        typename Units<Unit>::Sum sum[rows][vectors] = {};
        constexpr int line = 64 / sizeof(T), of_row = (width + line - 1) / line;
        Ahead asked = ahead;  // in registers
#pragma GCC unroll 8
        for (int k = 0; k < step; ++k, b += factors * stride) {
            if (asked.is_any()) {
#pragma GCC unroll 16
                for (int i = 0; i < factors * of_row; ++i)
                    asked.template ask<64>(b + i / of_row * stride + i % of_row * line, i);
                asked.pass(factors * of_row * 64);
            }
#pragma GCC unroll 8
            for (int j = 0; j < vectors; j += Reader::vectors) {
                typename Units<Unit>::Vector of_b[Reader::vectors];
                Reader::load(b + j * lanes, stride, of_b);
#pragma GCC unroll 16
                for (int i = 0; i < rows; ++i)
#pragma GCC unroll 4
                    for (int v = 0; v < Reader::vectors; ++v)
                        Units<Unit>::multiply_add(sum[i][j + v], a[k * tile_m + i], of_b[v]);
            }
        }
        ahead = asked;
        for (int i = 0; i < rows; ++i)
            for (int j = 0; j < vectors; ++j) add(i, j * lanes, sum[i][j]);
    }

    const catalog_args& args;
    const std::int64_t batch;
    const int threads;
    const std::int64_t units;  // along the whole depth
    Unit* packed_a;
    RowsOfA<Unit> tiles_of_a[tiles_of_rows];
    float* scales_of_lanes = nullptr;
    std::int32_t* starts_of_blocks = nullptr;
    alignas(64) Sum start[tile_m];
    std::atomic<bool> out_of_memory = false;
};

}  // namespace catalog::host
