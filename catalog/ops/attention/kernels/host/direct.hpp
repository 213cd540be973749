// One K/V tile and its two products with a few query rows, straight from the tensors: packing would cost more than it
// saves. Products of float32, or of pairs of bf16 in vectors.
#pragma once

#include "copies.hpp"
#include "host/gemm.hpp"
#include "host/shared_rows.hpp"
#include "pipeline.hpp"
#include "scratch.hpp"

namespace catalog::host {

// Pairs of the same columns of two neighbouring rows.
template <class Element>
struct PairedRows {
    const Element *even, *odd;

#if defined(CATALOG_BRAIN_PAIRS)
    template <int vectors>
    friend void load_row(PairedRows rows, Bits (&to)[vectors]) {
        using Reader = RowReader<BrainPair, Element>;
        static_assert(vectors % Reader::vectors == 0);
#pragma GCC unroll 16
        for (int j = 0; j < vectors; j += Reader::vectors) {
            Bits read[Reader::vectors];
            Reader::load(rows.even + j * lanes, rows.odd - rows.even, read);
#pragma GCC unroll 4
            for (int i = 0; i < Reader::vectors; ++i) to[j + i] = read[i];
        }
    }
#endif
};

// What stands for the row after the last one: its weights are zero, but their product with an infinite value would be NaN.
template <class Element, int columns>
alignas(64) inline constexpr Element zero_row[columns] = {};

// Rows of a tile that are prefetched, up to its end.
template <class Row>
struct TileAhead {
    using Lines = RowsAhead<Row::hdim_v, KvRows<Row>>;

    // Rows between those that are read, `step` at a time, and those that are prefetched: as many bytes as memory delivers
    // meanwhile.
    static constexpr int row_bytes = Row::hdim_q * static_cast<int>(sizeof(typename Row::dtype));
    template <int step>
    static constexpr int distance = std::max(round_up(8192 / row_bytes, step), step);

    // Rows that memory delivers while two query rows are weighed.
    static constexpr int beside_weights = Row::tile_n0 / 64;

    static Lines keys(const KvTile<Row>& of, int first, int count) {
        return {of.keys, first, std::min(first + count, of.count)};
    }
    static Lines values(const KvTile<Row>& of, int first, int count) {
        return {of.values, first, std::min(first + count, of.count)};
    }
};

// The rows' weights are floats in scratch.s, or pairs in scratch.p. `Read` reads keys and values as floats. If more
// than one block of query rows shares them, those of 8 bits are converted once, in copies, where that costs less.
template <class Row, class Unit = float, class Read = FloatReader<typename Row::dtype>>
struct DirectTile {
    using Memory = Scratch<Row>;
    using Element = typename Row::dtype;
    using Ahead = TileAhead<Row>;

    static constexpr bool pairs = std::is_same_v<Unit, BrainPair>;
    static constexpr bool copies = has_bytes<Row> && (pairs || std::is_same_v<Read, FloatReader<Element>>);
    static constexpr int factors = Units<Unit>::depth;
    static constexpr bool few_registers = !pairs && vector_registers == 16;
    // So that accumulators fit each target's registers.
    static constexpr int block_rows = pairs || few_registers ? lanes / 2 : std::max(lanes / 4, 1);
    // Keys whose values stay in L1 while all rows and columns use them. With few registers, blocks of sums are small and
    // many, so that more keys for each pay off. Copies are wider than the values.
    static constexpr int row_bytes = Row::hdim_v * static_cast<int>(sizeof(Element));
    static constexpr int stretch = row_bytes > 512 ? 16 : row_bytes <= 256 && few_registers && !copies ? 64 : 32;
    static constexpr int distance = Ahead::template distance<stretch>;
    static_assert(stretch % lanes == 0);

    using Reader = std::conditional_t<pairs, DepthReader<Unit, Element>, Read>;
    static constexpr int whole = lanes * factors * Reader::vectors;

    // With few rows packing never pays off; the limit is measured. Tensors are read in whole vectors and blocks, so the
    // head dims must be multiples of them.
    static bool pays(std::int64_t rows, int hdim_q, int hdim_v) {
        return rows <= lanes && hdim_q % whole == 0 && hdim_v % whole == 0 && hdim_v % Row::warp_n1 == 0;
    }

    Memory& scratch;
    const KvTile<Row> tile, next;
    const int hdim_q, hdim_v;

