// Copies of tensor tiles as float32, in the order in which register blocks read them.
#pragma once

#include "dtype.hpp"

namespace catalog::host {

// Rows of T that are contiguous along the head dim.
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
inline void pack_query(const T* query, int width, float scale, float* packed) {
    for (int d = 0; d < width; d += lanes) store(packed + d, load_first(query + d, width - d) * scale);
}

// Transposed panels: packed[panel][d][key within the panel]. Keys after the last one become zeros.
template <int panel_keys, int panel_depth, class Keys>
inline void pack_keys(Keys keys, int count, int width, float* packed) {
    for (int key = 0; key < round_up(count, panel_keys); key += lanes) {
        float* panel = packed + key / panel_keys * panel_keys * panel_depth + key % panel_keys;
        for (int d = 0; d < width; d += lanes) {
            Float block[lanes];
            if (key + lanes <= count && d + lanes <= width) {
#pragma GCC unroll 16
                for (int i = 0; i < lanes; ++i) block[i] = load(keys[key + i] + d);
            } else {
                for (int i = 0; i < lanes; ++i)
                    block[i] = key + i < count ? load_first(keys[key + i] + d, width - d) : Float{};
            }
            transpose(block);
#pragma GCC unroll 16
            for (int i = 0; i < lanes; ++i) store(panel + (d + i) * panel_keys, block[i]);
        }
    }
}

// Panels of columns: packed[panel][key][column within the panel].
template <int panel_columns, int panel_keys, class Values>
inline void pack_values(Values values, int count, int width, float* packed) {
    for (int key = 0; key < count; ++key)
        for (int d = 0; d < round_up(width, panel_columns); d += lanes) {
            float* panel = packed + d / panel_columns * panel_columns * panel_keys + d % panel_columns;
            store(panel + key * panel_columns, load_first(values[key] + d, width - d));
        }
}

}  // namespace catalog::host
