// The gradient of weights in AMX tiles, for filters of several taps. Channels are the last axis.
//
// Pixels of a chunk of the image, and the gradients of the positions that see them, are lines in which neighbours are
// equally far apart. A tap meets the line of pixels, shifted: so pixels are packed once, where an implicit product
// packs them once for each tap. A has a row for each channel of the gradients, which consists of all positions; B has
// pairs of pixels. Where a shift is odd, A is read from one element earlier instead, for which no copy is needed.
// Strides divide pixels into phases, each of which is a line of its own.
//
// The line of gradients has zeros where no positions are. They meet pixels, too, and their products would be NaN where
// these are not finite. So if any result is not finite, the launch is refused, to be computed in another way.
//
// Threads share the chunks where there are few channels; the number of parts does not depend on the number of threads.
//
// In rows for narrow groups, 32 channels of several groups are one block. Only tiles on its diagonal are multiplied, and of
// their sums only those of the same group are stored.
#pragma once

#include <atomic>

#include "host/blocks.hpp"
#include "pixel_line.hpp"

namespace catalog::host {

template <class Row, class Unit>
class ShiftedGradients {
    using T = typename Row::dtype;
    static constexpr int block = Row::warp_tile_m, area = block * block;  // channels and sums of two tiles by two
    static constexpr int factors = Units<Unit>::depth, deep = factors * whole_units<Unit>;
    static_assert(Row::direction == Direction::bwd_weight && Row::last && Row::in_tiles && factors == 2);
    static_assert(block == 2 * tile_units && Row::warp_tile_n == block && holds_neighbours<Unit, T>);
    static_assert(most_zeros >= std::max(Row::tile_m, Row::tile_n));
    static constexpr std::int64_t least_rows = 8;  // of a chunk, if there are as many: their neighbours are packed, too
    static constexpr std::int64_t most_taps = 1 << 10, most_positions = 8 * Row::tile_k;
    // Sums of a tile, which stay in the L2 cache beside what is multiplied; of all parts, which stay allocated.
    static constexpr std::int64_t most_sums = 160 << 10, most_sums_of_parts = 8 << 20;
    static constexpr std::int64_t most_shares = 32;
    static constexpr std::int64_t least_positions = 128;  // of a chunk of a small problem, which threads could not share
    static constexpr int zeros = tile_units;              // units before A

    // Output and input channels of a group.
    struct Tile {
        std::int64_t group, row, column;
        int rows, columns;
    };

    // Positions that are multiplied at once: all of some images, or some of one.
    struct Chunk {
        Range images, rows, columns;
        std::int64_t plane;
    };

    // The first tap of those that meet the same line of pixels.
    struct Phase {
        std::int64_t plane, down, across;
    };

    struct Memory {
        const T** line;
        Unit *a, *b;
    };

   public:
    ShiftedGradients(const catalog_args& args, const Geometry& of, const Window& window, int threads)
        : args(args),
          of(of),
          window(window),
          threads(threads),
          width(args.c / args.g),
          is_merged(Row::in_groups && args.c == args.k && width < block && block % width == 0),
          groups(is_merged ? (args.c + block - 1) / block : args.g),
          channels_in(is_merged ? block : width),
          channels_out(is_merged ? block : args.k / args.g),
          taps(window.taps()) {
        const Axis &of_h = window.axis[1], &of_w = window.axis[2];
        if (taps > most_taps || std::max(most_shift(of_h), most_shift(of_w)) > most_positions) return;
        positions = Row::tile_k;
        divide_positions();
        while (chunks * tiles_of_channels() < most_shares && positions > least_positions) {
            positions /= 2;
            divide_positions();
        }
        is_taken = shift() <= most_positions;
        divide_channels();
    }

