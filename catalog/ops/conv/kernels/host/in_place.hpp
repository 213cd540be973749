// Depthwise convolutions whose taps along a row are three neighbours, at most one of them outside of the image at each end,
// from the image itself. Distances depend on the number of channels, but Multiples keeps all of a tile's in registers.
// Tiles at the ends of a row leave out what is outside.
//
// A tile is some positions of a row, for many channels: elements are read in about the order in which they are in memory.
#pragma once

#include "host/around.hpp"
#include "multiples.hpp"
#include "narrow.hpp"

namespace catalog::host {

template <class Row>
class DepthwiseInPlace : NarrowConvolution<Row, Reading::own> {
    using Base = NarrowConvolution<Row, Reading::own>;
    using Base::args, Base::groups, Base::made, Base::packed, Base::read, Base::storing, Base::taps, Base::threads;
    using Base::window;
    using T = typename Row::dtype;
    static constexpr int positions = 7, wide = 3;  // of a tile; taps
    static constexpr int most_blocks = 16;         // of channels, in a tile: the first cache has room for what they read
    static constexpr int of_line = 64 / (lanes * static_cast<int>(sizeof(T)));  // blocks in a cache line

   public:
    DepthwiseInPlace(const catalog_args& args, const Geometry& of, const Window& window, int threads)
        : Base(args, of, window, threads) {}

    // CATALOG_UNSUPPORTED for other filters, and for few channels or positions.
    catalog_status run() {
        const Axis *const of_d = window.axis, *const of_h = of_d + 1, *const of_w = of_d + 2;
        const std::int64_t beyond = of_w->origin + (of_w->count - 1) * of_w->stride + wide - of_w->extent;
        const bool reads_neighbours = of_w->taps == wide && of_w->apart == 1 && of_w->stride <= 2 && of_w->step == 1;
        if (!reads_neighbours || of_w->origin < -1 || beyond > 1) return CATALOG_UNSUPPORTED;
        if (args.c < lanes || of_w->count < positions) return CATALOG_UNSUPPORTED;
        const std::int64_t blocks = groups.blocks(), planes = args.n * of_d->count;
        const std::int64_t of_tile = (evenly(blocks, most_blocks) + of_line - 1) / of_line * of_line;
        const std::int64_t parts = (blocks + of_tile - 1) / of_tile;
        if (!Base::pack_weights()) return CATALOG_NO_MEMORY;
        constexpr std::int64_t enough_items = 64, fewest_rows = 4;
        std::int64_t rows = 28;  // of an item: those that two of them read are read twice
        const auto bands_of = [&] { return (of_h->count + rows - 1) / rows; };
        while (rows > fewest_rows && planes * bands_of() * parts < enough_items) rows /= 2;
        const std::int64_t bands = bands_of();
        std::atomic<bool> failed{false};
        parallel_for(args, threads, planes * bands * parts, [&](std::int64_t item) {
            Meeting* const meetings = thread_room<struct MeetingsInPlace, Meeting>().reserve(2 * of_d->taps * of_h->taps);
            if (!meetings) return failed.store(true);
            const Range part = piece_of(take_from(item, parts), of_tile, blocks);
            const Range of_band = piece_of(take_from(item, bands), rows, of_h->count);
            with_step(*of_w, [&](auto step) {
                if constexpr (step > 0)
                    for (std::int64_t h = of_band.first; h < of_band.end; ++h)
                        compute_row<step>(meetings, item, h, h + 1 < of_band.end, part);
            });
            storing.finish();
        });
        return failed ? CATALOG_NO_MEMORY : CATALOG_OK;
    }

   private:
    // What some taps of a row of the filter read, and their factors: distances in elements.
    struct Meeting {
        std::int64_t row, factors;
    };

    // Some positions of a row; addresses are those of the first of some blocks of channels.
    struct Tile {
        const T* from;  // may lie one pixel before the row
        T* to;
        const float* factors;
        const Meeting *meetings, *end, *end_of_next;  // behind its own: rows that the next row is the first to read
        Range blocks;
    };

