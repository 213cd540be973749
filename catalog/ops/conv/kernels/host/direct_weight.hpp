// The gradient of the weights of narrow groups. Sums of some rows of an image stay in registers; rows are taken in bands, and
// bands in chunks, whose sums are added at the end in the same order for any number of threads. Of bf16, pairs of neighbouring
// positions are multiplied at once, if the CPU does.
#pragma once

#include "narrow.hpp"

namespace catalog::host {

template <class Row, Reading reading>
class NarrowGradients {
    using T = typename Row::dtype;
    using Unit = std::conditional_t<Row::in_pairs, BrainPair, float>;  // of copies
    static constexpr int depth = Units<Unit>::depth;
    static constexpr bool has_many = vector_bytes != 32;  // registers
    static constexpr int positions = has_many ? 7 : 4;
    // Channels of a group whose sums fit in registers, and sums of each that hide the latency of an addition.
    static constexpr int part = reading == Reading::own ? 1 : reading == Reading::elements && has_many ? 4 : 2;
    static constexpr int chains = has_many && part < 4 ? 2 : 1;
    static constexpr int blocks_per_item = reading == Reading::own ? 16 : 4;
    // Where several channels of the input meet each of the output, a block's channels of a band are copied: in the tensors,
    // they may be powers of two apart, and share few sets of the cache. Floats of a position of the input, of at most two
    // vectors.
    static constexpr int copied = reading == Reading::own ? 0 : reading == Reading::elements ? 2 * lanes : lanes;
    static constexpr std::int64_t most_copied = 1 << 16;  // floats

   public:
    NarrowGradients(const catalog_args& args, const Geometry& of, const Window& window, int threads)
        : args(args),
          window{{ascending(window.axis[0]), ascending(window.axis[1]), ascending(window.axis[2])}},
          threads(threads),
          groups(args),
          taps(window.taps()),
          of_block(taps * groups.width * lanes),
          input(args.input, of.size, args.c, 1, 0, true),
          output(args.output, of.out, args.k, 1, 0, true),
          is_large(are_large(args, input, output)) {
        constexpr std::int64_t in_band = 64, in_chunk = 1 << 22;  // positions, products
        constexpr std::int64_t most_chunks = 16, enough_items = 64;
        const std::int64_t planes = args.n * this->window.axis[0].count;
        const std::int64_t high = this->window.axis[1].count, wide = this->window.axis[2].count;
        rows_of_band = std::min((in_band + wide - 1) / wide, high);
        bands_of_plane = (high + rows_of_band - 1) / rows_of_band;
        bands = planes * bands_of_plane;
        const Axis &of_h = this->window.axis[1], &of_w = this->window.axis[2];
        wide_seen = (wide - 1) * of_w.stride + (of_w.taps - 1) * of_w.apart + 1;
        const std::int64_t high_seen = (rows_of_band - 1) * of_h.stride + (of_h.taps - 1) * of_h.apart + 1;
        // The product of both would overflow where taps are far apart.
        copies = copied > 0 && std::max(high_seen, wide_seen) <= most_copied;
        if (copies) {
            seen_floats = high_seen * wide_seen * copied;
            made_floats = rows_of_band * vectors_of_row() * lanes;
            copies = seen_floats + made_floats <= most_copied;
        }
        const std::int64_t products = planes * high * wide * groups.blocks() * of_block;
        const std::int64_t most = std::clamp(enough_items / std::max<std::int64_t>(parts(), 1), std::int64_t{1}, most_chunks);
        chunks = std::clamp<std::int64_t>(products / in_chunk, 1, std::clamp<std::int64_t>(bands, 1, most));
    }

