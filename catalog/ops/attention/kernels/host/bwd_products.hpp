// The five products of the backward pass for a tile of query rows and one of keys, in two forms: of float32, and of pairs
// of bf16 in vectors or in AMX tiles.
//
// P and dS are made a strip of query rows at a time. Pairs round both to bf16.
#pragma once

#include "bwd_scratch.hpp"
#include "host/gemm.hpp"
#include "host/panels.hpp"
#include "host/tiles.hpp"

namespace catalog::host {

template <class Row>
struct FloatProducts {
    using T = typename Row::dtype;
    using Memory = BackwardScratch<Row>;
    static constexpr bool scales_queries = true;  // Q is multiplied by what a score is

    Memory& scratch;
    const int hdim_q, hdim_v;

    template <class Source>
    void load_keys(Source k, Source v, int count) const {
        pack_transposed<Row::warp_n0, Memory::depth_q>(k, count, hdim_q, scratch.k_transposed);
        pack_transposed<Row::warp_n0, Memory::depth_v>(v, count, hdim_v, scratch.v_transposed);
        pack_columns<Row::warp_n0, Row::tile_n0>(k, count, hdim_q, scratch.k);
    }

    void clear_gradients(int count) const {
        std::fill_n(scratch.dk[0], count * Memory::columns_q, 0.0f);
        std::fill_n(scratch.dv[0], count * Memory::columns_v, 0.0f);
    }

    void load_row(int row, const T* q, const T* grad_o, float scale) const {
        pack_row(q, hdim_q, scale, Memory::columns_q, scratch.q[row]);
        pack_row(grad_o, hdim_v, 1.0f, Memory::columns_v, scratch.grad_o[row]);
    }

    void finish_rows(int /*count*/) const {}

    // S and dP of a strip of rows, for keys from `first_key` on.
    void multiply_scores(int row, int rows, int first_key, int keys) const {
        multiply_panels<Row::warp_m0, Row::warp_n0, Memory::row_q, 1>(
            scratch.q[row], scratch.k_transposed + first_key * Memory::depth_q, Memory::depth_q, Row::warp_n0, rows, keys,
            hdim_q, store_to<Memory::row_p>(scratch.p[0]));
        multiply_panels<Row::warp_m0, Row::warp_n0, Memory::row_v, 1>(
            scratch.grad_o[row], scratch.v_transposed + first_key * Memory::depth_v, Memory::depth_v, Row::warp_n0, rows,
            keys, hdim_v, store_to<Memory::row_p>(scratch.ds[0]));
    }

    void keep_weights(int /*row*/, int /*rows*/, int /*columns*/) const {}

    // dV += P^T dO and dK += dS^T Q.
    void add_to_keys(int count, int first_key, int keys) const {
        // Weights of columns after the last key are zeros, because whole register blocks are faster.
        const int whole = std::min(round_up(keys, Row::warp_m1), round_up(keys, Row::warp_n0));
        multiply_panels<Row::warp_m1, Row::warp_n1, 1, Memory::row_p>(
            scratch.p[0], scratch.grad_o[0], 1, Memory::row_v, whole, hdim_v, count,
            add_to<Memory::columns_v>(scratch.dv[first_key]));
        multiply_panels<Row::warp_m1, Row::warp_n1, 1, Memory::row_p>(
            scratch.ds[0], scratch.q[0], 1, Memory::row_q, whole, hdim_q, count,
            add_to<Memory::columns_q>(scratch.dk[first_key]));
    }

    // dS K: add(row, column, sum) for each vector of sums.
    template <class Add>
    void add_to_dq(int count, int first_key, int keys, Add add) const {
        multiply_panels<Row::warp_m0, Row::warp_n0, Memory::row_p, 1>(
            scratch.ds[0], scratch.k + first_key * Row::warp_n0, Row::tile_n0, Row::warp_n0, count, hdim_q, keys, add);
    }

    // dK, times a factor, and dV of the first `count` keys.
    void store_gradients(int count, float factor, Rows<T> dk, Rows<T> dv) const {
        for (int key = 0; key < count; ++key) {
            for (int d = 0; d < hdim_q; d += lanes)
                store_first(dk[key] + d, load(scratch.dk[key] + d) * factor, hdim_q - d);
            for (int d = 0; d < hdim_v; d += lanes) store_first(dv[key] + d, load(scratch.dv[key] + d), hdim_v - d);
        }
    }

   private:
    // Columns after the head dim become zeros, as parts of register blocks.
    static void pack_row(const T* row, int hdim, float scale, int columns, float* packed) {
        for (int d = 0; d < columns; d += lanes) store(packed + d, load_first(row + d, hdim - d) * scale);
    }
};

#if defined(CATALOG_BRAIN_PAIRS)

// Gradients of keys are kept transposed: then neighbours of a pair are neighbours along the query rows in both
// factors, and the large one, P or dS, is the one that needs no copy. dV^T += dO^T P, dK^T += Q^T dS.
template <class Row>
struct PairProducts {
    using T = typename Row::dtype;
    using Memory = BackwardScratch<Row>;
    static constexpr bool in_tiles = Memory::in_tiles, scales_queries = false;
    static constexpr int width = Row::warp_n0, step = Memory::step;
    static_assert(std::is_same_v<T, bf16>);

