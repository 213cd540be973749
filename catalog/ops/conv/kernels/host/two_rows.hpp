// Depthwise convolutions with filters of 3 x 3 neighbours, at most one row or column of them outside of the image at each
// side, from the image itself, for vectors of 512 bits. Two rows are computed together: they share what they read of the
// rows between, and the factors of a vector of channels stay in registers for all of their positions.
//
// With AVX512-BF16, rows of the image are multiplied as pairs: each row of a tile meets one pair, and a third row alone.
#pragma once

#include "host/units.hpp"
#include "narrow.hpp"

namespace catalog::host {

// The elements of a vector that are seen: all, or none, which reads no memory.
class Seen {
   public:
    explicit Seen(bool sees) : which(sees ? all_lanes : 0) {}

    Float load(const float* from) const { return __builtin_ia32_loadups512_mask(from, Float{}, which); }
    template <class T>
    Float load(const T* from) const {
        const HalfBits bits = load_bits(from);
        T elements[lanes];
        std::memcpy(elements, &bits, sizeof bits);
        return host::load(elements);
    }
    template <class T>
    HalfBits load_bits(const T* from) const {
#if defined(__clang__)
        using Pointer = const Shorts*;
#else
        using Pointer = const short*;
#endif
        return (HalfBits)__builtin_ia32_loaddquhi256_mask(reinterpret_cast<Pointer>(from), Shorts{}, which);
    }

   private:
    std::uint16_t which;
};

// Lines of the cache that are used next, asked for a few at a time in the order of memory.
template <bool for_writing>
class LinesAhead {
   public:
    LinesAhead() = default;
    template <class T>
    LinesAhead(const T* from, std::int64_t elements, std::int64_t times)
        : next(reinterpret_cast<const char*>(from)),
          end(next + elements * static_cast<std::int64_t>(sizeof(T))),
          lines((end - next + 64 * times - 1) / (64 * times)) {}

    [[gnu::always_inline]] void ask() {
        if (next >= end) return;
        for (std::int64_t i = 0; i < lines; ++i, next += 64) __builtin_prefetch(next, for_writing, 2);
    }

   private:
    const char *next = nullptr, *end = nullptr;
    std::int64_t lines = 0;  // at a time
};

template <class Row>
class DepthwiseTwoRows : NarrowConvolution<Row, Reading::own> {
    using Base = NarrowConvolution<Row, Reading::own>;
    using Base::args, Base::groups, Base::is_large, Base::made, Base::packed, Base::read, Base::storing, Base::taps;
    using Base::threads, Base::window;
    using T = typename Row::dtype;
    static constexpr int positions = 4, wide = 3;  // of a tile in a row; taps of a row, and of a column
    static constexpr std::int64_t most_blocks = 24;
    // Results that fit into the last cache with the inputs, after a prefetch, are stored in less time than past the caches.
    static constexpr std::int64_t most_bytes_in_cache = 26 << 20;

   public:
    DepthwiseTwoRows(const catalog_args& args, const Geometry& of, const Window& window, int threads)
        : Base(args, of, window, threads, most_bytes_in_cache) {}

    // CATALOG_UNSUPPORTED for other filters, and for few channels or positions.
    catalog_status run() {
        const Axis *const of_d = window.axis, *const of_h = of_d + 1, *const of_w = of_d + 2;
        for (const Axis* axis : {of_h, of_w}) {
            const std::int64_t beyond = axis->origin + (axis->count - 1) * axis->stride + wide - axis->extent;
            const bool meets_neighbours = axis->taps == wide && axis->apart == 1 && axis->stride <= 2 && axis->step == 1;
            if (!meets_neighbours || axis->origin < -1 || beyond > 1) return CATALOG_UNSUPPORTED;
        }
        if (of_d->taps != 1 || of_d->step != 1 || of_h->stride != of_w->stride) return CATALOG_UNSUPPORTED;
        if (args.c < lanes || of_w->count < positions) return CATALOG_UNSUPPORTED;
        const std::int64_t of_row = read.extents[2] * read.all_channels;
        T* const room = thread_room<struct RowOfZeros, T>().reserve(of_row);
        if (!room || !Base::pack_weights()) return CATALOG_NO_MEMORY;
        std::fill_n(room, of_row, T{});
        zeros = room;
        const std::int64_t blocks = groups.blocks(), planes = args.n * of_d->count, of_part = evenly(blocks, most_blocks);
        const std::int64_t parts = (blocks + of_part - 1) / of_part;
        const std::int64_t enough_items = 8 * threads;
        std::int64_t rows = 28;  // of an item: those that two of them read are read twice
        const auto bands_of = [&] { return (of_h->count + rows - 1) / rows; };
        while (rows > 4 && planes * bands_of() * parts < enough_items) rows = (rows / 2 + 1) / 2 * 2;
        const std::int64_t bands = bands_of();
        parallel_for(args, threads, planes * bands * parts, [&](std::int64_t item) {
            const Range part = piece_of(take_from(item, parts), of_part, blocks);
            const Range of_band = piece_of(take_from(item, bands), rows, of_h->count);
            if (of_h->stride == 1)
                compute_band<1>(item, of_band, part);
            else
                compute_band<2>(item, of_band, part);
            storing.finish();
        });
        return CATALOG_OK;
    }

