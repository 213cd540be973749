// The product of few rows: B is read once, straight from the tensor, and not copied.
#pragma once

#include <algorithm>
#include <atomic>

#include "epilogue.hpp"
#include "host/gemm.hpp"
#include "host/threads.hpp"

namespace catalog::host {

// B by rows: row k of units is `depth` rows of elements.
template <class Unit, class T>
struct RowsAcross {
    struct Columns {
        const T* from;
        std::int64_t stride;

        Columns operator+(int columns) const { return {from + columns, stride}; }
        friend auto load(Columns columns) {
            return load_across<Unit>(columns.from, columns.stride, Units<Unit>::depth, lanes);
        }
    };

    const T* data;
    std::int64_t stride;

    Columns operator[](std::int64_t k) const { return {data + k * Units<Unit>::depth * stride, stride}; }
};

template <class Row, class Unit>
class StreamProduct {
    using T = typename Row::dtype;
    using Vector = typename Units<Unit>::Sum;
    using Sum = std::conditional_t<std::is_same_v<Vector, Float>, float, std::int32_t>;
    static constexpr int factors = Units<Unit>::depth, tile_m = Row::tile_m, tile_n = Row::tile_n;
    static constexpr int strip = Row::warp_tile_n, vectors = strip / lanes, step = Row::tile_k / factors;
    static_assert(!Row::b_along || step % lanes == 0, "a vector of units belongs to one step");
    static_assert(tile_n % strip == 0 && strip % lanes == 0 && tile_m % lanes == 0, "tiles are whole vectors");

    static constexpr std::int64_t kept_units = 8 << 20;  // room for more is freed after a launch

    struct Scratch {
        static constexpr int row_s = tile_n + 16;
        alignas(64) Sum sums[tile_m * row_s];
        alignas(64) Unit b[Row::b_along ? 1 : step * strip];  // a strip at the edge
    };

   public:
    StreamProduct(const catalog_args& args, std::int64_t batch, int threads)
        : args(args), batch(batch), threads(threads), units((args.k + factors - 1) / factors) {}

    static std::int64_t tiles(const catalog_args& args) { return (args.n + tile_n - 1) / tile_n; }

    catalog_status run() {
        row_a = (units + lanes - 1) / lanes * lanes + 16;
        Room<Unit>& room = thread_room<struct PackedA, Unit>();
        packed_a = room.reserve(Row::b_along ? tile_m * row_a : units * tile_m);
        if (!packed_a) return CATALOG_NO_MEMORY;
        for (std::int64_t row = 0; row < args.m; row += tile_m)
            multiply_rows(row, static_cast<int>(std::min<std::int64_t>(tile_m, args.m - row)));
        room.release_above(kept_units);
        return out_of_memory ? CATALOG_NO_MEMORY : CATALOG_OK;
    }

   private:
    void multiply_rows(std::int64_t row, int rows) {
        const auto from = factor_of<Row::a_along, T>(args.a, batch).from(row, 0);
        if constexpr (Row::b_along)
            pack_rows<Unit>(from, rows, args.k, packed_a, row_a);
        else
            pack_depth<Unit, tile_m, tile_m>(from, rows, args.k, packed_a);
        parallel_for(args, threads, tiles(args), [&](std::int64_t item) {
            Scratch* const scratch = thread_scratch<Scratch>();
            if (!scratch) {
                out_of_memory = true;
                return;
            }
            const std::int64_t column = item * tile_n;
            const int columns = static_cast<int>(std::min<std::int64_t>(tile_n, args.n - column));
            for (int i = 0; i < rows; ++i)
                std::fill_n(scratch->sums + i * Scratch::row_s, round_up(columns, strip), Sum{});
            if constexpr (Row::b_along)
                multiply_along(*scratch, column, rows, columns);
            else
                multiply_across(*scratch, column, rows, columns);
            finish<Row>(args, batch, scratch->sums, Scratch::row_s, row, column, rows, columns);
        });
    }