    static auto& queries(Memory& scratch) {
        if constexpr (multiplies_pairs<Row> && !pairs)
            return scratch.few_q;
        else
            return scratch.q;
    }

    static auto& weights(Memory& scratch) {
        if constexpr (pairs)
            return scratch.p;
        else
            return scratch.s;
    }

    static void pack_query(Memory& scratch, std::int64_t row, const QueryElement<Row>* q, int hdim_q) {
        if constexpr (pairs)
            std::memcpy(queries(scratch)[row], q, hdim_q * sizeof *q);
        else
            pack_scaled(q, hdim_q, scratch.row[row].scale, queries(scratch)[row]);
    }

    DirectTile(Memory& scratch, const KvTile<Row>& tile, const KvTile<Row>& next, int hdim_q, int hdim_v)
        : scratch(scratch), tile(tile), next(next), hdim_q(hdim_q), hdim_v(hdim_v) {}

    // While keys are multiplied, prefetches those that follow, and then values.
    void multiply_q_k(std::int64_t first_row, int rows) const {
        if constexpr (pairs) share_queries(first_row, rows);
        const int begin = scratch.seen[0].begin / stretch * stretch;
        const int end = round_up(scratch.seen[rows - 1].end, lanes);
        for (int group = begin; group < end; group += lanes) {
            const int at = group + distance;
            const auto ahead = at < end ? Ahead::keys(tile, at, lanes) : Ahead::values(tile, begin + at - end, lanes);
            with_rows(tile.keys, group, std::min(group + lanes, tile.count), hdim_q, rows, ahead,
                      [&](const auto& keys, int first, int last, auto& next_rows) {
                          for_blocks_of(keys, rows, [&](auto block, int row) {
                              multiply_keys<block>(first_row, row, group, keys, first, last, next_rows);
                          });
                      });
        }
    }

    // The same with values, and then the next tile's keys.
    void multiply_p_v(std::int64_t first_row, int rows) const {
        scratch.rescale_sums(first_row, rows, hdim_v);
        const int begin = scratch.seen[0].begin / stretch * stretch;
        const int end = round_up(scratch.seen[rows - 1].end, stretch);
        for (int key = begin; key < end; key += stretch) {
            const int at = key + distance;
            const auto ahead = at < end ? Ahead::values(tile, at, stretch) : Ahead::keys(next, at - end, stretch);
            with_rows(tile.values, key, std::min(key + stretch, tile.count), hdim_v, rows, ahead,
                      [&](const auto& values, int first, int last, auto& next_rows) {
                          multiply_values(first_row, rows, key, values, first, last, next_rows);
                      });
        }
    }

   private:
    // Calls body(rows, first, last, ahead) with the rows of `source` from `first` on and before `end`, or with a copy
    // of them, and with what is prefetched while they are read.
    template <class Body>
    void with_rows(const KvRows<Row>& source, int first, int end, int width, int rows, typename Ahead::Lines ahead,
                   Body body) const {
        if constexpr (copies) {
            if (rows > (pairs ? 1 : block_rows) || (few_registers && rows == 3)) {  // more than one block
                NothingAhead nothing;
                const auto copy = copied<Reader>(source, first, end, width, scratch, ahead);
                return body(copy, 0, end - first - 1, nothing);
            }
        }
        body(source, first, end - 1, ahead);
    }

    // Calls body(std::integral_constant<int, size>, first) for blocks of query rows, multiplied by rows of `source`.
    template <class Source, class Body>
    static void for_blocks_of(const Source&, int rows, Body body) {
        if constexpr (pairs && has_bytes<Row> && std::is_same_v<Source, KvRows<Row>>)
            body(std::integral_constant<int, 1>{}, 0);
        else if constexpr (pairs)
            for_blocks<block_rows, 4, 2, 1>(0, rows, body);
        else
            for_blocks<block_rows, few_registers ? 2 : 1, 1>(0, rows, body);
    }

    void share_queries(std::int64_t first_row, int rows) const {
        const int depth = hdim_q / factors;
        for_blocks<block_rows, 4, 2, 1>(0, rows, [&](auto block, int row) {
            for (int r = 0; r < block; ++r)
                share_vectors<block>(scratch.q[first_row + row + r], r, depth, scratch.shared_q + row * depth);
        });
    }

