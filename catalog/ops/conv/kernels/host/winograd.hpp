// Convolutions of 3 x 3 elements with strides of 1 by minimal filtering, F(2 x 2, 3 x 3): four results, neighbours in a
// square, take 16 products for each channel instead of 36. Channels are the last axis. Of filters with three axes, each
// plane is such a filter, and products of all planes are added.
//
// Images in squares of 4 x 4 and weights are transformed by sums and differences alone. Then there are 16 products of
// matrices, squares x channels times channels x channels, and another transform makes results of them.
#pragma once

#include <atomic>

#include "host/around.hpp"
#include "host/blocks.hpp"
#include "squares.hpp"

namespace catalog::host {

template <class Row>
class WinogradProduct {
    using T = typename Row::dtype;
    static_assert(std::is_same_v<T, float> && Row::direction != Direction::bwd_weight && Row::last);
    static constexpr bool forward = Row::direction == Direction::forward;
    static constexpr int side = square_side, places = square_places;  // of a square of the image that is read
    static constexpr int made = square_step;                          // results along a side
    static constexpr int tile_m = Row::tile_m, tile_n = Row::tile_n, tile_k = Row::tile_k, panel = Row::warp_tile_n;
    static constexpr int gap = 16, image_s = tile_k + gap, sums_s = tile_n + gap;
    static_assert(tile_n % panel == 0 && tile_k % lanes == 0);

    struct Scratch {
        alignas(64) T images[places][tile_m * image_s];
        alignas(64) T sums[places][tile_m * sums_s];
    };

   public:
    WinogradProduct(const catalog_args& args, const Geometry& of, const Window& window, int threads)
        : args(args),
          of(of),
          window(window),
          threads(threads),
          planes(window.axis[0].taps),
          depth((forward ? args.c : args.k) / args.g),
          columns((forward ? args.k : args.c) / args.g),
          panels((columns + panel - 1) / panel),
          squares(window, args.n),
          together(groups_together()),
          storing((forward ? args.output : args.input).data,
                  args.n * window.positions() * columns * args.g * static_cast<std::int64_t>(sizeof(T))) {}

    catalog_status run() {
        if (!is_minimal(of)) return CATALOG_UNSUPPORTED;
        if (squares.count() == 0) return CATALOG_OK;
        Room<T>& room = thread_room<struct TransformedWeights, T>();
        weights = room.reserve(args.g * panels * planes * places * depth * panel);
        T* const none = thread_room<struct NoChannels, T>().reserve(together * depth);
        if (!weights || !none) return CATALOG_NO_MEMORY;
        std::fill_n(none, together * depth, T{});
        zeros = none;
        const std::int64_t pieces = (depth + lanes - 1) / lanes;
        parallel_for(args, threads, args.g * panels * planes * pieces, [&](std::int64_t task) {
            const std::int64_t index = task / pieces / planes;
            transform_weights(index / panels, index % panels, task / pieces % planes, task % pieces * lanes);
        });
        const std::int64_t sets = (args.g + together - 1) / together;
        const Division<Row> division(sets, squares.count(), together > 1 ? panel : columns, threads);
        const std::int64_t item_rows = (squares.count() + division.down - 1) / division.down;  // nearly even
        std::atomic<bool> out_of_memory = false;
        parallel_for(args, threads, sets * division.items(), [&](std::int64_t item) {
            Scratch* const scratch = thread_scratch<Scratch>();
            if (!scratch) return void(out_of_memory = true);
            const std::int64_t first = item % division.down * item_rows;
            const std::int64_t column = item / division.down % division.across * division.item_columns;
            multiply_tile(*scratch, item / division.items() * together, first,
                          static_cast<int>(std::min(item_rows, squares.count() - first)), column,
                          static_cast<int>(std::min<std::int64_t>(division.item_columns, columns - column)));
        });
        constexpr std::size_t most = 16 << 20;  // elements that stay in memory for the next launch
        room.release_above(most);
        return out_of_memory ? CATALOG_NO_MEMORY : CATALOG_OK;
    }

   private:
    // Groups whose channels are transformed together, so that what a square reads is found once for all of them. They are
    // fewer where threads would have nothing to do.
    std::int64_t groups_together() const {
        const std::int64_t most = std::min({tile_k / depth, tile_n / (panels * panel), std::int64_t{args.g}});
        const std::int64_t rows = (squares.count() + tile_m - 1) / tile_m;
        return std::max<std::int64_t>(std::min(most, args.g * rows / (Division<Row>::items_per_thread * threads)), 1);
    }

