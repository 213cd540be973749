// The gradient of weights of 3 x 3 elements, whose strides are 1, by minimal filtering, F(3 x 3, 2 x 2): what 2 x 2 elements
// of the gradient of the output add to the nine elements of a filter takes 16 products instead of 36. Channels are the last
// axis.
//
// The same squares of the image as in winograd.hpp and the 2 x 2 gradients are transformed by sums and differences. There are
// 16 products of matrices, channels x squares times squares x channels. Threads share the squares where there are few
// channels; the number of parts does not depend on the number of threads.
#pragma once

#include <atomic>

#include "host/around.hpp"
#include "host/gemm.hpp"
#include "host/threads.hpp"
#include "squares.hpp"

namespace catalog::host {

template <class Row>
class WinogradGradients {
    using T = typename Row::dtype;
    static_assert(std::is_same_v<T, float> && Row::direction == Direction::bwd_weight && Row::last);
    static constexpr int places = square_places, side = square_side, taps = 9;  // of a plane of the filter
    static constexpr int tile_m = Row::tile_m, tile_n = Row::tile_n, tile_k = Row::tile_k, panel = Row::warp_tile_n;
    // Rows and places whose distances are powers of two would share few sets of the L1 cache.
    static constexpr int gap = 16, gradient_s = tile_m + gap, sums_s = tile_n + gap;
    static constexpr std::int64_t of_image = tile_k * tile_n + gap, of_gradient = tile_k * gradient_s;
    static constexpr std::int64_t of_sums = tile_m * sums_s + gap;
    static constexpr std::int64_t most_shares = 32, least_steps = 2;  // of a tile, and of a part
    static_assert(tile_m % lanes == 0 && tile_n % panel == 0);

    struct Scratch {
        alignas(64) T images[places * of_image];
        alignas(64) T gradients[places * of_gradient];
        alignas(64) T sums[places * of_sums];  // at last, the first nine are elements of the filter
    };

    // Output and input channels of a group, for a plane of the filter.
    struct Tile {
        std::int64_t group, plane, row, column;
        int rows, columns;
    };

   public:
    WinogradGradients(const catalog_args& args, const Geometry& of, const Window& window, int threads)
        : args(args),
          of(of),
          window(window),
          threads(threads),
          planes(window.axis[0].taps),
          channels_in(args.c / args.g),
          channels_out(args.k / args.g),
          down((channels_out + tile_m - 1) / tile_m),
          across((channels_in + tile_n - 1) / tile_n),
          squares(window, args.n),
          steps((squares.count() + tile_k - 1) / tile_k),
          storing(args.weight.data, args.k * planes * taps * channels_in * static_cast<std::int64_t>(sizeof(T))) {}

    catalog_status run() {
        if (!is_minimal(of)) return CATALOG_UNSUPPORTED;
        const std::int64_t tiles = args.g * planes * down * across;
        if (tiles == 0) return CATALOG_OK;
        const std::int64_t most_channels = std::max(channels_in, channels_out);
        T* const none = thread_room<struct NoChannels, T>().reserve(most_channels);
        parts = std::max<std::int64_t>(std::min(most_shares / tiles, steps / least_steps), 1);
        T* const all_sums =
            parts > 1 ? thread_room<struct SumsOfParts, T>().reserve(tiles * parts * taps * of_sums) : nullptr;
        if (!none || (parts > 1 && !all_sums)) return CATALOG_NO_MEMORY;
        std::fill_n(none, most_channels, T{});
        zeros = none;
        std::atomic<bool> out_of_memory = false;
        parallel_for(args, threads, tiles * parts, [&](std::int64_t share) {
            Scratch* const scratch = thread_scratch<Scratch>();
            if (!scratch) return void(out_of_memory = true);
            const std::int64_t part = share % parts;
            const Tile tile = tile_of(share / parts);
            multiply_tile(*scratch, tile, steps * part / parts, steps * (part + 1) / parts);
            finish(*scratch, tile, parts > 1 ? all_sums + share * taps * of_sums : scratch->sums);
            if (parts == 1) store_rows(scratch->sums, tile, 0, tile.rows);
        });
        if (parts > 1 && !out_of_memory) {
            constexpr int slice = lanes, slices = tile_m / slice;
            parallel_for(args, threads, tiles * slices, [&](std::int64_t task) {
                const Tile tile = tile_of(task / slices);
                const int first = static_cast<int>(task % slices) * slice;
                store_rows(all_sums + task / slices * parts * taps * of_sums, tile, first,
                           std::min(first + slice, tile.rows));
            });
        }
        return out_of_memory ? CATALOG_NO_MEMORY : CATALOG_OK;
    }