    // CATALOG_UNSUPPORTED: the taps are too many or too far apart, or some result is not finite.
    catalog_status run() {
        if (!is_taken) return CATALOG_UNSUPPORTED;
        const std::int64_t items = groups * down * across, slices = taps * slices_of_tap();
        float* all_sums = nullptr;
        if (parts > 1) {
            all_sums = thread_room<struct SumsOfParts, float>().reserve(items * parts * sums_of_tile());
            if (!all_sums) return CATALOG_NO_MEMORY;
        }
        std::atomic<bool> out_of_memory = false;
        parallel_for(args, threads, items * parts, [&](std::int64_t share) {
            const std::int64_t part = share % parts;
            float* const sums = parts > 1 ? all_sums + share * sums_of_tile()
                                          : thread_room<struct SumsOfTile, float>().reserve(sums_of_tile());
            const Memory memory = reserve();
            if (!sums || !memory.line || !memory.a || !memory.b) return void(out_of_memory = true);
            const Tile tile = tile_of(share / parts);
            multiply_chunks(memory, tile, {chunks * part / parts, chunks * (part + 1) / parts}, sums);
            if (parts == 1)
                for (std::int64_t slice = 0; slice < slices; ++slice) store_slice(sums, tile, slice);
        });
        if (out_of_memory) return CATALOG_NO_MEMORY;
        if (parts > 1)
            parallel_for(args, threads, items * slices, [&](std::int64_t task) {
                const std::int64_t item = task / slices;
                store_slice(all_sums + item * parts * sums_of_tile(), tile_of(item), task % slices);
            });
        return finite ? CATALOG_OK : CATALOG_UNSUPPORTED;
    }

   private:
    std::int64_t sums_of_tile() const { return taps * of_down * of_across * area; }
    std::int64_t slices_of_tap() const { return of_down * of_across * (block / tile_rows); }

    // Positions of a line of gradients with this many images and rows.
    std::int64_t length(std::int64_t of_images, std::int64_t of_rows) const {
        return ((of_images - 1) * shape.high + of_rows - 1) * shape.pitch + columns;
    }
    std::int64_t shift() const { return most_shift(window.axis[1]) * shape.pitch + most_shift(window.axis[2]); }
    // Of a line of gradients, which ends with at least one zero: A that is read from one element earlier ends there.
    static std::int64_t units(std::int64_t length) { return (length / deep + 1) * whole_units<Unit>; }
    std::int64_t units_seen(std::int64_t length) const { return units(length) + shift() / factors; }

    // Chunks of about as many positions.
    void divide_positions() {
        const Axis &of_h = window.axis[1], &of_w = window.axis[2];
        const std::int64_t high = of_h.count, wide = of_w.count;
        columns = evenly(wide, std::max<std::int64_t>(positions / std::min(high, least_rows), 1));
        shape.pitch = columns + most_shift(of_w) - (columns == wide ? zeros_shared(of_w) : 0);
        rows = evenly(high, std::max<std::int64_t>(positions / shape.pitch, 1));
        shape.high = rows + most_shift(of_h) - (rows == high ? zeros_shared(of_h) : 0);
        const std::int64_t all_images = std::max<std::int64_t>(args.n, 1);
        images = 1;
        if (rows == high && columns == wide)
            images = std::clamp<std::int64_t>(positions / (shape.high * shape.pitch), 1, all_images);
        column_pieces = (wide + columns - 1) / columns;
        row_pieces = (high + rows - 1) / rows;
        chunks = (args.n + images - 1) / images * window.axis[0].count * row_pieces * column_pieces;
    }

    // Of two blocks by two, which are the least that a thread computes.
    std::int64_t tiles_of_channels() const {
        return groups * ((channels_out + 2 * block - 1) / (2 * block)) * ((channels_in + 2 * block - 1) / (2 * block));
    }

    // Blocks of channels of a tile, and the parts of the chunks, of which threads get the same number.
    void divide_channels() {
        const std::int64_t blocks_down = (channels_out + block - 1) / block;
        const std::int64_t blocks_across = (channels_in + block - 1) / block;
        const std::int64_t least_chunks = positions == Row::tile_k ? 2 : 1;  // of a part
        const std::int64_t all_sums = groups * blocks_down * blocks_across * area * taps;
        const std::int64_t most_parts =
            std::min({most_shares / std::max<std::int64_t>(tiles_of_channels(), 1), chunks / least_chunks,
                      most_sums_of_parts / std::max<std::int64_t>(all_sums, 1)});
        while (2 * parts <= most_parts) parts *= 2;
        of_down = evenly(blocks_down, Row::tile_m / block);
        of_across = evenly(blocks_across, Row::tile_n / block);
        const auto is_too_large = [&] {
            down = (blocks_down + of_down - 1) / of_down;
            across = (blocks_across + of_across - 1) / of_across;
            if (sums_of_tile() > most_sums) return true;
            constexpr int least_blocks = 2, shares_per_thread = 2;
            return std::max(of_down, of_across) > least_blocks && threads > 1 &&
                   groups * down * across * parts < shares_per_thread * threads;
        };
        while (is_too_large() && of_down * of_across > 1) {
            std::int64_t& larger = of_down >= of_across ? of_down : of_across;
            larger = (larger + 1) / 2;
        }
    }

