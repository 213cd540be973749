// Convolutions of narrow groups, depthwise ones first of all: no product is wasted on channels of other groups. What a filter
// reads of a row of the image is loaded once for all of its taps in that row, which stay in registers meanwhile.
//
// Channels of a position are neighbours in memory: taking a few positions of two rows at a time, for all channels of an
// item, reads the image in order. The idea is oneDNN's (jit_uni_dw_convolution).
#pragma once

#include "host/around.hpp"
#include "narrow.hpp"

namespace catalog::host {

template <class Row, Reading reading>
class NarrowGroups : NarrowConvolution<Row, reading> {
    using Base = NarrowConvolution<Row, reading>;
    using Base::args, Base::groups, Base::is_large, Base::made, Base::packed, Base::read, Base::storing, Base::taps;
    using Base::threads, Base::window;
    using T = typename Row::dtype;
    static constexpr int positions = 7, rows_at_once = 2;
    static constexpr int blocks_per_item = reading == Reading::own ? 16 : 4;

   public:
    NarrowGroups(const catalog_args& args, const Geometry& of, const Window& window, int threads)
        : Base(args, of, window, threads), interior(window.axis[2]) {}

    catalog_status run() {
        const std::int64_t blocks = groups.blocks(), parts = (blocks + blocks_per_item - 1) / blocks_per_item;
        if (!Base::pack_weights()) return CATALOG_NO_MEMORY;
        const std::int64_t rows = args.n * window.axis[0].count * window.axis[1].count;
        const std::int64_t items = (rows + rows_at_once - 1) / rows_at_once;
        parallel_for(args, threads, items * parts, [&](std::int64_t item) {
            const std::int64_t row = item / parts * rows_at_once, first = item % parts * blocks_per_item;
            const std::int64_t end = std::min(first + blocks_per_item, blocks);
            const std::int64_t high = std::min<std::int64_t>(rows_at_once, rows - row);
            if constexpr (has_padded_rows)  // PaddedGroups computes the others
                compute_rows<0>(row, high, first, end);
            else
                with_step(window.axis[2], [&](auto step) { compute_rows<step>(row, high, first, end); });
            storing.finish();
        });
        return CATALOG_OK;
    }

   private:
    // A row of the image that is computed, and the taps that meet the image that is read.
    struct Line {
        const T* from;  // what the first of these taps reads
        T* to;
        const float* weights;
        Range deep, high;  // taps
    };

    Line line_of(std::int64_t row) const {
        const Axis *const of_d = window.axis, *const of_h = of_d + 1, *const of_w = of_d + 2;
        const std::int64_t h = row % of_h->count, d = row / of_h->count % of_d->count;
        const std::int64_t image = row / of_h->count / of_d->count;
        const Range deep = of_d->inside(d), high = of_h->inside(h);
        const std::int64_t at_d = of_d->origin + d * of_d->stride + deep.first * of_d->apart;
        const std::int64_t at_h = of_h->origin + h * of_h->stride + high.first * of_h->apart;
        const std::int64_t place = made.index(of_d->first + d * of_d->step, of_h->first + h * of_h->step, of_w->first);
        return {read.data + image * read.stride_image + read.index(at_d, at_h, 0) * read.all_channels,
                made.data + image * made.stride_image + place * made.all_channels,
                packed + (deep.first * of_h->taps + high.first) * of_w->taps * groups.width * lanes, deep, high};
    }

    // Some blocks of channels, for some rows.
    template <int step>
    void compute_rows(std::int64_t first_row, std::int64_t rows, std::int64_t first, std::int64_t end) const {
        Line lines[rows_at_once];
        for (std::int64_t r = 0; r < rows; ++r) lines[r] = line_of(first_row + r);
        const std::int64_t count = window.axis[2].count;
        const auto compute_tiles = [&](std::int64_t from, std::int64_t to) {
            for (std::int64_t p = 0; p < count; p += positions) {
                // The last tile is whole, if there are as many positions: some are computed twice.
                const std::int64_t begin = std::max<std::int64_t>(std::min(p, count - positions), 0);
                if (is_large)
                    for (std::int64_t r = 0; r < rows; ++r) ask_for_next(lines[r], rows, begin, from, to);
                const auto compute = [&](auto checks) {
                    compute_tile<step, checks>(std::integral_constant<int, lanes>{}, lines, lines + rows, begin, from, to);
                };
                if (!groups.block(from).is_whole())
                    compute_tile<0, true>(groups.block(from).count, lines, lines + rows, begin, from, to);
                else if (begin >= interior.first && begin + positions <= interior.end)
                    compute(std::false_type{});
                else
                    compute(std::true_type{});
            }
        };
        if constexpr (reading == Reading::own)
            compute_tiles(first, end);
        else  // the weights of a block stay in L1
            for (std::int64_t block = first; block < end; ++block) compute_tiles(block, block + 1);
    }

