// A convolution in AMX tiles that copies no windows. Channels are the last axis.
//
// Rows of an image are copied into lines, with the zeros around them. What a row of the filter meets from a position is then
// one run of elements of a line, and from the next position the same number of elements further on: so tiles of A are
// loaded from lines as they are, where other products copy each window. Rows of one phase of a stride follow each other:
// positions of several rows are equally far apart, but for a few between the rows that are computed in vain.
//
// A run that is not whole tiles ends among other elements, which meet zeros of B. Their products would be NaN where they
// are not finite. So if any result is not finite, the launch is refused, to be computed in another way.
#pragma once

#include <atomic>

#include "narrow.hpp"
#include "panel.hpp"
#include "pixel_line.hpp"

namespace catalog::host {

template <class Row, class Unit>
class LineProduct {
    using T = typename Row::dtype;
    using Result = typename Row::otype;
    using B = typename Operands<Row>::B;
    using Strip = RowStrip<Row, Unit>;
    static constexpr Direction direction = Row::direction;
    static constexpr int panel = Row::warp_tile_n, factors = Units<Unit>::depth, deep = factors * whole_units<Unit>;
    static_assert(direction != Direction::bwd_weight && Row::last && Row::in_tiles && holds_neighbours<Unit, T>);
    static constexpr int cache_line = 64;
    static constexpr std::int64_t least_rows = 4;  // of a chunk, if there are as many: their neighbours are copied, too

    // Positions that are computed at once, of one plane, and their channels.
    struct Chunk {
        std::int64_t group, image, plane, column;
        Range rows, columns;
        int channels;
    };

   public:
    LineProduct(const catalog_args& args, const Geometry& of, const Window& of_call, int threads)
        : args(args),
          of(of),
          window{{ascending(of_call.axis[0]), ascending(of_call.axis[1]), ascending(of_call.axis[2])}},
          threads(threads),
          read((direction == Direction::forward ? args.c : args.k) / args.g),
          made((direction == Direction::forward ? args.k : args.c) / args.g),
          phases(std::min(period_of(of_h), of_h.taps)),
          taps_of_run(of_w.apart == 1 ? of_w.taps : 1),
          length(taps_of_run * read),
          units_of_run((length + deep - 1) / deep * whole_units<Unit>),
          units_of_plane(of_h.taps * (of_w.apart == 1 ? 1 : of_w.taps) * units_of_run) {
        const std::int64_t positions = args.n * window.positions();
        if (positions == 0 || made == 0 || window.taps() == 0 || read == 0) return;
        divide();
        constexpr std::int64_t most_elements = 4 << 20;  // of lines, of which each thread has its own
        is_taken = of_d.taps * plane_size() <= most_elements;
        const catalog_tensor& computed = direction == Direction::forward ? args.output : args.input;
        storing = Storing(computed.data, args.g * positions * made * static_cast<std::int64_t>(sizeof(Result)),
                          least_bytes_around_tiles);
    }

    // CATALOG_UNSUPPORTED: lines would be too large, or some result is not finite, which elements outside of its window may
    // have caused.
    catalog_status run() {
        if (!is_taken) return CATALOG_UNSUPPORTED;
        const std::int64_t of_group = round_up(made, panel) * units_of_plane * of_d.taps;
        Room<Unit>& room = thread_room<struct PackedWeights, Unit>();
        Unit* const weights = room.reserve(args.g * of_group);
        Room<std::ptrdiff_t>& tiles = thread_room<struct TilesOfLines, std::ptrdiff_t>();
        std::ptrdiff_t* const along = tiles.reserve(of_d.taps * units_of_plane / tile_units);
        if (!weights || !along) return CATALOG_NO_MEMORY;
        find_tiles(along);
        const std::int64_t panels = (made + panel - 1) / panel;
        parallel_for(args, threads, args.g * panels, [&](std::int64_t task) {
            pack_weights(task / panels, task % panels * panel, weights + task * panel * units_of_plane * of_d.taps);
        });
        parallel_for(args, threads, items, [&](std::int64_t item) {
            T* const lines = thread_room<struct Lines, T>().reserve(of_d.taps * plane_size() + slack());
            Strip* const strip = thread_scratch<Strip>();
            if (!lines || !strip) return void(out_of_memory = true);
            const amx::Tiles state;
            const Chunk chunk = chunk_of(item);
            multiply_chunk(chunk, lines, weights + chunk.group * of_group, along, *strip);
            storing.finish();
        });
        constexpr std::size_t most_units = 16 << 20;  // that stay in memory for the next launch
        room.release_above(most_units);
        return out_of_memory ? CATALOG_NO_MEMORY : finite || length % deep == 0 ? CATALOG_OK : CATALOG_UNSUPPORTED;
    }

