// Convolutions of narrow groups whose taps along a row are neighbours, of any number, from rows that are copied first: as
// float32, vector after vector of channels, with the zeros around the image. All positions are computed alike, elements are
// converted once, and what a tile of positions reads is at distances that are known when it is compiled. In the tensor,
// distances depend on the number of channels: with 16 registers, they would be loaded from memory again and again, and where
// they are powers of two, what a tile reads would share few sets of the first cache.
//
// An item is a strip of an image: some channels of some positions across, row after row. Copied rows stay in the first
// cache until the last row that meets them is computed.
#pragma once

#include "host/around.hpp"
#include "narrow.hpp"

namespace catalog::host {

template <class Row, Reading reading>
class PaddedGroups : NarrowConvolution<Row, reading> {
    using Base = NarrowConvolution<Row, reading>;
    using Base::args, Base::groups, Base::is_large, Base::made, Base::packed, Base::read, Base::storing, Base::taps;
    using Base::threads, Base::window;
    using T = typename Row::dtype;
    using Unit = typename Base::Unit;
    using Vector = typename Units<Unit>::Vector;
    static constexpr int positions = 7, depth = Units<Unit>::depth;  // of a tile; channels in a unit
    static constexpr int chains = vector_registers == 32 && reading != Reading::own ? 2 : 1;
    static constexpr std::int64_t strip = 28, blocks_per_item = 128 / vector_bytes;  // two lines of the cache
    static constexpr std::int64_t most_copied = 1 << 14;                             // units

   public:
    PaddedGroups(const catalog_args& args, const Geometry& of, const Window& window, int threads)
        : Base(args, of, window, threads) {}

    // CATALOG_UNSUPPORTED for few channels, and for taps or strides that are far apart.
    catalog_status run() {
        const Axis *const of_d = window.axis, *const of_h = of_d + 1, *const of_w = of_d + 2;
        if (args.c < lanes * depth || of_w->stride > 2 || (of_w->taps > 1 && of_w->apart != 1)) return CATALOG_UNSUPPORTED;
        const std::int64_t most = std::max({of_h->apart, of_h->taps, of_w->taps, of_d->taps});
        if (most > most_copied) return CATALOG_UNSUPPORTED;  // their products would overflow
        wide = std::max<std::int64_t>(std::min(strip, of_w->count), positions);
        wide_copied = (wide - 1) * of_w->stride + of_w->taps;
        kept = std::max<std::int64_t>(of_h->taps - 1, 0) * of_h->apart + 1;
        of_block = of_d->taps * kept * wide_copied * lanes;
        if (kept * wide_copied > most_copied || of_block > most_copied) return CATALOG_UNSUPPORTED;
        const std::int64_t blocks = groups.blocks(), parts = (blocks + blocks_per_item - 1) / blocks_per_item;
        if (!Base::pack_weights()) return CATALOG_NO_MEMORY;
        const std::int64_t strips = (of_w->count + wide - 1) / wide, planes = args.n * of_d->count;
        const std::int64_t rows = rows_of_item(planes * strips * parts, of_h->count), bands = (of_h->count + rows - 1) / rows;
        std::atomic<bool> failed{false};
        parallel_for(args, threads, planes * bands * strips * parts, [&](std::int64_t item) {
            Unit* const room = thread_room<struct PaddedRows, Unit>().reserve(of_block * blocks_per_item);
            Meeting* const meetings = thread_room<struct PaddedMeetings, Meeting>().reserve(of_d->taps * of_h->taps);
            if (!room || !meetings) return failed.store(true);
            const Range part = piece_of(take_from(item, parts), blocks_per_item, blocks);
            const std::int64_t position = take_from(item, strips) * wide;
            const Range of_band = piece_of(take_from(item, bands), rows, of_h->count);
            const Strip of_item{room, meetings, item, position, part.first, part.end};
            if (of_w->stride == 1)
                compute_rows<1>(of_item, of_band);
            else
                compute_rows<2>(of_item, of_band);
            storing.finish();
        });
        return failed ? CATALOG_NO_MEMORY : CATALOG_OK;
    }