    Memory& scratch;
    const int hdim_q, hdim_v;

    template <class Source>
    void load_keys(Source k, Source v, int count) const {
        pack_transposed<width, Memory::depth_q>(k, count, hdim_q, scratch.k_transposed);
        pack_transposed<width, Memory::depth_v>(v, count, hdim_v, scratch.v_transposed);
        pack_columns_of_pairs<Row::warp_n1, Row::tile_n0, step>(k, count, hdim_q, scratch.k);
    }

    void clear_gradients(int /*count*/) const {
        std::fill_n(scratch.dk[0], round_up(hdim_q, tile_rows) * Memory::row_dk, 0.0f);
        std::fill_n(scratch.dv[0], round_up(hdim_v, tile_rows) * Memory::row_dk, 0.0f);
    }

    void load_row(int row, const T* q, const T* grad_o, float /*scale*/) const {
        copy_row(q, hdim_q, scratch.q[row]);
        copy_row(grad_o, hdim_v, scratch.grad_o[row]);
    }

    // Rows after the last one become zeros, as do their weights: products have a depth of whole steps.
    void finish_rows(int count) const {
        for (int row = count; row < round_up(count, step); ++row) {
            std::fill_n(scratch.q[row], Memory::row_q, BrainPair{});
            std::fill_n(scratch.grad_o[row], Memory::row_v, BrainPair{});
        }
        for (int pair = (count + 1) / 2; pair < round_up(count, step) / 2; ++pair) {
            std::fill_n(scratch.p_across[pair], Memory::row_across, BrainPair{});
            std::fill_n(scratch.ds_across[pair], Memory::row_across, BrainPair{});
        }
        pair_rows(scratch.q[0], Memory::row_q, hdim_q, count, scratch.q_pairs[0]);
        pair_rows(scratch.grad_o[0], Memory::row_v, hdim_v, count, scratch.grad_o_pairs[0]);
    }

    void multiply_scores(int row, int rows, int first_key, int keys) const {
        multiply_strip<Memory::row_q, Memory::depth_q>(scratch.q[row], rows, scratch.k_transposed, hdim_q, first_key,
                                                       keys, scratch.p[0]);
        multiply_strip<Memory::row_v, Memory::depth_v>(scratch.grad_o[row], rows, scratch.v_transposed, hdim_v,
                                                       first_key, keys, scratch.ds[0]);
    }

    // Rounds P and dS of a strip: dS along its rows for dQ, and both across pairs of rows for the gradients of keys.
    __attribute__((noinline)) void keep_weights(int row, int rows, int columns) const {
        if (rows % 2) {
            std::fill_n(scratch.p[rows], columns, 0.0f);
            std::fill_n(scratch.ds[rows], columns, 0.0f);
        }
        for (int i = 0; i < rows; i += 2) {
            BrainPair* const p_across = scratch.p_across[(row + i) / 2];
            BrainPair* const ds_across = scratch.ds_across[(row + i) / 2];
            for (int j = 0; j < columns; j += lanes) {
                store(p_across + j, brain_pairs_across(load(scratch.p[i] + j), load(scratch.p[i + 1] + j)));
                store(ds_across + j, brain_pairs_across(load(scratch.ds[i] + j), load(scratch.ds[i + 1] + j)));
            }
        }
        for (int i = 0; i < rows; ++i)
            for (int j = 0; j < columns; j += 2 * lanes)
                store(scratch.ds_along[row + i] + j / 2,
                      brain_pairs(load(scratch.ds[i] + j), load(scratch.ds[i] + j + lanes)));
    }

    void add_to_keys(int count, int first_key, int keys) const {
        add_gradient(scratch.grad_o_pairs[0], hdim_v, scratch.p_across[0], count, first_key, keys, scratch.dv[0]);
        add_gradient(scratch.q_pairs[0], hdim_q, scratch.ds_across[0], count, first_key, keys, scratch.dk[0]);
    }

    template <class Add>
    void add_to_dq(int count, int first_key, int keys, Add add) const {
        constexpr int panel = Row::warp_n1;
        const int depth = round_up(keys, step) / 2;
        for (int column = 0; column < hdim_q; column += panel) {
            const BrainPair* const k = scratch.k + column * (Row::tile_n0 / 2) + first_key / 2 * panel;
            if constexpr (in_tiles) {
                for_tiles(count, [&](auto tiles, int row) {
                    alignas(64) float sums[2 * tile_rows * panel];
                    multiply_tiles<false, tiles, panel / lanes>(scratch.ds_along[row], tiles_of_rows(Memory::row_along),
                                                                k, panel, depth, sums, panel);
                    for (int r = 0; r < std::min(tiles * tile_rows, count - row); ++r)
                        for (int j = 0; j < panel; j += lanes) add(row + r, column + j, load(sums + r * panel + j));
                });
            } else {
                for_row_blocks<Row::warp_m0>(0, count, [&](auto block, int row) {
                    multiply_vectors<block, panel, Memory::row_along, 1>(
                        scratch.ds_along[row], k, panel, depth,
                        [&](int r, int j, Float sum) { add(row + r, column + j, sum); });
                });
            }
        }
    }