   private:
    // Chunks of about tile_m positions; smaller ones, if threads have few.
    void divide() {
        constexpr int items_per_thread = 4;
        columns = evenly(of_w.count, Row::tile_m / std::min(of_h.count, least_rows));
        span = (columns - 1) * of_w.stride + (of_w.taps - 1) * of_w.apart + 1;
        const std::int64_t shared = columns == of_w.count ? zeros_around() : 0;
        distance = std::max((span - shared + of_w.stride - 1) / of_w.stride, columns);
        rows = evenly(of_h.count, std::max<std::int64_t>(Row::tile_m / distance, 1));
        channels = std::min<std::int64_t>(Row::tile_n, round_up(made, panel));
        while (count_items() < items_per_thread * threads && threads > 1) {
            if (rows > 1)
                rows = (rows + 1) / 2;
            else if (channels > 2 * panel)
                channels = round_up(channels / 2, panel);
            else
                break;
        }
    }

    std::int64_t count_items() {
        row_pieces = (of_h.count + rows - 1) / rows;
        column_pieces = (of_w.count + columns - 1) / columns;
        across = (made + channels - 1) / channels;
        return items = args.g * across * args.n * of_d.count * row_pieces * column_pieces;
    }

    // How many zeros at the end of a row may also be those at the beginning of the next.
    std::int64_t zeros_around() const {
        const std::int64_t before = std::max<std::int64_t>(-of_w.origin, 0);
        return std::clamp<std::int64_t>(of_w.origin + span - of_w.extent, 0, before);
    }

    Chunk chunk_of(std::int64_t index) const {
        const std::int64_t column = take_from(index, across) * channels;
        const Range of_columns = piece_of(take_from(index, column_pieces), columns, of_w.count);
        const Range of_rows = piece_of(take_from(index, row_pieces), rows, of_h.count);
        const std::int64_t plane = take_from(index, of_d.count), image = take_from(index, args.n);
        return {index, image, plane, column, of_rows, of_columns, static_cast<int>(std::min(channels, made - column))};
    }

    std::int64_t pitch() const { return distance * of_w.stride; }  // of rows of a line, in pixels
    std::int64_t phase_size() const { return ((rows + most_shift(of_h)) * pitch() + span) * read; }
    std::int64_t plane_size() const { return phases * phase_size(); }
    // Elements after the last line that a tile may reach.
    std::int64_t slack() const { return 2 * tile_rows * of_w.stride * read + deep; }

    // Where the tiles of A are along the depth, in bytes.
    void find_tiles(std::ptrdiff_t* to) const {
        for (std::int64_t td = 0; td < of_d.taps; ++td)
            for (std::int64_t th = 0; th < of_h.taps; ++th)
                for (std::int64_t tw = 0; tw < of_w.taps; tw += taps_of_run) {
                    const std::int64_t pixel = shift_of(of_h, th) * pitch() + tw * of_w.apart;
                    const std::int64_t first = td * plane_size() + th % phases * phase_size() + pixel * read;
                    for (std::int64_t k = 0; k < units_of_run * factors; k += deep) *to++ = (first + k) * sizeof(T);
                }
    }

    // A panel of B: the runs of all taps, each of whole tiles.
    void pack_weights(std::int64_t group, std::int64_t column, Unit* to) {
        const int count = static_cast<int>(std::min<std::int64_t>(panel, made - column));
        const auto matrix = weights_of(group);
        const std::int64_t depth = window.taps() * read, stride = B::along ? length : panel;
        T* const room = thread_room<struct RunOfWeights, T>().reserve(length * panel);
        if (!room) return void(out_of_memory = true);
        for (std::int64_t k = 0; k < depth; k += length, to += units_of_run * panel) {
            const Rows<const T> block = B::along ? matrix.block(column, count, k, length, room, stride)
                                                 : matrix.block(k, length, column, count, room, stride);
            pack_panel<Unit, panel>(Factor<B::along, T>{block.data, block.stride}, count, length, units_of_run, to);
        }
    }

    auto weights_of(std::int64_t group) const {
        const std::int64_t stride = args.weight.stride_first;
        const T* const data = static_cast<const T*>(args.weight.data) + group * (args.k / args.g) * stride;
        if constexpr (direction == Direction::forward)
            return Weights<T>(data, stride);
        else
            return TransposedWeights<T, true>(window, of, data, stride, made, read);
    }

    template <class Element, bool of_output>
    Image<Element> image_of(std::int64_t group) const {
        if constexpr (of_output)
            return {args.output, of.out, args.k, args.g, group, true};
        else
            return {args.input, of.size, args.c, args.g, group, true};
    }