    Tile tile_of(std::int64_t index) const {
        const std::int64_t row = index % down * of_down * block, column = index / down % across * of_across * block;
        const std::int64_t group = index / down / across;  // the last merged one may be smaller
        const std::int64_t left_out = std::min(channels_out, args.k - group * channels_out) - row;
        const std::int64_t left_in = std::min(channels_in, args.c - group * channels_in) - column;
        return {group, row, column, static_cast<int>(std::min<std::int64_t>(left_out, of_down * block)),
                static_cast<int>(std::min<std::int64_t>(left_in, of_across * block))};
    }

    Chunk chunk_of(std::int64_t index) const {
        const Range of_w = piece_of(take_from(index, column_pieces), columns, window.axis[2].count);
        const Range of_h = piece_of(take_from(index, row_pieces), rows, window.axis[1].count);
        const std::int64_t plane = take_from(index, window.axis[0].count);
        return {piece_of(index, images, args.n), of_h, of_w, plane};
    }

    // The thread's own memory for the largest chunk.
    Memory reserve() const {
        const std::int64_t longest = length(images, rows);
        return {thread_room<struct PixelLine, const T*>().reserve(factors * units_seen(longest)),
                thread_room<struct ShiftedA, Unit>().reserve(zeros + of_down * block * units(longest)),
                thread_room<struct ShiftedB, Unit>().reserve(of_across * block * units_seen(longest))};
    }

    // The products of some chunks.
    void multiply_chunks(const Memory& memory, const Tile& tile, Range of_chunks, float* sums) const {
        const amx::Tiles state;
        std::fill(sums, sums + sums_of_tile(), 0.0f);
        std::fill(memory.a, memory.a + zeros, Unit{});
        for (std::int64_t index = of_chunks.first; index < of_chunks.end; ++index) {
            const Chunk chunk = chunk_of(index);
            pack_gradients(memory, tile, chunk);
            const Axis &of_d = window.axis[0], &of_h = window.axis[1], &of_w = window.axis[2];
            const Range inside = of_d.inside(chunk.plane);
            for (std::int64_t td = inside.first; td < inside.end; ++td)
                for (std::int64_t th = 0; th < std::min(period_of(of_h), of_h.taps); ++th)
                    for (std::int64_t tw = 0; tw < std::min(period_of(of_w), of_w.taps); ++tw) {
                        const Phase phase{td, th, tw};
                        pack_pixels(memory, tile, chunk, phase);
                        multiply_phase(memory, tile, length_of(chunk), phase, sums);
                    }
        }
    }

    std::int64_t length_of(const Chunk& chunk) const {
        return length(chunk.images.end - chunk.images.first, chunk.rows.end - chunk.rows.first);
    }

    // A: channels of the gradients of a chunk.
    void pack_gradients(const Memory& memory, const Tile& tile, const Chunk& chunk) const {
        const std::int64_t count = length_of(chunk), deep_units = units(count);
        const Axis of_h = positions_alone(chunk.rows.first, chunk.rows.end - chunk.rows.first, chunk.rows.end);
        const Axis of_w = positions_alone(chunk.columns.first, columns, chunk.columns.end);
        Image<const T> image(args.output, of.out, args.k, 1, 0, true);
        image.data += tile.group * channels_out + tile.row;
        const T** const end = find_pixels(image, chunk.plane, chunk.images, of_h, of_w, shape, memory.line);
        std::fill(end, memory.line + deep_units * factors, zero_pixel<T>);
        for (std::int64_t k = 0; k < deep_units; k += lanes) {
            ask_for(memory, (k + lanes) * factors, deep_units * factors);
            for (int row = 0; row < tile.rows; row += lanes) {
                Float square[lanes];
#pragma GCC unroll 16
                for (int i = 0; i < lanes; ++i)
                    square[i] = (Float)pairs(memory.line + (k + i) * factors, row, tile.rows - row);
                transpose(square);
                Unit* const to = memory.a + zeros + row * deep_units + k;
                for (int i = 0; i < std::min(lanes, tile.rows - row); ++i) store(to + i * deep_units, (Bits)square[i]);
            }
        }
    }