    void store_gradients(int count, float factor, Rows<T> dk, Rows<T> dv) const {
        store_transposed(scratch.dk[0], hdim_q, count, factor, dk);
        store_transposed(scratch.dv[0], hdim_v, count, 1.0f, dv);
    }

   private:
    static void copy_row(const T* row, int hdim, BrainPair* copy) {
        for (int d = 0; d < hdim; d += step) store(copy + d / 2, load_along<BrainPair>(row + d, hdim - d));
    }

    // Rows of units along the head dim, as units across pairs of rows. Tiles need the units of each column after each
    // other; vectors take them as they come.
    static void pair_rows(const BrainPair* rows, int stride, int hdim, int count, BrainPair* pairs) {
        const Factor<false, T> from{reinterpret_cast<const T*>(rows), 2 * stride};
        if constexpr (in_tiles) {
            pack_rows(from, round_up(hdim, tile_rows), round_up(count, step), pairs, Memory::row_pairs);
        } else {
            for (int row = 0; row < round_up(count, step); row += 2)
                for (int d = 0; d < hdim; d += lanes)
                    store(pairs + row / 2 * Memory::row_pairs + d,
                          from.from(d, row).template load<BrainPair>(lanes, 2));
        }
    }

    // Calls body(std::integral_constant<int, tiles>, first) for blocks of two tiles of rows, then of one.
    template <class Body>
    static void for_tiles(int rows, Body body) {
        for_blocks<2, 1>(0, (rows + tile_rows - 1) / tile_rows,
                         [&](auto tiles, int tile) { body(tiles, tile * tile_rows); });
    }

    // A function of its own: in a large function, g++ keeps sums of assembly in memory.
    template <int rows, int columns, int a_row, int a_depth, class Finish>
    __attribute__((noinline)) static void multiply_vectors(const BrainPair* a, const BrainPair* b, std::ptrdiff_t ldb,
                                                           int depth, Finish finish) {
        multiply_block<rows, columns, a_row, a_depth>(a, Rows<const BrainPair>{b, ldb}, depth, finish);
    }

    // A strip of query rows times panels of keys.
    template <int a_row, int panel_depth>
    static void multiply_strip(const BrainPair* a, int rows, const BrainPair* b, int hdim, int first_key, int keys,
                               float* products) {
        const int depth = round_up(hdim, step) / 2;
        for (int key = first_key; key < first_key + keys; key += width) {
            const BrainPair* const panel = b + key * panel_depth;
            float* const to = products + key - first_key;
            if constexpr (in_tiles)
                for_tiles(rows, [&](auto tiles, int row) {
                    multiply_tiles<false, tiles, width / lanes>(a + row * a_row, tiles_of_rows(a_row), panel, width,
                                                                depth, to + row * Memory::row_p, Memory::row_p);
                });
            else
                for_row_blocks<Row::warp_m0>(0, rows, [&](auto block, int row) {
                    multiply_vectors<block, width, a_row, 1>(a + row * a_row, panel, width, depth,
                                                             store_to<Memory::row_p>(to + row * Memory::row_p));
                });
        }
    }

    static void add_gradient(const BrainPair* rows, int hdim, const BrainPair* weights, int count, int first_key,
                             int keys, float* gradient) {
        const int depth = round_up(count, step) / 2;
        for (int key = 0; key < keys; key += width) {
            float* const to = gradient + first_key + key;
            if constexpr (in_tiles)
                for_tiles(hdim, [&](auto tiles, int d) {
                    multiply_tiles<true, tiles, width / lanes>(rows + d * Memory::row_pairs,
                                                               tiles_of_rows(Memory::row_pairs), weights + key,
                                                               Memory::row_across, depth,
                                                               to + d * Memory::row_dk, Memory::row_dk);
                });
            else
                for_row_blocks<Row::warp_m1>(0, hdim, [&](auto block, int d) {
                    multiply_vectors<block, width, 1, Memory::row_pairs>(
                        rows + d, weights + key, Memory::row_across, depth,
                        add_to<Memory::row_dk>(to + d * Memory::row_dk));
                });
        }
    }

    static void store_transposed(const float* from, int hdim, int count, float factor, Rows<T> to) {
        for (int key = 0; key < count; key += lanes)
            for (int d = 0; d < hdim; d += lanes) {
                Float block[lanes];
                for (int i = 0; i < lanes; ++i)
                    block[i] = d + i < hdim ? load(from + (d + i) * Memory::row_dk + key) : Float{};
                transpose(block);
                for (int i = 0; i < std::min(lanes, count - key); ++i)
                    store_first(to[key + i] + d, block[i] * factor, hdim - d);
            }
    }
};

#endif

// The form of a row's pipeline.
template <class Row, bool = multiplies_pairs<Row>>
struct Products {
    using Form = FloatProducts<Row>;
};

#if defined(CATALOG_BRAIN_PAIRS)
template <class Row>
struct Products<Row, true> {
    using Form = PairProducts<Row>;
};
#endif

}  // namespace catalog::host
