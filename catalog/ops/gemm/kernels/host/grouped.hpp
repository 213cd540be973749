// The products of groups in one launch: threads take parts of C of all groups in turn.
#pragma once

#include <algorithm>
#include <atomic>

#include "panel.hpp"
#include "panel_stream.hpp"
#include "stream.hpp"
#include "tile_stream.hpp"

namespace catalog::host {

struct NoProduct {
    static constexpr bool exists = false;
};

template <class Row, class Unit>
using FewRowsInTiles =
    std::conditional_t<!Row::in_tiles, NoProduct,
                       std::conditional_t<Row::b_along, TileStream<Row, Unit>, PanelStream<Row, Unit>>>;

// The row that multiplies groups of few rows, up to tile_m: for these it is faster than to copy B.
template <class Row, class Unit>
struct StreamRow : Row {
    static constexpr bool in_tiles = false;
    static constexpr int tile_m = (Row::b_along ? 64 : 32) / Units<Unit>::depth;
    static constexpr int tile_n = Row::b_along ? 64 : 1024, tile_k = Row::b_along ? 1024 : 16;
    static constexpr int warp_tile_m = Row::b_along ? 16 : 4, warp_tile_n = Row::b_along ? 8 : lanes < 16 ? 16 : 64;
};

template <class Row, class Unit>
class GroupedProduct {
    using T = typename Row::dtype;
    using StreamUnit = std::conditional_t<std::is_same_v<Unit, ByteQuad>, IntegerUnit,
                                          std::conditional_t<std::is_same_v<T, fp16>, float, Unit>>;
    using OfFewRows = StreamRow<Row, StreamUnit>;
    static constexpr int few_rows = OfFewRows::tile_m;
    static constexpr std::int64_t most_rows = 4 * Row::tile_m;  // of a part, for which columns of B are packed once

   public:
    explicit GroupedProduct(const catalog_args& args) : args(args), of_m(args.group_axis == CATALOG_GROUPS_OF_M) {}

    catalog_status run() {
        std::int64_t* const ends = thread_room<struct EndsOfParts, std::int64_t>().reserve(args.batch);
        if (!ends) return CATALOG_NO_MEMORY;
        const int threads = work_of(args) < small_work ? 1 : threads_for(args);
        constexpr int parts_per_thread = 8;
        const std::int64_t all = args.m * args.n * (of_m ? 1 : args.batch);
        area = threads > 1 ? all / (parts_per_thread * threads) : all;
        std::int64_t count = 0;
        for (std::int64_t group = 0; group < args.batch; ++group)
            ends[group] = count += parts_of(group).count();
        std::atomic<catalog_status> status = CATALOG_OK;
        parallel_for(args, threads, count, [&](std::int64_t part) {
            const std::int64_t group = std::upper_bound(ends, ends + args.batch, part) - ends;
            const catalog_status of_one = multiply_part(group, part - (group ? ends[group - 1] : 0));
            if (of_one != CATALOG_OK) status = of_one;
        });
        return status;
    }

   private:
    // How C of a group is divided.
    struct Parts {
        std::int64_t m, n, rows, columns;

        std::int64_t down() const { return (m + rows - 1) / rows; }
        std::int64_t count() const { return down() * ((n + columns - 1) / columns); }
    };

    std::int64_t extent(std::int64_t group) const { return args.starts[group + 1] - args.starts[group]; }

    Parts parts_of(std::int64_t group) const {
        constexpr std::int64_t block = Row::warp_tile_m;
        constexpr std::int64_t panel = in_blocks ? block_extent : Row::warp_tile_n;
        const std::int64_t m = of_m ? extent(group) : args.m, down = (m + most_rows - 1) / most_rows;
        const std::int64_t rows = (m / std::max<std::int64_t>(down, 1) / block + 1) * block;
        return {m, args.n, rows, (area / rows / panel + 1) * panel};
    }

    // A part of C is a product of its own.
    catalog_status multiply_part(std::int64_t group, std::int64_t part) const {
        const Parts parts = parts_of(group);
        const std::int64_t row = part % parts.down() * parts.rows, column = part / parts.down() * parts.columns;
        const std::int64_t start = args.starts[group];
        const std::int64_t first_row = row + (of_m ? start : 0), first_k = of_m ? 0 : start;
        catalog_args of_part = args;
        of_part.batch = 1;
        of_part.m = std::min(parts.rows, parts.m - row);
        of_part.n = std::min(parts.columns, parts.n - column);
        of_part.k = of_m ? args.k : extent(group);
        of_part.a.data = const_cast<T*>(factor_of<Row::a_along, T>(args.a, 0).from(first_row, first_k).data);
        of_part.b.data = const_cast<T*>(factor_of<Row::b_along, T>(args.b, of_m ? group : 0).from(column, first_k).data);
        using Element = typename Row::otype;
        of_part.c.data = data_of<Element>(args.c, of_m ? 0 : group) + first_row * args.c.stride_outer + column;
        if constexpr (scales_of<Row> != Scales::no) {
            const std::int64_t of_row = in_blocks ? args.scale_a.stride_outer : 1;
            const std::int64_t of_column = in_blocks ? column / block_extent * args.scale_b.stride_outer : column;
            of_part.scale_a.data = data_of<float>(args.scale_a, 0) + first_row * of_row;
            of_part.scale_b.data = data_of<float>(args.scale_b, of_m ? group : 0) + of_column;
        }
        if (args.bias.data) of_part.bias.data = data_of<Element>(args.bias, 0) + column;
        if constexpr (FewRowsInTiles<Row, Unit>::exists) {
            constexpr int fewest_rows = Row::b_along ? 1 : 8;  // from which on no stream is faster
            if (of_part.m >= fewest_rows && FewRowsInTiles<Row, Unit>::takes(of_part))
                return FewRowsInTiles<Row, Unit>(of_part, 0, 1).run();
        }
        if (of_part.m <= few_rows) return StreamProduct<OfFewRows, StreamUnit>(of_part, 0, 1).run();
        return PanelProduct<Row, Unit>(of_part, 0, 1).run();
    }

    static constexpr bool in_blocks = scales_of<Row> == Scales::block;

    const catalog_args& args;
    const bool of_m;
    std::int64_t area;  // elements of C in a part, about
};

}  // namespace catalog::host