    static void transform_weights(const Float (&w)[3], Float* to, int step) {
        const Float outer = (w[0] + w[2]) * 0.5f, inner = w[1] * 0.5f;
        to[0] = w[0];
        to[step] = outer + inner;
        to[2 * step] = outer - inner;
        to[3 * step] = w[2];
    }

    // Of 3 x 3 elements.
    static void transform_square(const Float (&w)[3][3], Float (&to)[places]) {
        Float columns[3][side];
        for (int x = 0; x < 3; ++x) transform_weights({w[0][x], w[1][x], w[2][x]}, columns[x], 1);
        for (int y = 0; y < side; ++y) transform_weights({columns[0][y], columns[1][y], columns[2][y]}, to + y * side, 1);
    }

    const T* weight(std::int64_t group, std::int64_t out) const {
        return static_cast<const T*>(args.weight.data) + (group * (args.k / args.g) + out) * args.weight.stride_first;
    }

    // The element of a filter that meets an element of an image; gradients meet it from the other end.
    static int tap(int y, int x) { return forward ? 3 * y + x : 8 - (3 * y + x); }

    T* transformed(std::int64_t group, std::int64_t index, std::int64_t plane, int place) const {
        return weights + (((group * panels + index) * planes + plane) * places + place) * depth * panel;
    }

    // The first element of a plane of a filter.
    std::int64_t of_plane(std::int64_t plane) const { return 9 * (window.axis[0].tap + plane * window.axis[0].tap_step); }

    // Some channels of the depth, for a panel of columns.
    void transform_weights(std::int64_t group, std::int64_t index, std::int64_t plane, std::int64_t channel) const {
        const std::int64_t channels = args.c / args.g, count = std::min<std::int64_t>(lanes, depth - channel);
        const std::int64_t element = of_plane(plane);
        const auto read = [&](const T* from, std::int64_t some, Float (&to)[places]) {
            Float w[3][3];
            for (int y = 0; y < 3; ++y)
                for (int x = 0; x < 3; ++x) w[y][x] = load_first(from + (element + tap(y, x)) * channels, some);
            transform_square(w, to);
        };
        for (int j = 0; j < panel; j += lanes) {
            const std::int64_t column = index * panel + j;
            Float squares[lanes][places] = {};
            for (int i = 0; i < lanes; ++i)
                if (!forward && i < count && column < columns)
                    read(weight(group, channel + i) + column, columns - column, squares[i]);
                else if (forward && column + i < columns)
                    read(weight(group, column + i) + channel, count, squares[i]);
            for (int place = 0; place < places; ++place) {
                Float rows[lanes];
                for (int i = 0; i < lanes; ++i) rows[i] = squares[i][place];
                if (forward) transpose(rows);
                T* const to = transformed(group, index, plane, place) + channel * panel + j;
                for (std::int64_t i = 0; i < count; ++i) store(to + i * panel, rows[i]);
            }
        }
    }

    Image<const T> image_read(std::int64_t group) const {
        if constexpr (forward)
            return {args.input, of.size, args.c, args.g, group, true};
        else
            return {args.output, of.out, args.k, args.g, group, true};
    }

    // Squares from `first` on, of the groups from `group` on that are computed together.
    void multiply_tile(Scratch& scratch, std::int64_t group, std::int64_t first, int rows, std::int64_t column,
                       int count) const {
        const auto groups = static_cast<int>(std::min(together, args.g - group));
        const Image<const T> image = image_read(group);
        const std::int64_t pieces = (depth + tile_k - 1) / tile_k;
        for (std::int64_t step = 0; step < planes * pieces; ++step) {
            const std::int64_t plane = step / pieces, k = step % pieces * tile_k;
            const int deep = static_cast<int>(std::min<std::int64_t>(tile_k, depth - k));
            for (int i = 0; i < rows; ++i) {
                const T* channels[places];
                squares.find_channels(image, squares[first + i], plane, zeros, channels);
                transform_image(channels, k, groups * deep, scratch.images[0] + i * image_s, tile_m * image_s);
            }
            for (int of = 0; of < groups; ++of)
                for (int j = 0; j < count; j += panel)
                    for (int place = 0; place < places; ++place) {
                        const Rows<const T> b{transformed(group + of, (column + j) / panel, plane, place) + k * panel, panel};
                        T* const sums = scratch.sums[place] + of * panels * panel + j;
                        for_even_row_blocks<Row::warp_tile_m>(0, rows, [&](auto block, int i) {
                            multiply_block<block, panel, image_s, 1>(
                                scratch.images[place] + i * image_s + of * deep, b, deep,
                                [to = sums + i * sums_s, adds = step > 0](int r, int l, Float sum) {
                                    T* const at = to + r * sums_s + l;
                                    store(at, adds ? load(at) + sum : sum);
                                });
                        });
                    }
        }
        for (int i = 0; i < rows; ++i) finish(scratch, i, group, groups, squares[first + i], column, count);
        storing.finish();
    }

