// The gradient of an input of few channels. The gradient of the output is multiplied with all weights at once, so that taps
// and channels together fill vectors which few channels would not, and each product is added to the pixel that it belongs
// to. Channels are the last axis. Products are those of vectors, or in AMX tiles.
#pragma once

#include <atomic>

#include "host/blocks.hpp"
#include "image.hpp"
#include "weights.hpp"

namespace catalog::host {

template <class Traits>
struct ScatteredRow : Traits {
    static constexpr bool a_along = true;
};

template <class Traits, class Unit>
class ScatteredProduct {
    using Row = ScatteredRow<Traits>;
    using T = typename Row::dtype;
    using Block = Blocks<Row, Unit>;
    static constexpr int factors = Block::factors, panel = Block::panel, step = Block::step;
    static constexpr int tile_m = Row::tile_m, tile_n = Row::tile_n, tile_k = Row::tile_k, gap = 16, row_s = tile_n + gap;
    static constexpr std::int64_t most_elements = 1 << 16;  // of a band, so that it stays in L2

    struct Scratch {
        alignas(64) float sums[tile_m * row_s];
        alignas(64) Unit a[Block::a_step];
    };

   public:
    ScatteredProduct(const catalog_args& args, const Geometry& of, int threads)
        : args(args),
          of(of),
          threads(threads),
          channels_in(args.c / args.g),
          channels_out(args.k / args.g),
          columns(of.taps() * channels_in),
          across(of.size[0] > 1 ? 0 : of.size[1] > 1 ? 1 : 2),
          slice(Geometry::volume(of.size) / of.size[across] * channels_in) {
        units = (channels_out + factors * Block::whole - 1) / (factors * Block::whole) * Block::whole;
        steps = (units + step - 1) / step;
        // A band's neighbours compute some products a second time.
        const std::int64_t rows = across == 2 ? tile_m : 1;  // positions along the axis that are computed together
        const std::int64_t reach = std::int64_t{of.dilation[across]} * (of.filter[across] - 1) + rows * of.stride[across];
        band = std::clamp<std::int64_t>(most_elements / slice, 1, of.size[across]);
        const std::int64_t products = args.n * args.g;
        constexpr int items_per_thread = 4;
        while (threads > 1 && band > 4 * reach && products * bands() < items_per_thread * threads) band = (band + 1) / 2;
    }

    catalog_status run() {
        const std::int64_t panels = (columns + panel - 1) / panel, of_group = panels * panel * units;
        Room<Unit>& room = thread_room<struct ScatteredWeights, Unit>();
        Unit* const packed = room.reserve(args.g * of_group);
        if (!packed) return CATALOG_NO_MEMORY;
        parallel_for(args, threads, args.g * panels * steps, [&](std::int64_t task) {
            const std::int64_t index = task / steps, at = task % steps, first = index % panels * panel;
            const Weights<T> weights(weight(index / panels), args.weight.stride_first);
            const Rows<const T> rows = weights.block(at * tile_k, depth_of(at), first, panel, nullptr, 0);
            pack_panel<Unit, panel>(Factor<false, T>{rows.data, rows.stride},
                                    static_cast<int>(std::min<std::int64_t>(panel, columns - first)), depth_of(at),
                                    units_of(at), packed + (index * units + at * step) * panel);
        });
        std::atomic<bool> out_of_memory = false;
        parallel_for(args, threads, args.n * args.g * bands(), [&](std::int64_t item) {
            const std::int64_t image = item / bands() / args.g, group = item / bands() % args.g;
            const Range lines{item % bands() * band, std::min<std::int64_t>((item % bands() + 1) * band, of.size[across])};
            Scratch* const scratch = thread_scratch<Scratch>();
            float* const sums = thread_room<struct ScatteredBand, float>().reserve(band * slice + lanes);
            if (!scratch || !sums) return void(out_of_memory = true);
            std::fill_n(sums, (lines.end - lines.first) * slice, 0.0f);
            [[maybe_unused]] const typename Block::State state;
            add_products(*scratch, image, group, lines, packed + group * of_group, sums);
            store_band(image, group, lines, sums);
        });
        constexpr std::size_t most_units = 16 << 20;  // that stay in memory for the next launch
        room.release_above(most_units);
        return out_of_memory ? CATALOG_NO_MEMORY : CATALOG_OK;
    }

   private:
    std::int64_t bands() const { return (of.size[across] + band - 1) / band; }
    std::int64_t depth_of(std::int64_t at) const { return std::min<std::int64_t>(tile_k, channels_out - at * tile_k); }
    int units_of(std::int64_t at) const { return static_cast<int>(std::min<std::int64_t>(step, units - at * step)); }

    const T* weight(std::int64_t group) const {
        return static_cast<const T*>(args.weight.data) + group * channels_out * args.weight.stride_first;
    }

    // The element that the first tap meets from a position of the output.
    std::int64_t origin(int axis, std::int64_t position) const {
        return position * of.stride[axis] - of.pad[axis];
    }

    // The positions along an axis from which some tap may meet the band: all, except along the axis that it divides.
    Range positions_of(int axis, Range lines) const {
        if (axis != across) return {0, of.out[axis]};
        const std::int64_t s = of.stride[axis], reach = std::int64_t{of.dilation[axis]} * (of.filter[axis] - 1);
        const std::int64_t before = lines.first + of.pad[axis] - reach, end = (lines.end + of.pad[axis] + s - 1) / s;
        return {before > 0 ? (before + s - 1) / s : 0, std::min<std::int64_t>(end, of.out[axis])};
    }