   private:
    // What some taps of a row of the filter read, and their factors: distances in units.
    struct Meeting {
        std::int64_t row, factors;
    };

    struct Strip {
        Unit* rows;  // for each vector of units and each tap in depth, `kept` rows
        Meeting* meetings;
        std::int64_t plane;       // of all images
        std::int64_t position;    // the first one of each row
        std::int64_t block, end;  // of channels
    };

    template <int step>
    void compute_rows(const Strip& of_item, const Range& rows) const {
        const Axis &of_d = window.axis[0], &of_h = window.axis[1];
        const std::int64_t d = of_item.plane % of_d.count, image = of_item.plane / of_d.count;
        const Range deep = of_d.inside(d);
        const T* const from = read.data + image * read.stride_image;
        std::int64_t next = std::max<std::int64_t>(of_h.origin + rows.first * of_h.stride, 0);  // the row to be copied
        const std::int64_t last = std::min(of_h.origin + (rows.end - 1) * of_h.stride + kept, of_h.extent);
        for (std::int64_t h = rows.first; h < rows.end; ++h) {
            const std::int64_t first = of_h.origin + h * of_h.stride;
            next = std::max(next, first);
            for (const std::int64_t end = std::min(first + kept, of_h.extent); next < end; ++next)
                for (std::int64_t td = deep.first; td < deep.end; ++td) {
                    const std::int64_t at_d = of_d.origin + d * of_d.stride + td * of_d.apart;
                    copy_row(of_item, from + read.index(at_d, next, 0) * read.all_channels, next + 1 < last,
                             (td * kept + next % kept) * wide_copied * lanes);
                }
            const std::int64_t place = made.index(of_d.first + d * of_d.step, of_h.first + h * of_h.step, 0);
            compute_row<step>(of_item, deep, h, made.data + image * made.stride_image + place * made.all_channels);
        }
    }

    // What a strip meets of a row of the image. The next row is prefetched: hardware does not foresee it.
    void copy_row(const Strip& of_item, const T* row, bool has_next, std::int64_t place) const {
        const Axis& of_w = window.axis[2];
        const std::int64_t channels = read.all_channels, w = of_w.origin + of_item.position * of_w.stride;
        const std::int64_t count = wide_copied, first = std::clamp<std::int64_t>(-w, 0, count);
        const std::int64_t end = std::clamp(of_w.extent - w, first, count);
        if (has_next && (is_large || reading != Reading::own))
            ask<false>(row + (of_w.extent + w + first) * channels + of_item.block * lanes, end - first, channels,
                       of_item.end - of_item.block);
        for (std::int64_t number = of_item.block; number < of_item.end; number += depth) {
            Unit* const to = of_item.rows + (number - of_item.block) / depth * of_block + place;
            const T* from = row + (w + first) * channels + first_copied(number);
            for (std::int64_t i = 0; i < first; ++i) store(to + i * lanes, Vector{});
#pragma GCC unroll 4
            for (std::int64_t i = first; i < end; ++i, from += channels)
                store(to + i * lanes, load_along<Unit>(from, lanes * depth));
            for (std::int64_t i = end; i < count; ++i) store(to + i * lanes, Vector{});
        }
    }

    // The first channel of the vector of units that a block is copied into. The last one begins early enough to be whole.
    std::int64_t first_copied(std::int64_t number) const {
        return std::min(number / depth * depth * lanes, read.all_channels - lanes * depth);
    }

