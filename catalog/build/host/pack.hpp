// Copies of tensor tiles as float32, in the order in which register blocks read them.
#pragma once

#include "dtype.hpp"

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

// Transposed panels: packed[panel][d][row within the panel]. Rows after the last one become zeros.
template <int panel_rows, int panel_depth, class Source>
inline void pack_transposed(Source rows, int count, int width, float* packed) {
    for (int row = 0; row < round_up(count, panel_rows); row += lanes) {
        float* panel = packed + row / panel_rows * panel_rows * panel_depth + row % panel_rows;
        for (int d = 0; d < width; d += lanes) {
            Float block[lanes];
            if (row + lanes <= count && d + lanes <= width) {
#pragma GCC unroll 16
                for (int i = 0; i < lanes; ++i) block[i] = load(rows[row + i] + d);
            } else {
                for (int i = 0; i < lanes; ++i)
                    block[i] = row + i < count ? load_first(rows[row + i] + d, width - d) : Float{};
            }
            transpose(block);
#pragma GCC unroll 16
            for (int i = 0; i < lanes; ++i) store(panel + (d + i) * panel_rows, block[i]);
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

}  // namespace catalog::host