    // Adds what all taps that meet the band contribute, in an order that does not depend on the band.
    void add_products(Scratch& scratch, std::int64_t image, std::int64_t group, Range lines, const Unit* packed,
                      float* sums) const {
        const Image<const T> output(args.output, of.out, args.k, args.g, group, true);
        const T* const from = output.data + image * output.stride_image;
        const Range deep = positions_of(0, lines), high = positions_of(1, lines), wide = positions_of(2, lines);
        std::int64_t at[axes];
        for (at[0] = deep.first; at[0] < deep.end; ++at[0])
            for (at[1] = high.first; at[1] < high.end; ++at[1])
                for (at[2] = wide.first / tile_m * tile_m; at[2] < wide.end; at[2] += tile_m) {
                    const int rows = static_cast<int>(std::min<std::int64_t>(tile_m, of.out[2] - at[2]));
                    const T* const row = from + output.index(at[0], at[1], at[2]) * output.all_channels;
                    for (std::int64_t column = 0; column < columns; column += tile_n) {
                        const int count = static_cast<int>(std::min<std::int64_t>(tile_n, columns - column));
                        multiply(scratch, {row, output.all_channels}, rows, packed + column * units, count);
                        scatter(scratch.sums, rows, column, column + count, at, lines, sums);
                    }
                }
    }

    void multiply(Scratch& scratch, Factor<true, T> from, int rows, const Unit* packed, int count) const {
        for (std::int64_t at = 0; at < steps; ++at) {
            Block::pack_a(from.from(0, at * tile_k), rows, depth_of(at), scratch.a);
            for (int j = 0; j < count; j += panel)
                Block::template multiply<row_s>(at > 0, scratch.a, 0, rows, packed + j * units + at * step * panel,
                                                units_of(at), scratch.sums + j);
        }
    }

    // Columns of products that are neighbours in a line of the band.
    struct Piece {
        const float* products;      // of the first position
        float* line;                // where the elements of the line begin in the band, if it had all of them
        std::int64_t first, count;  // elements of the line that the first position meets
    };

    // Columns `begin` to `end` of the products of some positions from `at` on. Position after position: what neighbours in
    // a line add to the same pixels is then far enough apart in time to be read from the cache.
    void scatter(const float* products, int rows, std::int64_t begin, std::int64_t end, const std::int64_t (&at)[axes],
                 Range lines, float* sums) const {
        // Neighbouring taps with all their channels are one piece of a line.
        const std::int64_t span = of.dilation[2] == 1 ? of.filter[2] : 1, of_span = span * channels_in;
        const std::int64_t width = of.size[2] * channels_in;
        const Range seen = across == 2 ? Range{lines.first * channels_in, lines.end * channels_in} : Range{0, width};
        Piece pieces[tile_n];
        int number = 0;
        for (std::int64_t column = begin, count; column < end; column += count) {
            const std::int64_t tap = column / of_span * span, skipped = column % of_span;
            count = std::min(of_span - skipped, end - column);
            const std::int64_t of_line = tap / of.filter[2];
            const std::int64_t d = origin(0, at[0]) + of_line / of.filter[1] * of.dilation[0];
            const std::int64_t h = origin(1, at[1]) + of_line % of.filter[1] * of.dilation[1];
            const std::int64_t place = across == 0 ? d : h;
            const bool in_band = across == 2 || (lines.first <= place && place < lines.end);
            if (d < 0 || d >= of.size[0] || h < 0 || h >= of.size[1] || !in_band) continue;
            const std::int64_t w = origin(2, at[2]) + tap % of.filter[2] * of.dilation[2];
            const std::int64_t above = across == 0 ? (d - lines.first) * of.size[1] + h : h - lines.first;
            const std::int64_t line = across == 2 ? -seen.first : above * width;
            pieces[number++] = {products + (column - begin), sums + line, w * channels_in + skipped, count};
        }
        const std::int64_t apart = of.stride[2] * channels_in;
        for (int i = 0; i < rows; ++i)
            for (const Piece* piece = pieces; piece < pieces + number; ++piece) {
                const std::int64_t first = piece->first + i * apart;
                const std::int64_t low = std::max<std::int64_t>(seen.first - first, 0);
                const std::int64_t high = std::min(piece->count, seen.end - first);
                add(piece->products + i * row_s + low, high - low, piece->line + first + low);
            }
    }

    // Adds whole vectors: zeros to the elements that follow, which are the band's own or the room behind it.
    static void add(const float* from, std::int64_t count, float* to) {
        for (; count >= lanes; from += lanes, to += lanes, count -= lanes) store(to, load(to) + load(from));
        if (count <= 0) return;
        static constexpr auto ones = [] {
            struct {
                std::int32_t of[2 * lanes];
            } all{};
            for (int i = 0; i < lanes; ++i) all.of[i] = -1;
            return all;
        }();
        Ints kept;
        std::memcpy(&kept, ones.of + lanes - count, sizeof kept);
        store(to, load(to) + (Float)((Ints)load(from) & kept));
    }

    void store_band(std::int64_t image, std::int64_t group, Range lines, const float* sums) const {
        const Image<T> input(args.input, of.size, args.c, args.g, group, true);
        const std::int64_t pixels = slice / channels_in;
        T* to = input.data + image * input.stride_image + lines.first * pixels * input.all_channels;
        const std::int64_t all = (lines.end - lines.first) * slice;
        const std::int64_t run = input.channels == input.all_channels ? all : channels_in;
        for (std::int64_t done = 0; done < all; done += run, to += input.all_channels)
            for (std::int64_t i = 0; i < run; i += lanes) store_first(to + i, load(sums + done + i), run - i);
    }

    const catalog_args& args;
    const Geometry& of;
    const int threads;
    const std::int64_t channels_in, channels_out, columns;
    const int across;          // the axis that bands divide, the first with several elements
    const std::int64_t slice;  // elements of a plane, line or pixel of a band
    std::int64_t units, steps, band;
};

}  // namespace catalog::host
