// One K/V tile and its two products with a tile of query rows, in the two forms that pay: packed when many rows share
// it, straight from the tensors when copying it would cost more than it saves.
#pragma once

#include "gemm.hpp"
#include "scratch.hpp"

namespace catalog::host {

// O = rescale * O + P V for `rows` rows of O from `first_row` on. A panel of V is warp_n1 columns: the one of column c
// starts at v + c * panel_stride, its keys are ldb apart.
template <class Row, class T>
inline void accumulate(Scratch<Row>& scratch, std::int64_t first_row, int rows, const T* v, std::int64_t panel_stride,
                       std::ptrdiff_t ldb, int keys, int hdim_v) {
    using Memory = Scratch<Row>;
    for (int column = 0; column < hdim_v; column += Row::warp_n1)
        for_row_blocks<Row::warp_m1>(0, rows, [&](auto block, int row) {
            float* o = scratch.o[first_row + row] + column;
            const auto rescaled = [&](int r, int j) {
                return load(o + r * Memory::columns + j) * scratch.rescale[row + r];
            };
            multiply_block<block, Row::warp_n1, Row::tile_n0, 1, Memory::columns>(
                scratch.s[row], v + column * panel_stride, ldb, keys, o, rescaled);
        });
}

template <class Row>
struct PackedTile {
    using T = typename Row::dtype;
    using Memory = Scratch<Row>;

    static constexpr int column_step = Row::warp_n0;  // scores come in multiples of this many keys

    Memory& scratch;
    const int hdim_q, hdim_v;

    PackedTile(Memory& scratch, Rows<const T> keys, Rows<const T> values, int count, int hdim_q, int hdim_v)
        : scratch(scratch), hdim_q(hdim_q), hdim_v(hdim_v) {
        pack_keys<Row::warp_n0, Memory::depth>(keys, count, hdim_q, scratch.k);
        pack_values<Row::warp_n1, Row::tile_n0>(values, count, hdim_v, scratch.v);
    }

    // S = Q K^T.
    void multiply_q_k(std::int64_t first_row, int rows, int keys) const {
        multiply_panels<Row::warp_m0, Row::warp_n0, Memory::depth, 1, Row::tile_n0>(
            scratch.q[first_row], scratch.k, Memory::depth, Row::warp_n0, rows, keys, hdim_q, scratch.s[0], from_zero);
    }

    void multiply_p_v(std::int64_t first_row, int rows, int keys) const {
        accumulate<Row>(scratch, first_row, rows, scratch.v, Row::tile_n0, Row::warp_n1, keys, hdim_v);
    }
};

template <class Row>
struct DirectTile {
    using T = typename Row::dtype;

    static constexpr int column_step = lanes;

    // Few rows never earn back a copy; how few is measured, and fewer for narrow vectors. Tensors are read in whole
    // vectors and blocks, so the head dims have to be multiples of them.
    static bool pays(std::int64_t rows, int hdim_q, int hdim_v) {
        return rows <= lanes / 4 && hdim_q % lanes == 0 && hdim_v % Row::warp_n1 == 0;
    }

    Scratch<Row>& scratch;
    const Rows<const T> keys, values;
    const int hdim_q, hdim_v;

    DirectTile(Scratch<Row>& scratch, Rows<const T> keys, Rows<const T> values, int /*count*/, int hdim_q, int hdim_v)
        : scratch(scratch), keys(keys), values(values), hdim_q(hdim_q), hdim_v(hdim_v) {}

    void multiply_q_k(std::int64_t first_row, int rows, int count) const {
        for (int key = 0; key < count; key += lanes)
            for (int row = 0; row < rows; ++row)
                multiply_rows(scratch.q[first_row + row], keys.from(key), count - key - 1, hdim_q,
                              scratch.s[row] + key);
    }

    void multiply_p_v(std::int64_t first_row, int rows, int count) const {
        accumulate<Row>(scratch, first_row, rows, values.data, 1, values.stride, count, hdim_v);
    }
};

}  // namespace catalog::host