   private:
    Tile tile_of(std::int64_t index) const {
        const std::int64_t row = index % down * tile_m, column = index / down % across * tile_n;
        const std::int64_t plane = index / down / across % planes, group = index / down / across / planes;
        return {group, plane, row, column, static_cast<int>(std::min<std::int64_t>(channels_out - row, tile_m)),
                static_cast<int>(std::min<std::int64_t>(channels_in - column, tile_n))};
    }

    T* weight(const Tile& tile, int row) const {
        return static_cast<T*>(args.weight.data) +
               (tile.group * channels_out + tile.row + row) * args.weight.stride_first +
               tile.plane * taps * channels_in + tile.column;
    }

    Image<const T> image_read(std::int64_t group) const { return {args.input, of.size, args.c, args.g, group, true}; }
    Image<const T> gradient_read(std::int64_t group) const { return {args.output, of.out, args.k, args.g, group, true}; }

    // Some steps of the squares are multiplied.
    void multiply_tile(Scratch& scratch, const Tile& tile, std::int64_t first_step, std::int64_t end_step) const {
        const Image<const T> image = image_read(tile.group), gradient = gradient_read(tile.group);
        if (first_step == end_step) std::fill(scratch.sums, scratch.sums + places * of_sums, T{});
        for (std::int64_t step = first_step; step < end_step; ++step) {
            const std::int64_t first = step * tile_k;
            const int deep = static_cast<int>(std::min<std::int64_t>(tile_k, squares.count() - first));
            for (int i = 0; i < deep; ++i) {
                const Square at = squares[first + i];
                const T* channels[places];
                squares.find_channels(image, at, tile.plane, zeros, channels);
                transform_image(channels, tile.column, tile.columns, scratch.images + i * tile_n, of_image);
                transform_gradient(gradient, at, tile.row, tile.rows, scratch.gradients + i * gradient_s);
            }
            for (int place = 0; place < places; ++place)
                for (int j = 0; j < tile.columns; j += panel) {
                    const Rows<const T> b{scratch.images + place * of_image + j, tile_n};
                    T* const sums = scratch.sums + place * of_sums + j;
                    for_even_row_blocks<Row::warp_tile_m>(0, tile.rows, [&](auto block, int i) {
                        multiply_block<block, panel, 1, gradient_s>(
                            scratch.gradients + place * of_gradient + i, b, deep,
                            [to = sums + i * sums_s, adds = step > first_step](int r, int l, Float sum) {
                                T* const at = to + r * sums_s + l;
                                store(at, adds ? load(at) + sum : sum);
                            });
                    });
                }
        }
    }

    // Two neighbours, as the filter's elements meet them. Halves of the sums are left to finish().
    static void transform_gradient(Float first, Float second, Float* to, int step) {
        to[0] = first;
        to[step] = first + second;
        to[2 * step] = first - second;
        to[3 * step] = second;
    }

    // `count` channels of a square: in each place, a row of the matrix that is multiplied.
    void transform_gradient(const Image<const T>& image, const Square& at, std::int64_t first, int count, T* to) const {
        const T* channels[square_step][square_step];
        for (int y = 0; y < square_step; ++y)
            for (int x = 0; x < square_step; ++x) {
                const bool inside = at.y + y < image.extents[1] && at.x + x < image.extents[2];
                channels[y][x] = inside ? image.data + at.image * image.stride_image +
                                              image.index(at.z, at.y + y, at.x + x) * image.all_channels + first
                                        : zeros;
            }
        for (int k = 0; k < count; k += lanes) {
            const auto read = [&](int y, int x) { return load_first(channels[y][x] + k, count - k); };
            Float columns[square_step][side], x[places];
#pragma GCC unroll 2
            for (int i = 0; i < square_step; ++i) transform_gradient(read(0, i), read(1, i), columns[i], 1);
#pragma GCC unroll 4
            for (int i = 0; i < side; ++i) transform_gradient(columns[0][i], columns[1][i], x + side * i, 1);
#pragma GCC unroll 16
            for (int place = 0; place < places; ++place) store(to + place * of_gradient + k, x[place]);
        }
    }