    // Scores of a vector of keys from key `group` on, which are the rows of `keys` from `first` to `last`.
    template <int block, class Source, class NextRows>
    void multiply_keys(std::int64_t first_row, int row, int group, const Source& keys, int first, int last,
                       NextRows& next_rows) const {
        float* const s = scratch.s[row] + group;
        if constexpr (pairs) {
            const Unit* const q = scratch.shared_q + row * (hdim_q / factors);
            multiply_shared<block, Memory::row_s>(q, keys, first, last, hdim_q, next_rows, s);
        } else {
            const float* const q = queries(scratch)[first_row + row];
            constexpr int keys_at_once = lanes / block;
            constexpr int step = keys_at_once * Reader::vectors * lanes * static_cast<int>(sizeof(Element));
            const auto multiply = [&](int key, auto& ahead) {
                multiply_rows<ReaderOf<Source>, block, Memory::row_few, Memory::row_s>(q, keys, first + key, last,
                                                                                       hdim_q, ahead, s + key);
            };
            for (int key = 0; key < lanes; key += keys_at_once) {
                if constexpr (block == 1 || step % 64 == 0) {
                    multiply(key, next_rows);
                } else {
                    // Only some of the steps read a new line. To branch in each costs more than a few lines at once.
                    NothingAhead nothing;
                    next_rows.ask_lines(keys_at_once * hdim_q * static_cast<int>(sizeof(Element)) / 64);
                    multiply(key, nothing);
                }
            }
        }
    }

    // What reads rows of a source as floats: the tensor's, or copies.
    template <class Source>
    using ReaderOf = std::conditional_t<std::is_same_v<Source, KvRows<Row>>, Read, FloatReader<float>>;

    // The columns of a block of P V, as many as fit the registers.
    template <int rows>
    static constexpr int columns_of = pairs ? std::min(Row::warp_n1, lanes / rows * lanes)
                                      : few_registers && rows * Row::warp_n1 > 12 * lanes
                                          ? Row::warp_n1 / 2
                                          : std::max(Row::warp_n1, whole);

    // The products of the weights of a stretch, from those of `key` on, with the values of their keys: the rows of
    // `values` from `first` to `last`.
    template <class Source, class NextRows>
    void multiply_values(std::int64_t first_row, int rows, int key, const Source& values, int first, int last,
                         NextRows& next_rows) const {
        const Columns* seen = scratch.seen;
        for_blocks_of(values, rows, [&](auto block, int row) {
            constexpr int width = columns_of<block>;
            const int begin = std::max(key, seen[row].begin) / factors;
            const int end = (std::min(key + stretch, seen[row + block - 1].end) + factors - 1) / factors;
            const int row_of_first = first + begin * factors - key;
            for (int column = 0; column < hdim_v; column += width)
                add_products<block, width>(
                    weights(scratch)[row] + begin,
                    FromColumn<Source, NextRows, width>{values, next_rows, row_of_first, column, last}, end - begin,
                    scratch.o[first_row + row] + column);
        });
    }

    // Values from a row and a column on.
    template <class Source, class NextRows, int columns>
    struct FromColumn {
        const Source values;  // no reference, which would be read again after each write to memory
        NextRows& next_rows;
        const int first, column, last;

        auto operator[](int unit) const {
            ask_alike<factors * columns * static_cast<int>(sizeof(Element))>(next_rows, unit);
            const int row = first + unit * factors;
            using Value = std::remove_const_t<std::remove_pointer_t<decltype(values[0])>>;
            if constexpr (pairs)
                return PairedRows<Value>{values[row] + column, row < last ? values[row + 1] + column
                                                                          : zero_row<Value, columns>};
            else
                return ReadRow<ReaderOf<Source>, Value>{values[row] + column};
        }
    };

    // A function of its own: in a large function, g++ keeps sums of assembly in memory.
    template <int block, int width, class Source, class NextRows>
    __attribute__((noinline)) static void add_products(const Unit* weights, FromColumn<Source, NextRows, width> values,
                                                       int depth, float* o) {
        constexpr int row_w = pairs ? Memory::row_p : Memory::row_s;
        constexpr float factor = pairs ? 1 : ReaderOf<Source>::factor;
        multiply_block<block, width, row_w, 1>(weights, values, depth, [o](int row, int column, Float sum) {
            float* const to = o + row * Memory::row_o + column;
            store(to, load(to) + sum * factor);
        });
    }
};

}  // namespace catalog::host
