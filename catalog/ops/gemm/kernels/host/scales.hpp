// Scales of A and B: of rows of A and columns of B, by which the epilogue multiplies sums; or of blocks, by which the
// sums of each `block_extent` products are multiplied before they are added.
#pragma once

#include <cstdint>
#include <type_traits>

#include "abi/export.hpp"
#include "host/panels.hpp"

namespace catalog::host {

enum class Scales { no, row, block };

// Those of a row that states none are absent.
template <class Row, class = void>
inline constexpr Scales scales_of = Scales::no;
template <class Row>
inline constexpr Scales scales_of<Row, std::void_t<decltype(Row::scales)>> = Row::scales;

inline constexpr int block_extent = 128;  // of rows of B, and of its columns; blocks of A are single rows

inline std::int64_t blocks_of(std::int64_t extent) { return (extent + block_extent - 1) / block_extent; }

// What a kernel keeps of C until the epilogue: sums of int8 are integers, unless they were scaled.
template <class Row, class Unit>
using SumOf =
    std::conditional_t<scales_of<Row> == Scales::block || std::is_same_v<typename Units<Unit>::Sum, Float>, float,
                       std::int32_t>;

// The scales of the blocks of one product of the batch, or of a part of it that begins with a whole block.
class BlockScales {
   public:
    BlockScales(const catalog_args& args, std::int64_t batch)
        : of_a(static_cast<const float*>(args.scale_a.data) + batch * args.scale_a.stride_batch),
          of_b(static_cast<const float*>(args.scale_b.data) + batch * args.scale_b.stride_batch),
          row_stride(args.scale_a.stride_outer),
          block_stride(args.scale_b.stride_outer) {}

    float of(std::int64_t row, std::int64_t column, std::int64_t k) const { return a(row, k) * b(column, k); }
    float a(std::int64_t row, std::int64_t k) const { return of_a[row * row_stride + k / block_extent]; }
    float b(std::int64_t column, std::int64_t k) const { return b_from(column)[k / block_extent]; }
    const float* b_from(std::int64_t column) const { return of_b + column / block_extent * block_stride; }

   private:
    const float *of_a, *of_b;
    std::int64_t row_stride, block_stride;
};

// Whether scales are present and finite: `rows` of `count` each, for each product that has its own.
inline bool are_finite(const catalog_tensor& scales, std::int64_t products, std::int64_t rows, std::int64_t count) {
    if (products * rows * count == 0) return true;
    if (!scales.data) return false;
    Float nothing = {};  // NaN from the first infinity or NaN on
    for (std::int64_t product = 0; product < products; ++product)
        for (std::int64_t row = 0; row < rows; ++row) {
            const float* const from =
                static_cast<const float*>(scales.data) + product * scales.stride_batch + row * scales.stride_outer;
            for (std::int64_t i = 0; i < count; i += lanes) {
                const Float x = load_first(from + i, count - i);
                nothing += x - x;
            }
        }
    return reduce_sum(nothing) == 0;
}

template <class Row>
inline bool check_scales(const catalog_args& args) {
    if constexpr (scales_of<Row> == Scales::no) return true;
    const std::int64_t of_a = Row::grouped ? 1 : args.batch;
    const std::int64_t of_b = Row::grouped && args.group_axis != CATALOG_GROUPS_OF_M ? 1 : args.batch;
    if constexpr (scales_of<Row> == Scales::row)
        return are_finite(args.scale_a, of_a, 1, args.m) && are_finite(args.scale_b, of_b, 1, args.n);
    const std::int64_t deep = blocks_of(args.k);
    return are_finite(args.scale_a, of_a, args.m, deep) && are_finite(args.scale_b, of_b, blocks_of(args.n), deep);
}

}  // namespace catalog::host