    // The results of a square, `count` columns of each group.
    void finish(const Scratch& scratch, int row, std::int64_t group, int groups, const Square& at, std::int64_t column,
                int count) const {
        const Image<T> image = forward ? Image<T>(args.output, of.out, args.k, args.g, group, true)
                                       : Image<T>(args.input, of.size, args.c, args.g, group, true);
        T* to[made * made];
        for (int i = 0; i < made * made; ++i) {
            const std::int64_t y = at.y + i / made, x = at.x + i % made;
            const bool inside = y < image.extents[1] && x < image.extents[2];
            to[i] = inside ? image.data + at.image * image.stride_image + image.index(at.z, y, x) * image.all_channels + column
                           : nullptr;
        }
        const auto each_group = [&](auto visit) {
            T* of_group[made * made];
            std::copy_n(to, made * made, of_group);
            for (int of = 0; of < groups; ++of) {
                visit(of, scratch.sums[0] + row * sums_s + of * panels * panel, of_group);
                for (T*& place : of_group)
                    if (place) place += columns;
            }
        };
        Float odd{};  // 0 where all results are numbers
        each_group([&](int, const T* sums, T* const (&results)[made * made]) { odd += finish_group(sums, count, results); });
        if (reduce_sum(odd) == 0) return;
        each_group([&](int of, const T* sums, T* const (&results)[made * made]) {
            if (!(reduce_sum(finish_group(sums, count, results)) == 0))
                compute_directly(group + of, at, column, count, results);
        });
    }

    // From the sums of a square, which are in the same place of each matrix. Returns 0 where all results are numbers.
    Float finish_group(const T* sums, int count, T* const (&to)[made * made]) const {
        Float odd{};
        for (int j = 0; j < count; j += lanes) {
            Float m[made][side];
#pragma GCC unroll 4
            for (int x = 0; x < side; ++x) {
                const auto sum = [&](int y) { return load(sums + (y * side + x) * (tile_m * sums_s) + j); };
                m[0][x] = sum(0) + sum(1) + sum(2);
                m[1][x] = sum(1) - sum(2) - sum(3);
            }
#pragma GCC unroll 2
            for (int y = 0; y < made; ++y) {
                const Float results[made] = {m[y][0] + m[y][1] + m[y][2], m[y][1] - m[y][2] - m[y][3]};
#pragma GCC unroll 2
                for (int x = 0; x < made; ++x) {
                    odd += results[x] - results[x];
                    if (to[y * made + x]) storing.store(to[y * made + x] + j, results[x], count - j);
                }
            }
        }
        return odd;
    }

    // As the definition reads. An infinite element would make results NaN that it does not meet.
    __attribute__((noinline)) void compute_directly(std::int64_t group, const Square& at, std::int64_t column, int count,
                                                    T* const (&to)[made * made]) const {
        const std::int64_t of_tap = args.c / args.g;
        const Image<const T> image = image_read(group);
        for (int i = 0; i < made * made; ++i)
            for (int j = 0; to[i] && j < count; ++j) to[i][j] = 0;
        for (std::int64_t plane = 0; plane < planes; ++plane) {
            const T* channels[places];
            squares.find_channels(image, at, plane, zeros, channels);
            for (int i = 0; i < made * made; ++i)
                for (int j = 0; to[i] && j < count; ++j)
                    for (int y = 0; y < 3; ++y)
                        for (int x = 0; x < 3; ++x) {
                            const T* const from = channels[(i / made + y) * side + i % made + x];
                            const std::int64_t element = (of_plane(plane) + tap(y, x)) * of_tap;
                            float sum = 0;
                            for (std::int64_t k = 0; k < depth; ++k)
                                sum += from[k] * (forward ? weight(group, column + j)[element + k]
                                                          : weight(group, k)[element + column + j]);
                            to[i][j] += sum;
                        }
        }
    }

    const catalog_args& args;
    const Geometry& of;
    const Window& window;
    const int threads;
    const std::int64_t planes, depth, columns, panels;
    const Squares squares;
    const std::int64_t together;  // groups
    const Storing storing;
    T* weights;  // transformed: of each panel of columns, planes x places x depth x panel
    const T* zeros;
};

}  // namespace catalog::host