    // B: channels of what taps of one phase meet.
    void pack_pixels(const Memory& memory, const Tile& tile, const Chunk& chunk, const Phase& phase) const {
        const std::int64_t count = length_of(chunk), seen_units = units_seen(count);
        const Axis& of_d = window.axis[0];
        const std::int64_t of_rows = chunk.rows.end - chunk.rows.first;
        const Axis of_h = seen_in_phase(window.axis[1], phase.down, chunk.rows.first, of_rows);
        const Axis of_w = seen_in_phase(window.axis[2], phase.across, chunk.columns.first, columns);
        const std::int64_t plane = of_d.origin + chunk.plane * of_d.stride + phase.plane * of_d.apart;
        Image<const T> image(args.input, of.size, args.c, 1, 0, true);
        image.data += tile.group * channels_in + tile.column;
        const T** const end = find_pixels(image, plane, chunk.images, of_h, of_w, shape, memory.line);
        std::fill(end, memory.line + seen_units * factors, zero_pixel<T>);
        for (std::int64_t k = 0; k < seen_units; ++k) {
            if (k % lanes == 0) ask_for(memory, (k + lanes) * factors, seen_units * factors);
            for (int column = 0; column < tile.columns; column += block) {
                Unit* const to = memory.b + column * seen_units + k * block;
#pragma GCC unroll 2
                for (int j = 0; j < block; j += lanes)
                    store(to + j, pairs(memory.line + k * factors, column + j, tile.columns - column - j));
            }
        }
    }

    // Prefetches pixels of a merged block, which is a cache line of each: hardware does not foresee them.
    static void ask_for(const Memory& memory, std::int64_t first, std::int64_t end) {
        if constexpr (Row::in_groups)
            for (std::int64_t i = first; i < std::min(first + lanes * factors, end); ++i) __builtin_prefetch(memory.line[i]);
        asm volatile("");  // g++ removes calls of functions that do nothing but prefetch
    }

    // Channels of two pixels, `count` and then zeros.
    static Bits pairs(const T* const* pixels, int channel, int count) {
        const T *const first = pixels[0] + channel, *const second = pixels[1] + channel;
        return count >= lanes ? halves(first) | halves(second) << 16 : few_pairs(first, second, count);
    }
    __attribute__((noinline)) static Bits few_pairs(const T* first, const T* second, int count) {
        return load_across<Unit>(first, 0, 1, count) | load_across<Unit>(second, 0, 1, count) << 16;
    }

    // The products of a chunk for all taps of a phase.
    void multiply_phase(const Memory& memory, const Tile& tile, std::int64_t count, const Phase& phase,
                        float* sums) const {
        if (is_merged) return multiply_merged(memory, tile, count, phase, sums);
        const Axis &of_h = window.axis[1], &of_w = window.axis[2];
        const std::int64_t deep_units = units(count), seen_units = units_seen(count);
        for (std::int64_t j = 0; j * block < tile.columns; ++j)
            for (std::int64_t i = 0; i * block < tile.rows; ++i) {
                const Unit* const a = memory.a + zeros + i * block * deep_units;
                const Unit* const b = memory.b + j * block * seen_units;
                const int rows_left = static_cast<int>(tile.rows - i * block);
                for (std::int64_t th = phase.down; th < of_h.taps; th += period_of(of_h))
                    for (std::int64_t tw = phase.across; tw < of_w.taps; tw += period_of(of_w)) {
                        const std::int64_t by = shift_of(of_h, th) * shape.pitch + shift_of(of_w, tw);
                        const T* const from = reinterpret_cast<const T*>(a) - by % factors;
                        const std::int64_t tap = (phase.plane * of_h.taps + th) * of_w.taps + tw;
                        float* const to = sums + ((tap * of_down + i) * of_across + j) * area;
                        multiply_rows(reinterpret_cast<const Unit*>(from), rows_left, b + by / factors * block,
                                      static_cast<int>(deep_units), to);
                    }
            }
    }