    // Sums of four places along an axis become three elements of the filter.
    static void transform_sums(Float (&x)[places], int begin, int step) {
        Float *const a = x + begin, *const b = a + step, *const c = b + step, *const d = c + step;
        const Float sum = (*b + *c) * 0.5f, difference = (*b - *c) * 0.5f;
        *a += sum;
        *b = difference;
        *c = sum - *d;
    }

    // The sums become elements of the filter, in the first places of `to`, which may be the sums.
    static void finish(Scratch& scratch, const Tile& tile, T* to) {
        for (int i = 0; i < tile.rows; ++i)
            for (int j = 0; j < tile.columns; j += lanes) {
                const std::int64_t at = i * sums_s + j;
                Float x[places];
#pragma GCC unroll 16
                for (int place = 0; place < places; ++place) x[place] = load(scratch.sums + place * of_sums + at);
#pragma GCC unroll 4
                for (int l = 0; l < side; ++l) transform_sums(x, l, side);
#pragma GCC unroll 3
                for (int l = 0; l < 3; ++l) transform_sums(x, side * l, 1);
#pragma GCC unroll 9
                for (int tap = 0; tap < taps; ++tap) store(to + tap * of_sums + at, x[tap / 3 * side + tap % 3]);
            }
    }

    // Adds the parts of some rows, in order, and stores them.
    void store_rows(const T* sums, const Tile& tile, int first, int end) const {
        for (int i = first; i < end; ++i)
            for (int j = 0; j < tile.columns; j += lanes) {
                Float odd{};  // 0 where all results are numbers
                for (int tap = 0; tap < taps; ++tap) {
                    const T* const from = sums + tap * of_sums + i * sums_s + j;
                    Float sum = load(from);
                    for (std::int64_t part = 1; part < parts; ++part) sum += load(from + part * taps * of_sums);
                    odd += sum - sum;
                    storing.store(weight(tile, i) + tap * channels_in + j, sum, tile.columns - j);
                }
                if (!(reduce_sum(odd) == 0)) compute_directly(tile, i, j, std::min(lanes, tile.columns - j));
            }
        storing.finish();
    }

    // As the definition reads. An infinite element would make elements NaN that it does not meet.
    __attribute__((noinline)) void compute_directly(const Tile& tile, int row, int column, int count) const {
        const Image<const T> image = image_read(tile.group), gradient = gradient_read(tile.group);
        Float sums[taps] = {};
        for (std::int64_t index = 0; index < squares.count(); ++index) {
            const Square at = squares[index];
            const T* channels[places];
            squares.find_channels(image, at, tile.plane, zeros, channels);
            for (int y = 0; y < square_step && at.y + y < gradient.extents[1]; ++y)
                for (int x = 0; x < square_step && at.x + x < gradient.extents[2]; ++x) {
                    const std::int64_t position = gradient.index(at.z, at.y + y, at.x + x);
                    const T made = gradient.data[at.image * gradient.stride_image +
                                                 position * gradient.all_channels + tile.row + row];
                    for (int tap = 0; tap < taps; ++tap)
                        sums[tap] += made * load_first(channels[(y + tap / 3) * side + x + tap % 3] + tile.column + column,
                                                       count);
                }
        }
        for (int tap = 0; tap < taps; ++tap) store_first(weight(tile, row) + tap * channels_in + column, sums[tap], count);
    }

    const catalog_args& args;
    const Geometry& of;
    const Window& window;
    const int threads;
    const std::int64_t planes, channels_in, channels_out;
    const std::int64_t down, across;  // tiles of a plane
    const Squares squares;
    const std::int64_t steps;
    const Storing storing;
    std::int64_t parts = 1;
    const T* zeros;
};

}  // namespace catalog::host
