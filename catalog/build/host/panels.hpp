// Copies of a factor of a matrix product as units, in the order in which register tiles read them.
#pragma once

#include "units.hpp"

namespace catalog::host {

// A factor with rows outside of the sum and a depth along it: A, or B transposed. `along`: the depth is the contiguous
// axis; otherwise the rows are. `stride` is that of the other axis.
template <bool along, class T>
struct Factor {
    const T* data;
    std::int64_t stride;

    Factor from(std::int64_t row, std::int64_t k) const {
        return {along ? data + row * stride + k : data + k * stride + row, stride};
    }

    // A vector of units along the depth (of the first row) or along the rows (at the first k). Where `rows` or `depth`
    // end before, zeros follow.
    template <class Unit>
    auto load(std::int64_t rows, std::int64_t depth) const {
        if constexpr (along)
            return load_along<Unit>(data, rows > 0 ? depth : 0);
        else
            return load_across<Unit>(data, stride, depth, depth > 0 ? rows : 0);
    }
};

// A square of as many rows as units, with the contiguous axis of the factor and that of the copy exchanged.
template <class Unit, bool along, class T>
inline void load_transposed(Factor<along, T> from, std::int64_t rows, std::int64_t depth, Float (&block)[lanes]) {
    constexpr int factors = Units<Unit>::depth;
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i)
        block[i] = along ? (Float)from.from(rows > i ? i : 0, 0).template load<Unit>(rows - i, depth)
                         : (Float)from.from(0, depth > i * factors ? i * factors : 0)
                               .template load<Unit>(rows, depth - i * factors);
    transpose(block);
}

template <class Unit>
inline void store_units(Unit* to, Float units) {
    store(to, (typename Units<Unit>::Vector)units);
}

// Rows after each other, `to_stride` apart: to[row * to_stride + k]. The last vector of a row is written whole.
template <class Unit, bool along, class T>
inline void pack_rows(Factor<along, T> from, int rows, std::int64_t depth, Unit* to, std::int64_t to_stride) {
    constexpr int step = lanes * Units<Unit>::depth;
    for (int row = 0; row < rows; row += along ? 1 : lanes)
        for (std::int64_t k = 0; k < depth; k += step) {
            Unit* const first = to + row * to_stride + k / Units<Unit>::depth;
            const auto source = from.from(row, k);
            if constexpr (along) {
                store(first, source.template load<Unit>(rows - row, depth - k));
            } else {
                Float block[lanes];
                load_transposed<Unit>(source, rows - row, depth - k, block);
                for (int i = 0; i < lanes && row + i < rows; ++i) store_units(first + i * to_stride, block[i]);
            }
        }
}

// The units of all `width` rows at one k after each other: to[k * to_stride + row]. Rows after the last become zeros.
template <class Unit, int width, int to_stride, bool along, class T>
inline void pack_depth(Factor<along, T> from, int rows, std::int64_t depth, Unit* to) {
    constexpr int factors = Units<Unit>::depth;
    static_assert(width % lanes == 0);
    for (std::int64_t k = 0; k < depth; k += along ? lanes * factors : factors)
        for (int row = 0; row < width; row += lanes) {
            Unit* const first = to + k / factors * to_stride + row;
            const auto source = from.from(row < rows ? row : 0, k);
            if constexpr (along) {
                Float block[lanes];
                load_transposed<Unit>(source, rows - row, depth - k, block);
                for (int i = 0; i < lanes && k + i * factors < depth; ++i)
                    store_units(first + i * to_stride, block[i]);
            } else {
                store(first, source.template load<Unit>(rows - row, depth - k));
            }
        }
}

}  // namespace catalog::host