    // The same for a merged block. Taps that read A from the same element are multiplied together, three at a time.
    void multiply_merged(const Memory& memory, const Tile& tile, std::int64_t count, const Phase& phase, float* sums) const {
        const Axis &of_h = window.axis[1], &of_w = window.axis[2];
        const int depth = static_cast<int>(units(count));
        for (int odd = 0; odd < factors; ++odd) {
            const T* const from = reinterpret_cast<const T*>(memory.a + zeros) - odd;
            const Unit* b[3];
            float* to[3];
            int waiting = 0;
            const auto multiply = [&](auto some) {
                const auto* const a = reinterpret_cast<const Unit*>(from);
                if (tile.rows > tile_rows)
                    multiply_diagonal<some, 2>(a, depth, b, depth, to);
                else
                    multiply_diagonal<some, 1>(a, depth, b, depth, to);
                waiting = 0;
            };
            for (std::int64_t th = phase.down; th < of_h.taps; th += period_of(of_h))
                for (std::int64_t tw = phase.across; tw < of_w.taps; tw += period_of(of_w)) {
                    const std::int64_t by = shift_of(of_h, th) * shape.pitch + shift_of(of_w, tw);
                    if (by % factors != odd) continue;
                    b[waiting] = memory.b + by / factors * block;
                    to[waiting++] = sums + ((phase.plane * of_h.taps + th) * of_w.taps + tw) * area;
                    if (waiting == 3) multiply(std::integral_constant<int, 3>{});
                }
            if (waiting == 2) multiply(std::integral_constant<int, 2>{});
            if (waiting == 1) multiply(std::integral_constant<int, 1>{});
        }
    }

    // Rows after the last one stay as they are in A, and nobody reads their sums.
    static void multiply_rows(const Unit* a, int rows, const Unit* b, int depth, float* sums) {
        for_blocks<2, 1>(0, (std::min(rows, block) + tile_rows - 1) / tile_rows, [&](auto count, int tile) {
            multiply_tiles<true, count, 2, Passing::b>(a + tile * tile_rows * depth, tiles_of_rows(depth), b, block, depth,
                                          sums + tile * tile_rows * block, block);
        });
    }

    // Adds the parts of the rows of a tile of a block, in order, and stores them.
    void store_slice(const float* sums, const Tile& tile, std::int64_t slice) {
        constexpr int tiles = block / tile_rows;
        const std::int64_t number = slice / tiles, tap = number / of_across / of_down;
        const int row = static_cast<int>(number / of_across % of_down * block + slice % tiles * tile_rows);
        const int column = static_cast<int>(number % of_across * block);
        const std::int64_t stride = args.weight.stride_first, first = tile.group * channels_out + tile.row + row;
        T* to = static_cast<T*>(args.weight.data) + first * stride + tap * width + tile.column + column;
        Float odd{};  // 0 where all results are finite
        for (int i = 0; i < std::min(tile.rows - row, tile_rows); ++i, to += stride) {
            const std::int64_t begin = is_merged ? (row + i) / width * width : 0;  // a merged row is of one group
            const std::int64_t end = is_merged ? begin + width : std::min(tile.columns - column, block);
            for (std::int64_t j = begin; j < end; j += lanes) {
                const float* const from = sums + slice * tile_rows * block + i * block + j;
                Float sum = load_first(from, end - j);
                for (std::int64_t part = 1; part < parts; ++part) sum += load_first(from + part * sums_of_tile(), end - j);
                store_first(to + j - begin, sum, end - j);
                odd += sum - sum;
            }
        }
        if (!(reduce_sum(odd) == 0)) finite = false;
    }

    const catalog_args& args;
    const Geometry& of;
    const Window& window;
    const int threads;
    const std::int64_t width;  // input channels of a group
    const bool is_merged;
    const std::int64_t groups, channels_in, channels_out, taps;
    LineShape shape{};
    std::int64_t positions = 0, images = 1, rows = 1, columns = 1;  // of a chunk
    std::int64_t row_pieces = 1, column_pieces = 1, chunks = 0, parts = 1;
    std::int64_t of_down = 1, of_across = 1, down = 1, across = 1;  // blocks of a tile, and tiles of a group
    bool is_taken = false;
    std::atomic<bool> finite = true;
};

}  // namespace catalog::host