    // Prefetches what the line `rows` further down reads for the first time, and what it writes. Hardware does not recognise
    // the order, in which positions of several rows take turns.
    void ask_for_next(const Line& line, std::int64_t rows, std::int64_t p, std::int64_t first, std::int64_t end) const {
        const Axis &of_h = window.axis[1], &of_w = window.axis[2];
        const std::int64_t row = read.extents[2] * read.all_channels, channels = read.all_channels;
        const T* const from = line.from + (of_h.taps - 1) * of_h.apart * row + (of_w.origin + p * of_w.stride) * channels;
        for (std::int64_t td = 0; td < line.deep.end - line.deep.first; ++td)
            for (std::int64_t i = 0; i < of_h.stride * of_w.stride; ++i)
                ask<false>(first * lanes + from + td * window.axis[0].apart * read.extents[1] * row +
                               (rows * of_h.stride - i / of_w.stride) * row + i % of_w.stride * channels,
                           positions, of_w.stride * channels, end - first);
        if (storing.is_around()) return;
        ask<true>(first * lanes + line.to + rows * of_h.step * made.extents[2] * channels + p * of_w.step * channels,
                  positions, of_w.step * channels, end - first);
    }

    // `checks`: some of what a filter meets may be outside of the image.
    template <int step, bool checks, class Count>
    void compute_tile(Count count, const Line* lines, const Line* last, std::int64_t p, std::int64_t first,
                      std::int64_t end) const {
        const Axis of_w = window.axis[2];
        const std::int64_t channels = made.all_channels, wide = of_w.taps;
        const std::int64_t width = reading == Reading::own ? 1 : groups.width;
        const std::int64_t from_row = window.axis[1].apart * read.extents[2] * channels;
        const std::int64_t from_plane = window.axis[0].apart * read.extents[1] * read.extents[2] * channels;
        const std::int64_t of_row = wide * width * lanes, of_plane = window.axis[1].taps * of_row;
        const std::int64_t w = of_w.origin + p * of_w.stride, left = of_w.count - p, apart = of_w.step * channels;
        for (std::int64_t number = first; number < end; ++number) {
            const ChannelBlock block = groups.block(number);
            for (const Line* line = lines; line < last; ++line) {
                Float sums[positions];  // set one by one: as a whole, they would be set in memory
#pragma GCC unroll 8
                for (int i = 0; i < positions; ++i) sums[i] = Float{};
                const T* plane = line->from + block.read;
                const float* factors = line->weights + number * taps * width * lanes;
                for (std::int64_t td = line->deep.first; td < line->deep.end; ++td) {
                    const T* from = plane;
                    const float* weights = factors;
                    for (std::int64_t th = line->high.first; th < line->high.end; ++th) {
                        for_taps<step>(of_w, [&](auto some, int tw) {
                            for (std::int64_t j = 0; j < width; ++j)
                                add_taps<step, some, checks>(from, w + tw * of_w.apart, of_w.stride, of_w.extent, channels,
                                                              weights + (tw * width + j) * lanes, width * lanes,
                                                              groups.channel(j, count), sums);
                        });
                        from += from_row;
                        weights += of_row;
                    }
                    plane += from_plane;
                    factors += of_plane;
                }
                T* const to = line->to + p * apart + block.first;
                if (left >= positions && block.stores_all()) {
#pragma GCC unroll 8
                    for (int i = 0; i < positions; ++i) storing.store(to + i * apart, sums[i], lanes);
                } else {
                    T some[positions][lanes];
#pragma GCC unroll 8
                    for (int i = 0; i < positions; ++i) store(some[i], sums[i]);
                    for (int i = 0; i < std::min<std::int64_t>(positions, left); ++i)
                        block.store_to(to + i * apart, some[i]);
                }
            }
        }
    }

    // Adds the products of one channel of each group and `some` taps, which are neighbours, to the sums. The first position
    // reads element `w` of the row.
    template <int step, int some, bool checks, class Channel>
    [[gnu::always_inline]] static void add_taps(const T* row, std::int64_t w, std::int64_t stride, std::int64_t extent,
                                                std::int64_t channels, const float* weights, std::int64_t apart,
                                                Channel channel, Float (&sums)[positions]) {
        const T* const first = row + w * channels;
        const auto seen = [&](auto after) {
            return channel(checks && !is_inside(w + after, extent) ? zeros<T> : first + after * channels);
        };
        Float factor[some];
#pragma GCC unroll 4
        for (int t = 0; t < some; ++t) factor[t] = load(weights + t * apart);
        if constexpr (step > 0) {
            constexpr int columns = step * (positions - 1) + some;
#pragma GCC unroll 16
            for (int column = 0; column < columns; ++column) {
                const Float x = seen(column);
#pragma GCC unroll 4
                for (int t = 0; t < some; ++t)
                    if (column >= t && (column - t) % step == 0 && column - t < step * positions)
                        sums[(column - t) / step] += x * factor[t];
            }
        } else {
#pragma GCC unroll 8
            for (int i = 0; i < positions; ++i) sums[i] += seen(i * stride) * factor[0];
        }
    }

    const Interior interior;
};

}  // namespace catalog::host