    // The strip's positions of a row, whose elements begin at `row`.
    template <int step>
    void compute_row(const Strip& of_item, const Range& deep, std::int64_t h, T* row) const {
        const Axis &of_h = window.axis[1], &of_w = window.axis[2];
        const Range high = of_h.inside(h);
        const std::int64_t width = reading == Reading::own ? 1 : groups.width;
        const std::int64_t of_tap = (width + depth - 1) / depth * lanes, of_row = of_w.taps * of_tap;
        const std::int64_t blocks_read = (of_tap / lanes + lanes - 1) / lanes;  // of a group
        Meeting* const meetings = of_item.meetings;
        Meeting* end = meetings;
        for (std::int64_t td = deep.first; td < deep.end; ++td) {
            std::int64_t at = (of_h.origin + h * of_h.stride + high.first * of_h.apart) % kept;
            for (std::int64_t th = high.first; th < high.end; ++th) {
                *end++ = {(td * kept + at) * wide_copied * lanes, (td * of_h.taps + th) * of_row};
                at += of_h.apart;
                if (at >= kept) at -= kept;
            }
        }
        const std::int64_t count = std::min(wide, of_w.count - of_item.position), apart = of_w.step * made.all_channels;
        T* const first = row + (of_w.first + of_item.position * of_w.step) * made.all_channels;
        // A line that bypasses the caches has to be whole: vectors of the same line are collected before.
        const std::int64_t channels = (of_item.end - of_item.block) * lanes;
        const bool collects = storing.is_around() && count >= positions && groups.block(of_item.end - 1).stores_all();
        alignas(vector_bytes) T collected[strip * blocks_per_item * lanes];
        for (std::int64_t number = of_item.block; number < of_item.end; ++number) {
            const ChannelBlock block = groups.block(number);
            const bool stores_all = count >= positions && block.stores_all();
            const Unit* const rows = of_item.rows + first_read(of_item, block, number, blocks_read);
            const Unit* const factors = packed + number * taps * of_tap;
            for (std::int64_t p = 0; p < count; p += positions) {
                // The last tile is whole, if there are as many positions: some are computed twice.
                const std::int64_t begin = std::max<std::int64_t>(std::min(p, count - positions), 0);
                const Unit* const from = rows + begin * step * lanes;
                Float sums[chains][positions];  // set one by one: as a whole, they would be set in memory
#pragma GCC unroll 16
                for (int i = 0; i < chains * positions; ++i) sums[i / positions][i % positions] = Float{};
                for (const Meeting* of = meetings; of < end; ++of)
                    if constexpr (reading == Reading::own)
                        for (std::int64_t t = 0; t < of_row; t += lanes) {
                            const float* const read = from + of->row + t;
                            const Float factor = load(factors + of->factors + t);
#pragma GCC unroll 8
                            for (int i = 0; i < positions; ++i) sums[0][i] += load(read + i * step * lanes) * factor;
                        }
                    else
                        for_taps<step>(of_w, [&](auto some, int tw) {
                            const Unit *read = from + of->row + tw * lanes, *const last = read + blocks_read * of_block;
                            const Unit* factor = factors + of->factors + tw * of_tap;
                            const auto add = [&](auto channel, auto is_second) {
                                add_taps<step, some, is_second>(channel, read, factor, of_tap, sums);
                                factor += lanes;
                            };
                            if constexpr (reading == Reading::elements)
                                for (; read < last; read += of_block)
                                    for (int j = 0; j < std::min<int>(lanes, width / depth); j += 2) {
                                        add([=](const Unit* from) { return splat_unit(from + j); }, std::false_type{});
                                        add([=](const Unit* from) { return splat_unit(from + j + 1); }, std::true_type{});
                                    }
                            else if (width == 2)
                                add_lanes_of_groups<2>(add);
                            else if (width == 4)
                                add_lanes_of_groups<4>(add);
                            else if constexpr (lanes > 8)
                                add_lanes_of_groups<8>(add);
                        });
#pragma GCC unroll 8
                for (int i = 0; i < positions; ++i) sums[0][i] = chains == 2 ? sums[0][i] + sums[chains - 1][i] : sums[0][i];
                T* to = first + begin * apart + block.first;
                if (stores_all) {
                    if (collects) to = collected + begin * channels + (number - of_item.block) * lanes;
                    const std::int64_t next = collects ? channels : apart;
#pragma GCC unroll 8
                    for (int i = 0; i < positions; ++i, to += next) store_sum(to, sums[0][i]);
                } else {
                    T some[positions][lanes];
#pragma GCC unroll 8
                    for (int i = 0; i < positions; ++i) store_sum(some[i], sums[0][i]);
                    for (int i = 0; i < std::min<std::int64_t>(positions, count); ++i)
                        block.store_to(to + i * apart, some[i]);
                }
            }
        }
        if (collects)
            for (std::int64_t i = 0; i < count; ++i)
                storing.copy(collected + i * channels, channels, first + i * apart + of_item.block * lanes);
    }