   private:
    template <int step>
    void compute_band(std::int64_t plane, const Range& band, const Range& part) const {
        const Axis &of_d = window.axis[0], &of_h = window.axis[1], &of_w = window.axis[2];
        const std::int64_t d = take_from(plane, of_d.count);
        const T* const from = read.data + plane * read.stride_image +
                              read.index(of_d.origin + d * of_d.stride, of_h.origin, 0) * read.all_channels;
        T* const to = made.data + plane * made.stride_image + made.index(d, 0, 0) * made.all_channels;
        const std::int64_t of_read = read.extents[2] * read.all_channels, of_made = of_w.count * made.all_channels;
        const std::int64_t tiles = (part.end - part.first) * ((of_w.count + positions - 1) / positions);
        for (std::int64_t h = band.first; h < band.end; h += 2) {
            TwoRows<step> of{};
            for (int i = 0; i < TwoRows<step>::met; ++i)
                if (is_inside(of_h.origin + h * step + i, of_h.extent) && (i < wide || h + 1 < band.end))
                    of.from[i] = from + (h * step + i) * of_read;
            of.to[0] = to + h * of_made;
            of.to[1] = h + 1 < band.end ? of.to[0] + of_made : nullptr;
            if (is_large && part.end - part.first == groups.blocks() && h + 2 < band.end) {
                const std::int64_t row = h * step + TwoRows<step>::met, left = of_h.extent - of_h.origin - row;
                const std::int64_t to_make = std::min<std::int64_t>(2, band.end - h - 2);
                if (left > 0) of.to_read = {from + row * of_read, std::min<std::int64_t>(2 * step, left) * of_read, tiles};
                if (!storing.is_around()) of.to_write = {of.to[0] + 2 * of_made, to_make * of_made, tiles};
            }
            for (std::int64_t block = part.first; block < part.end; ++block) compute_rows<step>(of, block);
        }
    }

    // One or two rows, those of the image that they meet, and what is used after them; nullptr: there is no such row.
    template <int step>
    struct TwoRows {
        static constexpr int met = step + wide;
        const T* from[met];
        T* to[2];
        LinesAhead<false> to_read;
        LinesAhead<true> to_write;
    };

    // For a vector of channels.
    template <int step>
    [[gnu::noinline]] void compute_rows(TwoRows<step>& of, std::int64_t number) const {
        const Axis& of_w = window.axis[2];
        constexpr int columns = step * (positions - 1) + wide;
        const std::int64_t channels = read.all_channels;
        const ChannelBlock block = groups.block(number);
        const Factors<step, Row::in_pairs> factors(packed + number * taps * lanes, of.from);
        const T* rows[TwoRows<step>::met];
        for (int i = 0; i < TwoRows<step>::met; ++i) {
            const T* const row = of.from[i] ? of.from[i] + block.first : Row::in_pairs ? zeros : nullptr;
            rows[i] = row ? row + of_w.origin * channels : nullptr;
        }
        for (std::int64_t p = 0; p < of_w.count; p += positions) {
            of.to_read.ask();
            of.to_write.ask();
            // The last tile is whole: some positions are computed twice.
            const std::int64_t begin = std::min(p, of_w.count - positions), w = of_w.origin + begin * step;
            const Seen first(w >= 0), last(w + columns <= of_w.extent);
            Float sums[2][positions];  // set one by one: as a whole, they would be set in memory
#pragma GCC unroll 8
            for (int i = 0; i < 2 * positions; ++i) sums[i / positions][i % positions] = Float{};
            factors.add_to(sums, rows, begin * step * channels, channels, first, last);
            store_row(sums[0], block, of.to[0] + begin * channels + block.first);
            if (of.to[1]) store_row(sums[1], block, of.to[1] + begin * channels + block.first);
        }
    }

    // Of a vector of channels.
    template <int step, bool paired>
    struct Factors {
        Float of[wide][wide];