    // CATALOG_UNSUPPORTED for bands that are too large to be copied as pairs.
    catalog_status run() {
        if (Row::in_pairs && (!copies || args.c < lanes)) return CATALOG_UNSUPPORTED;
        const std::int64_t blocks = groups.blocks(), parts = this->parts();
        sums = thread_room<struct PartialSums, float>().reserve(chunks * blocks * of_block + 1);
        if (!sums) return CATALOG_NO_MEMORY;
        parallel_for(args, threads, chunks * parts, [&](std::int64_t item) {
            const std::int64_t chunk = item / parts, first = item % parts * blocks_per_item;
            const std::int64_t end = std::min(first + blocks_per_item, blocks);
            float* const to = sums + chunk * blocks * of_block;
            std::fill(to + first * of_block, to + end * of_block, 0.0f);
            with_step(window.axis[2], [&](auto step) {
                for (std::int64_t band = chunk * bands / chunks; band < (chunk + 1) * bands / chunks; ++band)
                    for (std::int64_t block = first; block < end; ++block)
                        if (Row::in_pairs || groups.block(block).is_whole())
                            add_band<step>(std::integral_constant<int, lanes>{}, block, band, to + block * of_block);
                        else if constexpr (!Row::in_pairs)
                            add_band<0>(groups.block(block).count, block, band, to + block * of_block);
            });
        });
        parallel_for(args, threads, blocks, [&](std::int64_t block) {
            store_gradients(args, groups, block, sums, of_block, chunks);
        });
        return CATALOG_OK;
    }

   private:
    std::int64_t parts() const { return (groups.blocks() + blocks_per_item - 1) / blocks_per_item; }

    // Those of a row of the gradient, for a block of channels.
    std::int64_t vectors_of_row() const { return (window.axis[2].count + depth - 1) / depth; }

    // What the products of a band read, and how far apart its rows and positions are. `whole`: a copy, in which zeros are
    // around the image.
    template <class Element, bool whole>
    struct Lines {
        const Element* data;
        std::int64_t row, position;

        Lines from(std::int64_t rows) const { return {data + rows * row, row, position}; }
    };

    // The products of a block's channels in a band are added to its sums.
    template <int step, class Count>
    void add_band(Count count, std::int64_t number, std::int64_t band, float* to) const {
        const Axis of_d = window.axis[0], of_h = window.axis[1], of_w = window.axis[2];
        const ChannelBlock block = groups.block(number);
        const std::int64_t channels = args.c, plane = band / bands_of_plane, d = plane % of_d.count;
        const Range rows{band % bands_of_plane * rows_of_band,
                         std::min((band % bands_of_plane + 1) * rows_of_band, of_h.count)};
        const T* const read = input.data + plane / of_d.count * input.stride_image + block.read;
        const Lines<T, false> made{output.data + plane / of_d.count * output.stride_image + block.first +
                                output.index(d, rows.first, 0) * channels,
                            output.extents[2] * channels, channels};
        const Range deep = of_d.inside(d);
        if (is_large) {
            const std::int64_t row = of_h.origin + (rows.end - 1) * of_h.stride + (of_h.taps - 1) * of_h.apart + 1;
            for (std::int64_t td = deep.first; td < deep.end; ++td)
                ask<false>(read + input.index(of_d.origin + d * of_d.stride + td * of_d.apart, row, 0) * channels,
                           rows_of_band * of_h.stride * of_w.extent, channels, 1);
            ask<false>(made.from(rows.end - rows.first).data, rows_of_band * of_w.count, channels, 1);
        }
        Unit* copy = nullptr;
        if constexpr (copied > 0 && !std::is_same_v<Count, int>)
            if (copies) copy = thread_room<struct CopiedBand, Unit>().reserve(seen_floats + made_floats);
        if (copy) copy_made(made, rows.end - rows.first, copy + seen_floats);
        for (std::int64_t td = deep.first; td < deep.end; ++td) {
            // The first row that the first tap meets; it may lie outside of the image.
            const std::int64_t at_d = of_d.origin + d * of_d.stride + td * of_d.apart;
            const std::int64_t first_h = of_h.origin + rows.first * of_h.stride;
            float* const of_plane = to + td * of_h.taps * of_w.taps * groups.width * lanes;
            if constexpr (copied > 0)
                if (copy) {
                    copy_seen(read + input.index(at_d, 0, 0) * channels, first_h, rows.end - rows.first, copy);
                    add_taps<step>(count, Lines<Unit, true>{copy, wide_seen * copied, copied},
                                   Lines<Unit, true>{copy + seen_floats, vectors_of_row() * lanes, lanes}, rows, of_plane);
                    continue;
                }
            if constexpr (Row::in_pairs) continue;
            const Lines<T, false> seen{read + input.index(at_d, first_h, 0) * channels, input.extents[2] * channels,
                                       channels};
            add_taps<copied == 0 ? step : 0>(count, seen, made, rows, of_plane);
        }
    }

