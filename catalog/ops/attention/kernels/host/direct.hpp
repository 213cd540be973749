// One K/V tile and its two products with a few query rows, straight from the tensors: copying would cost more than it saves.
// Products of float32, or of pairs of bf16 in vectors.
#pragma once

#include "host/gemm.hpp"
#include "pipeline.hpp"
#include "scratch.hpp"

namespace catalog::host {

// Pairs of the same columns of two neighbouring rows, a vector of them at a time.
struct PairedRows {
    const bf16 *even, *odd;
    int column;

    PairedRows operator+(int columns) const { return {even, odd, column + columns}; }

#if defined(CATALOG_BRAIN_PAIRS)
    friend Bits load(PairedRows rows) {
        const int at = rows.column / pairs_deep * pairs_deep;  // a whole vector of each row has two of pairs
        const Words even = load_words(rows.even + at), odd = load_words(rows.odd + at);
        return rows.column % pairs_deep ? interleave<true>(even, odd) : interleave<false>(even, odd);
    }
#endif
};

// The rows' weights are floats in scratch.s, or pairs in scratch.p.
template <class Row, class Unit = float>
struct DirectTile {
    using Memory = Scratch<Row>;
    using Element = typename Row::dtype;

    static constexpr bool pairs = std::is_same_v<Unit, BrainPair>;
    static constexpr int factors = Units<Unit>::depth;
    static constexpr int block_rows = std::max(lanes / 4, 1);  // so that accumulators fit each target's registers
    // Keys whose values stay in L1 while all rows and columns use them.
    static constexpr int stretch = Row::hdim_v * sizeof(Element) > 512 ? 16 : 32;
    static constexpr int row_q = pairs ? Memory::row_q : Memory::row_few;
    static constexpr int row_w = pairs ? Memory::row_p : Memory::row_s;

    // With few rows a copy never pays off; the limit is measured. Tensors are read in whole vectors and blocks, so the
    // head dims must be multiples of them.
    static bool pays(std::int64_t rows, int hdim_q, int hdim_v) {
        return rows <= lanes && hdim_q % (lanes * factors) == 0 && hdim_v % std::max(Row::warp_n1, lanes * factors) == 0;
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
            std::memcpy(queries(scratch)[row], q, hdim_q * sizeof(Element));
        else
            pack_scaled(q, hdim_q, scratch.row[row].scale, queries(scratch)[row]);
    }

    DirectTile(Memory& scratch, const KvTile<Row>& tile, const KvTile<Row>& next, int hdim_q, int hdim_v)
        : scratch(scratch), tile(tile), next(next), hdim_q(hdim_q), hdim_v(hdim_v) {}

    // Keeps memory busy: prefetches values while keys are multiplied, and the next tile's keys while values are.
    void multiply_q_k(std::int64_t first_row, int rows) const {
        const Columns* seen = scratch.seen;
        // Per step, so that all blocks of rows prefetch alike.
        const int asked = (lanes * lanes * factors + rows - 1) / rows;
        for (int group = seen[0].begin / lanes * lanes; group < seen[rows - 1].end; group += lanes) {
            Lines values(tile.values, group, std::min(group + lanes, tile.count), hdim_v);
            for_blocks<block_rows, 1>(0, rows, [&](auto block, int row) {
                for (int key = group; key < group + lanes; key += lanes / block)
                    multiply_rows<block, row_q, Memory::row_s>(queries(scratch)[first_row + row], tile.keys, values, asked,
                                                               key, tile.count - 1, hdim_q, scratch.s[row] + key);
            });
        }
    }

    void multiply_p_v(std::int64_t first_row, int rows) const {
        const Columns* seen = scratch.seen;
        for (int row = 0; row < rows; ++row) {
            float* o = scratch.o[first_row + row];
            for (int d = 0; d < hdim_v; d += lanes) store(o + d, load(o + d) * scratch.rescale[row]);
        }
        const int asked = (Row::warp_n1 * Row::hdim_q / Row::hdim_v + rows - 1) / rows * factors;
        for (int key = seen[0].begin / stretch * stretch; key < seen[rows - 1].end; key += stretch) {
            Lines next_keys(next.keys, key, std::min(key + stretch, next.count), hdim_q);
            for (int column = 0; column < hdim_v; column += Row::warp_n1)
                for_blocks<block_rows, 1>(0, rows, [&](auto block, int row) {
                    const int begin = std::max(key, seen[row].begin) / factors;
                    const int end = (std::min(key + stretch, seen[row + block - 1].end) + factors - 1) / factors;
                    add_products<block>(weights(scratch)[row] + begin,
                                        FromColumn{tile.values, next_keys, block * asked, begin, column, tile.count},
                                        end - begin, scratch.o[first_row + row] + column);
                });
        }
    }

   private:
    // Values from a unit of keys and a column on; each step also prefetches a share of the next tile's keys.
    struct FromColumn {
        const KvRows<Row>& values;
        Lines<KvRows<Row>>& next_keys;
        const int asked, first, column, count;

        auto operator[](int unit) const {
            next_keys.ask(asked);
            const int key = (first + unit) * factors;
            if constexpr (pairs)
                // After the last key, any values do that are numbers where the last ones are: their weights are zero.
                return PairedRows{values[key] + column, values[std::min(key + 1, count - 1)] + column, 0};
            else
                return values[key] + column;
        }
    };

    // A function of its own: in a large function, g++ keeps sums of assembly in memory.
    template <int block>
    __attribute__((noinline)) static void add_products(const Unit* weights, FromColumn values, int depth, float* o) {
        multiply_block<block, Row::warp_n1, row_w, 1>(weights, values, depth, add_to<Memory::row_o>(o));
    }
};

}  // namespace catalog::host