        Factors(const float* packed, const T* const*) {
#pragma GCC unroll 9
            for (int t = 0; t < wide * wide; ++t) of[t / wide][t % wide] = load(packed + t * lanes);
        }

        [[gnu::always_inline]] void add_to(Float (&sums)[2][positions], const T* const (&rows)[step + wide],
                                           std::int64_t begin, std::int64_t channels, Seen first, Seen last) const {
            constexpr int columns = step * (positions - 1) + wide;
#pragma GCC unroll 8
            for (int i = 0; i < step + wide; ++i) {
                if (!rows[i]) continue;
#pragma GCC unroll 16
                for (int column = 0; column < columns; ++column) {
                    const T* const at = rows[i] + begin + column * channels;
                    const Float x = column == 0 ? first.load(at) : column == columns - 1 ? last.load(at) : load(at);
#pragma GCC unroll 2
                    for (int r = 0; r < 2; ++r)
#pragma GCC unroll 4
                        for (int t = 0; t < wide; ++t)
                            if (i >= r * step && i - r * step < wide && is_met(column, t))
                                sums[r][(column - t) / step] += x * of[i - r * step][t];
                }
            }
        }

        static constexpr bool is_met(int column, int t) {
            return column >= t && (column - t) % step == 0 && column - t < step * positions;
        }
    };

    // Of the three rows that meet a row, two are a pair: for the first row, the first two, and for the second row the last
    // two. Rows outside of the image are zeros, and so are their factors.
    template <int step>
    struct Factors<step, true> {
        Bits pairs[2][wide];
        Float singles[2][wide];

        Factors(const float* packed, const T* const* rows) {
            const auto factor = [&](int row, int tap, int t) {
                return rows[row] ? load(packed + (tap * wide + t) * lanes) : Float{};
            };
#pragma GCC unroll 4
            for (int t = 0; t < wide; ++t) {
                pairs[0][t] = (Bits)factor(0, 0, t) >> 16 | (Bits)factor(1, 1, t);
                pairs[1][t] = (Bits)factor(step + 1, 1, t) >> 16 | (Bits)factor(step + 2, 2, t);
                singles[0][t] = factor(2, 2, t);
                singles[1][t] = factor(step, 0, t);
            }
        }

        [[gnu::always_inline]] void add_to(Float (&sums)[2][positions], const T* const (&rows)[step + wide],
                                           std::int64_t begin, std::int64_t channels, Seen first, Seen last) const {
            constexpr int columns = step * (positions - 1) + wide;
#pragma GCC unroll 16
            for (int column = 0; column < columns; ++column) {
                const auto seen = [&](int row) {
                    const T* const at = rows[row] + begin + column * channels;
                    return column == 0             ? first.load_bits(at)
                           : column == columns - 1 ? last.load_bits(at)
                                                   : load_bits<HalfBits>(at);
                };
                const Bits pair[] = {Units<BrainPair>::across(seen(0), seen(1)),
                                     Units<BrainPair>::across(seen(step + 1), seen(step + 2))};
                const Float third = step == 1 ? (Float)(pair[1] << 16) : (Float)widen_upwards(seen(2));
                const Float single[] = {third, step == 1 ? (Float)(pair[0] & 0xffff0000u) : third};
#pragma GCC unroll 2
                for (int r = 0; r < 2; ++r)
#pragma GCC unroll 4
                    for (int t = 0; t < wide; ++t)
                        if (Factors<step, false>::is_met(column, t)) {
                            Float& sum = sums[r][(column - t) / step];
                            Units<BrainPair>::multiply_add(sum, pair[r], pairs[r][t]);
                            sum += single[r] * singles[r][t];
                        }
            }
        }
    };

    [[gnu::always_inline]] void store_row(const Float (&sums)[positions], const ChannelBlock& block, T* to) const {
        const std::int64_t channels = made.all_channels;
        if (!block.stores_all()) {
            T some[lanes];
#pragma GCC unroll 8
            for (int i = 0; i < positions; ++i) {
                store_sum(some, sums[i]);
                block.store_to(to + i * channels, some);
            }
        } else if (sizeof(T) == 4 && storing.is_around()) {
#pragma GCC unroll 8
            for (int i = 0; i < positions; ++i) storing.store(to + i * channels, sums[i], lanes);
        } else {
#pragma GCC unroll 8
            for (int i = 0; i < positions; ++i) store_sum(to + i * channels, sums[i]);
        }
    }

    static void store_sum(T* to, Float sum) {
        if constexpr (Row::in_pairs)
            store_bits(to, Units<BrainPair>::narrow(sum));
        else
            store(to, sum);
    }

    const T* zeros = nullptr;  // a row of the image
};

}  // namespace catalog::host
