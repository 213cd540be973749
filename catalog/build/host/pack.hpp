// Copies of tensor tiles as units, in the order in which register blocks read them.
#pragma once

#include "halves.hpp"

namespace catalog::host {

// Rows of T, each contiguous.
template <class T>
struct Rows {
    T* data;
    std::int64_t stride;

    T* operator[](std::int64_t row) const { return data + row * stride; }
    Rows from(std::int64_t row) const { return {data + row * stride, stride}; }
};

// Rows at arbitrary addresses: a pointer to each.
template <class T>
struct RowTable {
    T* const* rows;

    T* operator[](std::int64_t row) const { return rows[row]; }
    RowTable from(std::int64_t row) const { return {rows + row}; }
};

template <class T>
inline void pack_scaled(const T* row, int width, float scale, float* packed) {
    for (int d = 0; d < width; d += lanes) store(packed + d, load_first(row + d, width - d) * scale);
}

// Transposed panels: packed[panel][unit along the depth][row within the panel]. Rows after the last one become zeros, and
// factors after the last one of a unit.
template <int panel_rows, int panel_depth, class Source, class Unit>
inline void pack_transposed(Source rows, int count, int width, Unit* packed) {
    using Read = ReadUnit<Unit>;
    constexpr int factors = Units<Unit>::depth, step = lanes * Units<Read>::depth;
    for (int row = 0; row < round_up(count, panel_rows); row += lanes) {
        Unit* panel = packed + row / panel_rows * panel_rows * panel_depth + row % panel_rows;
        for (int d = 0; d < width; d += step) {
            Float block[lanes];
            if (row + lanes <= count && d + step <= width) {
#pragma GCC unroll 16
                for (int i = 0; i < lanes; ++i) block[i] = (Float)load_along<Read>(rows[row + i] + d, step);
            } else {
                for (int i = 0; i < lanes; ++i)
                    block[i] = row + i < count ? (Float)load_along<Read>(rows[row + i] + d, width - d) : Float{};
            }
            transpose(block);
#pragma GCC unroll 16
            for (int i = 0; i < lanes; ++i)
                store_read(panel + (d / factors + i) * panel_rows, (typename Units<Read>::Vector)block[i],
                           lanes * panel_rows);
        }
    }
}

// Panels of columns: packed[panel][row][column within the panel].
template <int panel_columns, int panel_rows, class Source>
inline void pack_columns(Source rows, int count, int width, float* packed) {
    for (int row = 0; row < count; ++row)
        for (int d = 0; d < round_up(width, panel_columns); d += lanes) {
            float* panel = packed + d / panel_columns * panel_columns * panel_rows + d % panel_columns;
            store(panel + row * panel_columns, load_first(rows[row] + d, width - d));
        }
}

// Panels of columns of pairs: packed[panel][unit along the rows][column within the panel]. Rows after the last one become
// zeros, up to a multiple of `whole` rows.
template <int panel_columns, int panel_rows, int whole, class Source, class Pair>
inline void pack_columns_of_pairs(Source rows, int count, int width, Pair* packed) {
    using Read = ReadUnit<Pair>;
    constexpr int factors = Units<Pair>::depth;
    static_assert(Units<Read>::depth == 2 && whole % (factors == 2 ? 2 : pairs_deep) == 0);
    for (int row = 0; row < round_up(count, whole); row += 2)
        for (int d = 0; d < round_up(width, panel_columns); d += lanes) {
            Pair* panel = packed + d / panel_columns * panel_columns * (panel_rows / factors) + d % panel_columns;
            const auto half = [&](int at) {
                return at < count ? load_across<Read>(rows[at] + d, 0, 1, width - d) : Bits{};
            };
            const int unit = factors == 2 ? row / 2 : row / pairs_deep * pairs_deep + row % pairs_deep / 2;
            store_read(panel + unit * panel_columns, half(row) | half(row + 1) << 16, lanes * panel_columns);
        }
}

}  // namespace catalog::host