    // Those of all taps in a plane. `seen` begins with what the first tap of the first row meets, `made` with that row.
    template <int step, class Count, class Element, bool whole>
    void add_taps(Count count, const Lines<Element, whole>& seen, const Lines<Element, whole>& made, const Range& rows,
                  float* to) const {
        const Axis of_h = window.axis[1], of_w = window.axis[2];
        for (std::int64_t th = 0; th < of_h.taps; ++th) {
            const Range inside = of_h.positions_of(th);
            const std::int64_t first = std::max(rows.first, inside.first), end = std::min(rows.end, inside.end);
            if (first >= end) continue;
            const auto from = seen.from((first - rows.first) * of_h.stride + th * of_h.apart);
            const auto of_rows = made.from(first - rows.first);
            float* const of_row = to + th * of_w.taps * groups.width * lanes;
            for_taps<step>(of_w, [&](auto some, int tw) {
                for (std::int64_t j = 0; j < groups.width; j += part)
                    add_rows<step, some>(count, j, from, of_rows, end - first, tw, of_row + (tw * groups.width + j) * lanes);
            });
        }
    }

    // The products of `rows` rows, for some taps and channels of each group.
    template <int step, int some, class Count, class Element, bool whole>
    void add_rows(Count count, std::int64_t j, Lines<Element, whole> seen, Lines<Element, whole> made, std::int64_t rows,
                  int tw, float* to) const {
        constexpr int deep = std::is_same_v<Element, BrainPair> ? 2 : 1;  // positions in a vector of the gradient
        const Axis axis = window.axis[2];
        const std::int64_t origin = (whole ? 0 : axis.origin) + tw * axis.apart;
        const auto look = [&](std::int64_t at) {
            return whole || is_inside(at, axis.extent) ? seen.data + at * seen.position : zeros<Element>;
        };
        const std::int64_t of_stride = window.axis[1].stride;
        Float total[chains][some][part];  // set one by one: as a whole, they would be set in memory
        for_sums<chains, some, part>([&](int c, int t, int k) { total[c][t][k] = Float{}; });
        for (std::int64_t row = 0; row < rows; ++row, seen = seen.from(of_stride), made = made.from(1)) {
            std::int64_t p = 0;
            if constexpr (step > 0) {
                constexpr int apart = deep * step;
                for (; p + positions <= axis.count / deep; p += positions) {
                    decltype(load(made.data)) gradient[positions];
#pragma GCC unroll 8
                    for (int i = 0; i < positions; ++i) gradient[i] = load(made.data + (p + i) * made.position);
                    constexpr int columns = apart * (positions - 1) + some;
#pragma GCC unroll 16
                    for (int column = 0; column < columns; ++column) {
                        if (column % apart >= some) continue;
                        const Element* const from = look(origin + p * apart + column);
#pragma GCC unroll 4
                        for (int k = 0; k < part; ++k) {
                            const auto x = groups.channel(j + k, count)(from);
#pragma GCC unroll 4
                            for (int t = 0; t < some; ++t)
                                if (column >= t && (column - t) % apart == 0 && column - t < apart * positions)
                                    add_products(total[(column - t) / apart % chains][t][k], x, gradient[(column - t) / apart]);
                        }
                    }
                }
            }
            for (; p * deep < axis.count; ++p) {
                const auto gradient = load_first(made.data + p * made.position, count);
                const bool is_half = deep > 1 && p * deep + 1 == axis.count;
#pragma GCC unroll 4
                for (int t = 0; t < some; ++t) {
                    const Element* const from = look(origin + p * deep * axis.stride + t * axis.apart);
#pragma GCC unroll 4
                    for (int k = 0; k < part; ++k) {
                        const auto x = groups.channel(j + k, count)(from);
                        if (is_half)
                            total[0][t][k] += first_of_pair(x) * first_of_pair(gradient);
                        else
                            add_products(total[0][t][k], x, gradient);
                    }
                }
            }
        }
        for_sums<1, some, part>([&](int, int t, int k) {
            Float sum = total[0][t][k];
#pragma GCC unroll 4
            for (int c = 1; c < chains; ++c) sum += total[c][t][k];
            float* const at = to + (t * groups.width + k) * lanes;
            store(at, load(at) + sum);
        });
    }

