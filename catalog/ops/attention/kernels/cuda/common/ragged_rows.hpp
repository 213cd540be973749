// Rows that TMA loads: those of a sequence through a ragged map, and those of a page of a cache, through one with an axis of
// pages where they are all of a part.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "call.hpp"
#include "cuda/tensor_map.hpp"

namespace catalog::cuda {

// In bytes.
struct ByteStrides {
    std::int64_t batch, nhead, seqlen;
};

// Axes that have one element get a stride that fits.
template <class T>
inline ByteStrides byte_strides(const catalog_tensor& tensor, std::int64_t batch, std::int64_t nhead,
                                std::int64_t seqlen, std::int64_t row_bytes) {
    const auto bytes = [](std::int64_t extent, std::int64_t stride, std::int64_t otherwise) {
        return extent > 1 ? stride * static_cast<std::int64_t>(sizeof(T)) : otherwise;
    };
    return {bytes(batch, tensor.stride_batch, 0), bytes(nhead, tensor.stride_nhead, 0),
            bytes(seqlen, tensor.stride_seqlen, row_bytes)};
}

// Of K or V, whose sequences lie in pages, one behind the other, or apart.
template <class Row>
inline ByteStrides key_strides(const catalog_args& args, const catalog_tensor& tensor, std::int64_t hdim) {
    using T = typename Row::dtype;
    constexpr bool group = Row::mode == Mode::group;
    const std::int64_t batch = Row::paged_kv ? args.num_pages : group ? 1 : args.batch;
    const std::int64_t rows = Row::paged_kv ? args.page_size : group ? most_tokens : args.seqlen_k;
    return byte_strides<T>(tensor, batch, args.nhead_k, rows, hdim * sizeof(T));
}

// Rows of the parts of a tile of keys, each of which lies within a page.
template <class Row>
inline int rows_of_part(const catalog_args& args) {
    return Row::paged_kv ? std::gcd(static_cast<int>(args.page_size), Row::tile_n0) : Row::tile_n0;
}

// Those of a sequence from token `first` on.
__device__ __forceinline__ RaggedRows rows_of(const ByteStrides& strides, std::int64_t batch, int head,
                                              std::int64_t first, int rows) {
    return {batch * strides.batch + head * strides.nhead + first * strides.seqlen, strides.seqlen, rows};
}

// A map of K or V in pages: columns, rows of a page, heads, pages. False: TMA cannot address them so.
template <class T>
inline bool make_page_map(CUtensorMap& map, const catalog_tensor& tensor, const catalog_args& args, std::int64_t hdim,
                          const ByteStrides& strides, int box_columns, int box_rows) {
    const auto number = [](std::int64_t extent) { return static_cast<std::uint64_t>(extent); };
    const std::uint64_t extents[4] = {number(hdim), number(args.page_size), number(args.nhead_k), number(args.num_pages)};
    std::uint64_t of[3] = {number(strides.seqlen), number(strides.nhead), number(strides.batch)};
    for (int axis = 0; axis < 3; ++axis) {
        if (of[axis] == 0 && extents[axis + 1] > 1) return false;  // heads or pages that share memory
        of[axis] = std::max<std::uint64_t>(of[axis], 16);
    }
    const std::uint32_t columns = box_columns, rows = box_rows;
    return make_tensor_map<T>(map, tensor.data, extents, of, {columns, rows, 1, 1}, swizzle_of(columns * sizeof(T)));
}

struct PageSteps {
    std::uint32_t page, head, row;  // in units of 16 bytes
};

// Of the pages of K or V, which lie along the batch axis.
inline PageSteps steps_of(const ByteStrides& strides) {
    const auto units = [](std::int64_t stride) { return static_cast<std::uint32_t>(stride / 16); };
    return {units(strides.batch), units(strides.nhead), units(strides.seqlen)};
}

// Whether pages, heads and rows are less than 2^36 bytes apart.
inline bool valid_steps(const ByteStrides& strides) {
    const auto fits = [](std::int64_t stride) { return 0 <= stride && stride >> 36 == 0; };
    return fits(strides.batch) && fits(strides.nhead) && fits(strides.seqlen);
}

// `rows` rows of a page from number `slot` on; TMA reads those behind them as zeros.
__device__ __forceinline__ RaggedRows rows_in_page(const PageSteps& steps, int page, int head, int slot, int rows) {
    const auto distance = [](std::uint32_t step, int count) { return std::uint64_t{step} * static_cast<unsigned>(count); };
    return {distance(steps.page, page) + distance(steps.head, head) + distance(steps.row, slot + rows), rows};
}

}  // namespace catalog::cuda
