// Copies of keys or values of 8 bits, as float32 or, for products of pairs, as bf16.
#pragma once

#include "host/lines.hpp"
#include "host/streams.hpp"
#include "scratch.hpp"

namespace catalog::host {

// The rows of a tile from `first` on and before `end`. What follows their `width` elements is zero up to a whole read;
// rows of floats are whole reads.
template <class Reader, class Row, class Ahead>
__attribute__((noinline)) inline auto copied(const KvRows<Row>& rows, int first, int end, int width,
                                             Scratch<Row>& scratch, Ahead ahead) {
    using T = typename Row::dtype;
    constexpr bool pairs = std::is_same_v<Reader, DepthReader<BrainPair, T>>;
    using Copy = std::conditional_t<pairs, bf16, float>;
    using Vector = std::conditional_t<pairs, Bits, Float>;
    constexpr int vectors = Reader::vectors, in_vector = vector_bytes / sizeof(Copy), step = vectors * in_vector;
    const auto copy = [&](const T* from, int count, int index, Copy* to) {
        ask_alike<step * static_cast<int>(sizeof(T))>(ahead, index);
        Vector read[vectors];
        if constexpr (pairs)
            Reader::load(from, count, read);
        else
            Reader::load(from, read);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) {
            if constexpr (!pairs) read[v] *= Reader::factor;
            std::memcpy(static_cast<void*>(to + v * in_vector), read + v, sizeof read[v]);
        }
    };
    auto* const copies = reinterpret_cast<Copy*>(scratch.copies);
    constexpr std::int64_t distance = Scratch<Row>::row_copy;
    const int whole = width / step * step;
    for (int row = first; row < end; ++row) {
        const T* const from = rows[row];
        Copy* const to = copies + (row - first) * distance;
        for (int d = 0; d < whole; d += step) copy(from + d, step, d / step, to + d);
        if (whole < width) copy(from + whole, width - whole, 0, to + whole);
    }
    return Rows<const Copy>{copies, distance};
}

}  // namespace catalog::host