    static void add_products(Float& sum, Float x, Float gradient) { sum += x * gradient; }
    static Float first_of_pair(Float x) { return x; }
    static Float first_of_pair(Bits pairs) { return (Float)(pairs << 16); }
    static void add_products(Float& sum, Bits x, Bits gradient) {
        if constexpr (Row::in_pairs) Units<Unit>::multiply_add(sum, x, gradient);
    }

    // A block's channels of some rows of the gradient: with pairs, those of two neighbours in a row.
    void copy_made(const Lines<T, false>& made, std::int64_t rows, Unit* to) const {
        const std::int64_t count = window.axis[2].count;
        for (std::int64_t row = 0; row < rows; ++row)
            for (std::int64_t p = 0; p < count; p += depth, to += lanes) {
                const T* const from = made.data + row * made.row + p * made.position;
                copy_vector(from, p + 1 < count ? from + made.position : zeros<T>, to);
            }
    }

    static void copy_vector(const T* from, [[maybe_unused]] const T* next, Unit* to) {
        if constexpr (Row::in_pairs)
            store(to, Units<Unit>::across(load_bits<HalfBits>(from), load_bits<HalfBits>(next)));
        else
            store(to, load(from));
    }

    // What taps meet from some rows on, the first of which is row `h` of a plane of the input: with pairs, each also has what
    // the same tap meets from the next position.
    void copy_seen(const T* plane, std::int64_t h, std::int64_t rows, Unit* to) const {
        const Axis &of_h = window.axis[1], &of_w = window.axis[2];
        const std::int64_t last = h + (rows - 1) * of_h.stride + (of_h.taps - 1) * of_h.apart;
        for (; h <= last; ++h) {
            const T* const row = plane + h * of_w.extent * args.c;
            for (std::int64_t i = 0; i < wide_seen; ++i, to += copied) {
                const auto seen = [&](std::int64_t at, int j) {
                    const std::int64_t w = of_w.origin + at;
                    const bool inside = is_inside(h, of_h.extent) && is_inside(w, of_w.extent) && at < wide_seen;
                    return inside ? row + w * args.c + j : zeros<T>;
                };
                for (int j = 0; j < copied; j += lanes)
                    if (j == 0 || groups.width > lanes) copy_vector(seen(i, j), seen(i + of_w.stride, j), to + j);
            }
        }
    }

    template <int first, int second, int third, class Body>
    static void for_sums(Body body) {
#pragma GCC unroll 4
        for (int i = 0; i < first; ++i)
#pragma GCC unroll 4
            for (int j = 0; j < second; ++j)
#pragma GCC unroll 4
                for (int k = 0; k < third; ++k) body(i, j, k);
    }

    const catalog_args& args;
    const Window window;
    const int threads;
    const Groups<T, reading> groups;
    const std::int64_t taps, of_block;
    const Image<T> input, output;
    const bool is_large;
    std::int64_t rows_of_band, bands_of_plane, bands, chunks, wide_seen, seen_floats = 0, made_floats = 0;
    bool copies;  // a block's channels of a band
    float* sums = nullptr;
};

}  // namespace catalog::host