    // Columns of B are contiguous: each sum has a vector of partial sums along the depth. While all rows use some columns
    // to a depth of tile_k, what follows is prefetched.
    void multiply_along(Scratch& scratch, std::int64_t first_column, int rows, int columns) const {
        const Rows<const T> b{factor_of<true, T>(args.b, batch).from(first_column, 0).data, args.b.stride_outer};
        const int blocks = (rows + Row::warp_tile_m - 1) / Row::warp_tile_m;
        // With one block of rows, B is read steadily, and the CPU's own prefetching is better.
        const int asked = blocks > 1 ? vectors * lanes * factors / blocks : 0;
        for_blocks<vectors, 1>(0, columns, [&](auto width, int j) {
            for (std::int64_t k = 0; k < args.k; k += Row::tile_k) {
                const auto depth_from = [&](std::int64_t first) {
                    return static_cast<int>(std::min<std::int64_t>(Row::tile_k, args.k - first));
                };
                const std::int64_t next = k + Row::tile_k;
                const bool deeper = next < args.k;
                const int after = deeper ? j : j + width;
                Lines<Rows<const T>> lines({b.data + (deeper ? next : 0), b.stride}, after,
                                           std::min(after + vectors, columns), depth_from(deeper ? next : 0));
                for_row_blocks<Row::warp_tile_m>(0, rows, [&](auto height, int i) {
                    multiply_vectors<height, width>(packed_a + i * row_a + k / factors, b.data + j * b.stride + k,
                                                    depth_from(k), lines, asked,
                                                    scratch.sums + i * Scratch::row_s + j);
                });
            }
        });
    }

    template <int rows, int columns, class Next>
    void multiply_vectors(const Unit* a, const T* b, int depth, Next& next, int asked, Sum* sums) const {
        Vector sum[rows][columns] = {};
        for (int k = 0; k < depth; k += lanes * factors) {
            next.ask(asked);
            typename Units<Unit>::Vector of_b[columns];
#pragma GCC unroll 4
            for (int j = 0; j < columns; ++j) of_b[j] = load_along<Unit>(b + j * args.b.stride_outer + k, depth - k);
#pragma GCC unroll 16
            for (int i = 0; i < rows; ++i) {
                const auto of_a = load(a + i * row_a + k / factors);
#pragma GCC unroll 4
                for (int j = 0; j < columns; ++j) Units<Unit>::multiply_add(sum[i][j], of_a, of_b[j]);
            }
        }
        for (int i = 0; i < rows; ++i)
            for (int j = 0; j < columns; ++j) sums[i * Scratch::row_s + j] += reduce_sum(sum[i][j]);
    }

    // Rows of B are contiguous: a few at a time in strips of columns, which are copied only where they are not whole.
    void multiply_across(Scratch& scratch, std::int64_t first_column, int rows, int columns) const {
        const auto b = factor_of<false, T>(args.b, batch);
        for (std::int64_t k = 0; k < args.k; k += Row::tile_k) {
            const std::int64_t depth = std::min<std::int64_t>(Row::tile_k, args.k - k);
            const int of_step = static_cast<int>((depth + factors - 1) / factors);
            for (int j = 0; j < columns; j += strip) {
                const auto from = b.from(first_column + j, k);
                const bool whole = j + strip <= columns && depth % factors == 0;
                if (!whole) pack_depth<Unit, strip, strip>(from, std::min(strip, columns - j), depth, scratch.b);
                for_row_blocks<Row::warp_tile_m>(0, rows, [&](auto block, int i) {
                    const Unit* const a = packed_a + k / factors * tile_m + i;
                    const auto add = add_to<Scratch::row_s>(scratch.sums + i * Scratch::row_s + j);
                    if (whole)
                        multiply_block<block, strip, 1, tile_m>(a, RowsAcross<Unit, T>{from.data, from.stride}, of_step,
                                                                add);
                    else
                        multiply_block<block, strip, 1, tile_m>(a, Rows<const Unit>{scratch.b, strip}, of_step, add);
                });
            }
        }
    }

    const catalog_args& args;
    const std::int64_t batch;
    const int threads;
    const std::int64_t units;  // along the whole depth
    std::int64_t row_a;
    Unit* packed_a;
    std::atomic<bool> out_of_memory = false;
};

}  // namespace catalog::host