    // Where a block's positions begin in the copied rows of an item.
    std::int64_t first_read(const Strip& of_item, const ChannelBlock& block, std::int64_t number,
                            std::int64_t blocks_read) const {
        if constexpr (depth > 1) return (block.read - first_copied(number)) / depth;
        return (number - of_item.block) / blocks_read * blocks_read * of_block;
    }

    static void store_sum(T* to, Float sum) {
        if constexpr (depth > 1)
            store_bits(to, Units<Unit>::narrow(sum));
        else
            store(to, sum);
    }

    static Float splat_unit(const float* from) { return splat(*from); }
    static Bits splat_unit(const BrainPair* from) { return Bits{} + from->bits; }

    // Calls add() with each unit of a group, in the lanes of its group.
    template <int width, class Add>
    static void add_lanes_of_groups(Add add) {
        add_each<width>(add, std::make_integer_sequence<int, width / depth>{});
    }

    template <int width, class Add, int... j>
    static void add_each(Add add, std::integer_sequence<int, j...>) {
        (add(lane_of_group<width, j>, std::bool_constant<j % 2 == 1>{}), ...);
    }

    // Unit j of its group in each lane. A permutation that is known when it is compiled is faster.
    template <int width, int j>
    static Vector lane_of_group(const Unit* from) {
        Ints index;
        for (int lane = 0; lane < lanes; ++lane) index[lane] = lane / width * (width / depth) + j;
        if constexpr (depth == 1)
            return permute(load(from), index);
        else
            return (Vector)permute((Float)Units<Unit>::load_half(from), index);
    }

    // Adds the products of one unit of each group and `some` taps, which are neighbours, to the sums. Seven sums alone are
    // too few to hide the latency of three additions to each: every second unit has sums of its own, or, with few registers,
    // its products of a position are added up first.
    template <int step, int some, bool is_second, class Channel>
    [[gnu::always_inline]] static void add_taps(Channel channel, const Unit* read, const Unit* factors,
                                                std::int64_t of_tap, Float (&sums)[chains][positions]) {
        constexpr bool apart = is_second && chains == 1;
        asm("" : "+r"(read));  // or g++ would load what all channels meet before the first one, and keep it in memory
        Vector factor[some];
        Float products[positions];
#pragma GCC unroll 4
        for (int t = 0; t < some; ++t) factor[t] = load(factors + t * of_tap);
#pragma GCC unroll 16
        for (int column = 0; column < step * (positions - 1) + some; ++column) {
            const Vector x = channel(read + column * lanes);
#pragma GCC unroll 4
            for (int t = some - 1; t >= 0; --t)
                if (column >= t && (column - t) % step == 0 && column - t < step * positions) {
                    const int i = (column - t) / step;
                    if constexpr (!apart)
                        Units<Unit>::multiply_add(sums[is_second && chains == 2][i], x, factor[t]);
                    else
                        products[i] = t == 0 ? x * factor[t] : products[i] + x * factor[t];
                    if (apart && t == some - 1) sums[0][i] += products[i];
                }
        }
    }

    std::int64_t wide, wide_copied;  // positions of a strip, and what they meet in a row
    std::int64_t kept, of_block;     // rows, and floats for a block of channels
};

}  // namespace catalog::host