    template <int step>
    void compute_row(Meeting* meetings, std::int64_t plane, std::int64_t h, bool has_next, const Range& part) const {
        const Axis &of_d = window.axis[0], &of_h = window.axis[1], &of_w = window.axis[2];
        const std::int64_t d = take_from(plane, of_d.count), channels = read.all_channels;
        const Range deep = of_d.inside(d), high = of_h.inside(h);
        Meeting* end = meetings;
        for (std::int64_t td = deep.first; td < deep.end; ++td)
            for (std::int64_t th = high.first; th < high.end; ++th)
                *end++ = {read.index(of_d.origin + d * of_d.stride + td * of_d.apart,
                                     of_h.origin + h * of_h.stride + th * of_h.apart, 0) * channels,
                          (td * of_h.taps + th) * wide * lanes};
        Meeting* end_of_next = end;
        const std::int64_t next = of_h.origin + (h + 1) * of_h.stride + (of_h.taps - 1) * of_h.apart + 1;
        const std::int64_t first_next = std::max<std::int64_t>(next - std::min(of_h.stride, of_h.taps), 0);
        if (has_next)
            for (std::int64_t td = deep.first; td < deep.end; ++td)
                for (std::int64_t row = first_next; row < std::min(next, of_h.extent); ++row)
                    *end_of_next++ = {read.index(of_d.origin + d * of_d.stride + td * of_d.apart, row, 0) * channels, 0};
        const std::int64_t place = made.index(of_d.first + d * of_d.step, of_h.first + h * of_h.step, of_w.first);
        const T* const from = read.data + plane * read.stride_image + part.first * lanes;
        T* const to = made.data + plane * made.stride_image + place * channels + part.first * lanes;
        const Multiples apart(channels * static_cast<std::int64_t>(sizeof(T)));
        for (std::int64_t p = 0; p < of_w.count; p += positions) {
            // The last tile is whole: some positions are computed twice.
            const std::int64_t begin = std::min(p, of_w.count - positions), w = of_w.origin + begin * step;
            const float* const factors = packed + part.first * taps * lanes;
            const Tile tile{from + w * channels, to + begin * channels, factors, meetings, end, end_of_next, part};
            const bool is_last = w + step * (positions - 1) + wide > of_w.extent;
            const auto compute = [&](auto is_first) {
                if (is_last)
                    compute_tile<step, is_first, true>(apart, tile);
                else
                    compute_tile<step, is_first, false>(apart, tile);
            };
            w < 0 ? compute(std::true_type{}) : compute(std::false_type{});
        }
    }

    // Leaves out the first or the last column that the taps meet, if it is outside of the image.
    template <int step, bool is_first, bool is_last>
    [[gnu::noinline]] void compute_tile(const Multiples& distances, const Tile& tile) const {
        constexpr int columns = step * (positions - 1) + wide;
        const Multiples apart = distances;
        const T* from = tile.from;
        T* to = tile.to;
        const float* factors = tile.factors;
        const std::int64_t of_block = taps * lanes, whole = args.c / lanes;
        for (std::int64_t number = tile.blocks.first; number < tile.blocks.end; ++number) {
            // Hardware does not foresee the order. Requests for a few lines at a time wait while blocks are computed.
            if ((number - tile.blocks.first) % of_line == 0)
                for (const Meeting* of = tile.end; of < tile.end_of_next; ++of)
#pragma GCC unroll 16
                    for (int i = 0; i < step * positions; ++i) __builtin_prefetch(apart.at(from + of->row, i), 0, 2);
            // The last block begins early enough to be whole.
            const int skipped = number == whole ? lanes - static_cast<int>(args.c % lanes) : 0;
            from -= skipped, to -= skipped;
            Float sums[positions];  // set one by one: as a whole, they would be set in memory
#pragma GCC unroll 8
            for (int i = 0; i < positions; ++i) sums[i] = Float{};
            for (const Meeting* of = tile.meetings; of < tile.end; ++of) {
                const T* const row = from + of->row;
                Float factor[wide];
#pragma GCC unroll 4
                for (int t = 0; t < wide; ++t) factor[t] = load(factors + of->factors + t * lanes);
#pragma GCC unroll 16
                for (int column = is_first; column < columns - is_last; ++column) {
                    const Float x = load(apart.at(row, column));
#pragma GCC unroll 4
                    for (int t = 0; t < wide; ++t)
                        if (column >= t && (column - t) % step == 0 && column - t < step * positions)
                            sums[(column - t) / step] += x * factor[t];
                }
            }
            if (skipped > 0) {
                T some[lanes];
#pragma GCC unroll 8
                for (int i = 0; i < positions; ++i) {
                    store(some, sums[i]);
                    std::memcpy(apart.at(to, i) + skipped, some + skipped, (lanes - skipped) * sizeof(T));
                }
            } else if (storing.is_around()) {
#pragma GCC unroll 8
                for (int i = 0; i < positions; ++i) storing.store(apart.at(to, i), sums[i], lanes);
            } else {
#pragma GCC unroll 8
                for (int i = 0; i < positions; ++i) store(apart.at(to, i), sums[i]);
            }
            from += lanes, to += lanes, factors += of_block;
        }
    }
};

}  // namespace catalog::host