    void multiply_chunk(const Chunk& chunk, T* lines, const Unit* weights, const std::ptrdiff_t* along, Strip& strip) {
        const Range planes = of_d.inside(chunk.plane);
        for (std::int64_t td = planes.first; td < planes.end; ++td)
            for (std::int64_t phase = 0; phase < phases; ++phase)
                copy_line(chunk, of_d.origin + chunk.plane * of_d.stride + td * of_d.apart, phase,
                          lines + (td - planes.first) * plane_size() + phase * phase_size());
        const std::int64_t units = units_of_plane * of_d.taps;
        const Unit* const b = weights + chunk.column * units + planes.first * units_of_plane * panel;
        const int depth = static_cast<int>(units_of_plane * (planes.end - planes.first));
        const ScatteredTiles order{static_cast<std::ptrdiff_t>(of_w.stride * read * sizeof(T)), along};
        const std::int64_t of_rows = chunk.rows.end - chunk.rows.first, of_columns = chunk.columns.end - chunk.columns.first;
        const std::int64_t end = (of_rows - 1) * distance + of_columns;
        const auto element = [](const Axis& axis, std::int64_t position) { return axis.first + position * axis.step; };
        const Image<Result> image = image_of<Result, direction == Direction::forward>(chunk.group);
        Result* const data = image.data + chunk.image * image.stride_image + chunk.column;
        const int most_rows = strip.rows_for(chunk.channels);
        for (std::int64_t first = 0; first < end; first += most_rows) {
            const int count = static_cast<int>(std::min<std::int64_t>(end - first, most_rows));
            const std::byte* const a = reinterpret_cast<const std::byte*>(lines) + first * order.row;
            if (order.row % cache_line)
                strip.multiply_slow(a, order, count, b, units * panel, depth, chunk.channels);
            else
                strip.multiply(a, order, count, b, units * panel, depth, chunk.channels);
            if (!strip.were_finite()) finite = false;
            for (std::int64_t at = first; at < first + count;) {
                const std::int64_t row = at / distance, column = at % distance;
                const std::int64_t next = std::min((row + 1) * distance, first + count);
                const std::int64_t stored = std::min(of_columns - column, next - at);
                const std::int64_t pixel =
                    image.index(element(of_d, chunk.plane), element(of_h, chunk.rows.first + row),
                                element(of_w, chunk.columns.first + column));
                if (stored > 0)
                    strip.store(static_cast<int>(at - first), static_cast<int>(stored), data + pixel * image.all_channels,
                                of_w.step * image.all_channels, storing);
                at = next;
            }
        }
    }

    // Copies what taps of a phase meet of a plane.
    void copy_line(const Chunk& chunk, std::int64_t plane, std::int64_t phase, T* to) const {
        const Image<const T> image = image_of<const T, direction == Direction::bwd_data>(chunk.group);
        const std::int64_t count = chunk.rows.end - chunk.rows.first, wide = std::max(pitch(), span);
        const Axis down = seen_in_phase(of_h, phase, chunk.rows.first, count);
        const Range inside = down.positions_of(0);
        const std::int64_t origin = of_w.origin + chunk.columns.first * of_w.stride;
        const std::int64_t first = std::clamp<std::int64_t>(-origin, 0, wide);
        const std::int64_t last = std::clamp<std::int64_t>(of_w.extent - origin, first, wide);
        const T* const data = image.data + chunk.image * image.stride_image;
        for (std::int64_t row = 0; row < down.count; ++row, to += pitch() * read) {
            const bool is_inside = row >= inside.first && row < inside.end;
            const std::int64_t seen = is_inside ? last : first;
            std::fill(to, to + first * read, T{});
            if (seen > first) {
                const T* from = data + image.index(plane, down.origin + row * down.stride, origin + first) * image.all_channels;
                if (read == image.all_channels)
                    copy_elements(from, (seen - first) * read, to + first * read);
                else
                    for (std::int64_t i = first; i < seen; ++i, from += image.all_channels)
                        copy_elements(from, read, to + i * read);
            }
            std::fill(to + seen * read, to + wide * read, T{});
        }
        // Tiles of the last positions reach further than these see.
        std::fill_n(to + (wide - pitch()) * read, slack(), T{});
    }

    const catalog_args& args;
    const Geometry& of;
    const Window window;
    const Axis &of_d = window.axis[0], &of_h = window.axis[1], &of_w = window.axis[2];
    const int threads;
    const std::int64_t read, made;  // channels of a group
    const std::int64_t phases, taps_of_run, length, units_of_run, units_of_plane;
    std::int64_t rows = 1, columns = 1, channels = 1;  // of a chunk
    std::int64_t span = 0, distance = 1;               // pixels that a row of positions sees, and positions from row to row
    std::int64_t row_pieces = 1, column_pieces = 1, across = 1, items = 0;
    Storing storing;
    bool is_taken = false;
    std::atomic<bool> out_of_memory = false, finite = true;
};

}  // namespace catalog::host
