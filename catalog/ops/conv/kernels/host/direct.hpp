// Convolutions of narrow groups, depthwise ones first of all: a vector holds the channels of whole groups, and no product is
// wasted on channels of other groups. Channels are the last axis, and each group has as many input as output channels.
#pragma once

#include <atomic>

#include "host/dtype.hpp"
#include "host/threads.hpp"
#include "image.hpp"

namespace catalog::host {

// In each group of `width` lanes, its lane `j`.
template <int width, int j>
struct LaneOfGroup {
    static constexpr unsigned at(int lane) { return lane / width * width + j; }
};

// Calls body(std::integral_constant<int, j>, channel j of each group) for the channels of groups that a vector holds. Where it
// holds one group, a channel is a number in memory, which costs no permutation.
template <int width, class T, class Body, int... j>
inline void for_channels(const T* from, std::int64_t count, Body body, std::integer_sequence<int, j...>) {
    if constexpr (width == lanes && std::is_same_v<T, float>) {
        (body(std::integral_constant<int, j>{}, from[j]), ...);
    } else {
        const Float x = load_first(from, count);
        if constexpr (width == 1)
            body(std::integral_constant<int, 0>{}, x);
        else
            (body(std::integral_constant<int, j>{}, permute<LaneOfGroup<width, j>>(x, x)), ...);
    }
}

template <int width, class T, class Body>
inline void for_channels(const T* from, std::int64_t count, Body body) {
    for_channels<width>(from, count, body, std::make_integer_sequence<int, width>{});
}

// Positions along an axis whose taps are all inside of the image: from `first` to `end`.
struct Interior {
    std::int64_t first, end;

    explicit Interior(const Axis& axis) {
        const std::int64_t reach = axis.apart * (axis.taps - 1);
        const std::int64_t lowest = axis.origin + std::min<std::int64_t>(reach, 0);
        const std::int64_t highest = axis.origin + std::max<std::int64_t>(reach, 0);
        const std::int64_t free = axis.extent - 1 - highest;
        first = std::min(lowest < 0 ? (-lowest + axis.stride - 1) / axis.stride : 0, axis.count);
        end = std::clamp(free < 0 ? 0 : free / axis.stride + 1, first, axis.count);
    }
};

template <class Row, int width>
class NarrowGroups {
    using T = typename Row::dtype;
    static constexpr Direction direction = Row::direction;
    static constexpr int at_once = vector_bytes == 32 ? 6 : 8;  // positions, each with a vector of sums
    static constexpr int blocks_per_item = 4;

   public:
    NarrowGroups(const catalog_args& args, const Geometry& of, const Window& window, int threads)
        : args(args),
          of(of),
          window(window),
          threads(threads),
          taps(window.taps()),
          blocks((args.c + lanes - 1) / lanes),
          input(args.input, of.size, args.c, 1, 0, true),
          output(args.output, of.out, args.k, 1, 0, true),
          interior(window.axis[2]) {}

    catalog_status run() {
        if constexpr (direction == Direction::bwd_weight) {
            parallel_for(args, threads, blocks * of.filter[0] * of.filter[1], [&](std::int64_t item) {
                add_up(item / of.filter[1] / of.filter[0], item / of.filter[1] % of.filter[0], item % of.filter[1]);
            });
        } else {
            packed = thread_room<struct PackedWeights, float>().reserve(blocks * taps * width * lanes + 1);
            if (!packed) return CATALOG_NO_MEMORY;
            parallel_for(args, threads, blocks, [&](std::int64_t block) { pack_weights(block); });
            const std::int64_t parts = (blocks + blocks_per_item - 1) / blocks_per_item;
            const std::int64_t rows = args.n * window.axis[0].count * window.axis[1].count;
            parallel_for(args, threads, rows * parts, [&](std::int64_t item) {
                const std::int64_t first = item % parts * blocks_per_item, row = item / parts;
                for (std::int64_t block = first; block < std::min(first + blocks_per_item, blocks); ++block)
                    if (channels_of(block) == lanes)
                        compute_row(std::integral_constant<int, lanes>{}, row, block);
                    else
                        compute_row(channels_of(block), row, block);
            });
        }
        return CATALOG_OK;
    }

   private:
    std::int64_t channels_of(std::int64_t block) const { return std::min<std::int64_t>(lanes, args.c - block * lanes); }

    // For each tap and each channel of a group, the factors of a block's channels.
    void pack_weights(std::int64_t block) const {
        const T* const weight = static_cast<const T*>(args.weight.data);
        float* const to = packed + block * taps * width * lanes;
        for (std::int64_t t = 0; t < taps; ++t) {
            const std::int64_t tap = Tap(window, t).number(window, of);
            for (int j = 0; j < width; ++j) {
                T row[lanes] = {};
                for (int lane = 0; lane < channels_of(block); ++lane) {
                    const std::int64_t channel = block * lanes + lane, in_group = channel % width;
                    const std::int64_t made = direction == Direction::forward ? channel : channel - in_group + j;
                    const std::int64_t read = direction == Direction::forward ? j : in_group;
                    row[lane] = weight[made * args.weight.stride_first + tap * width + read];
                }
                store(to + (t * width + j) * lanes, load(row));
            }
        }
    }

    // `count` channels of a block, for a row of an image.
    template <class Count>
    void compute_row(Count count, std::int64_t row, std::int64_t block) const {
        const Axis *const of_d = window.axis, *const of_h = of_d + 1, *const of_w = of_d + 2;
        const Image<T>&made = direction == Direction::forward ? output : input,
             &read = direction == Direction::forward ? input : output;
        const std::int64_t h = row % of_h->count, d = row / of_h->count % of_d->count;
        const std::int64_t image = row / of_h->count / of_d->count, channels = made.all_channels;
        const std::int64_t row_d = of_d->origin + d * of_d->stride, row_h = of_h->origin + h * of_h->stride;
        const T* const from = read.data + image * read.stride_image + block * lanes;
        const std::int64_t first = made.index(of_d->first + d * of_d->step, of_h->first + h * of_h->step, of_w->first);
        T* const to = made.data + image * made.stride_image + first * channels + block * lanes;
        const float* const weights = packed + block * taps * width * lanes;

        const auto compute = [&](auto positions, auto checked, std::int64_t p) {
            Float sums[positions];  // set one by one: as a whole, they would be set in memory
#pragma GCC unroll 8
            for (int i = 0; i < positions; ++i) sums[i] = Float{};
            const std::int64_t w = of_w->origin + p * of_w->stride;
            for (std::int64_t td = 0; td < of_d->taps; ++td) {
                const std::int64_t at_d = row_d + td * of_d->apart;
                if (at_d < 0 || at_d >= of_d->extent) continue;
                for (std::int64_t th = 0; th < of_h->taps; ++th) {
                    const std::int64_t at_h = row_h + th * of_h->apart;
                    if (at_h < 0 || at_h >= of_h->extent) continue;
                    const T* const line = from + read.index(at_d, at_h, 0) * channels;
                    const float* factors = weights + (td * of_h->taps + th) * of_w->taps * width * lanes;
                    for (std::int64_t tw = 0; tw < of_w->taps; ++tw, factors += width * lanes) {
                        const std::int64_t at_w = w + tw * of_w->apart;
                        if (checked && (at_w < 0 || at_w >= of_w->extent)) continue;
                        Float factor[width];
#pragma GCC unroll 16
                        for (int j = 0; j < width; ++j) factor[j] = load(factors + j * lanes);
#pragma GCC unroll 8
                        for (int i = 0; i < positions; ++i) {
                            const T* const element = line + (at_w + i * of_w->stride) * channels;
                            for_channels<width>(element, count, [&](auto j, auto x) { sums[i] += x * factor[j]; });
                        }
                    }
                }
            }
#pragma GCC unroll 8
            for (int i = 0; i < positions; ++i) store_first(to + (p + i) * of_w->step * channels, sums[i], count);
        };
        const std::integral_constant<int, 1> one;
        std::int64_t p = 0;
        for (; p < interior.first; ++p) compute(one, std::true_type{}, p);
        if constexpr (!std::is_integral_v<Count>)  // a whole vector
            for (; p + at_once <= interior.end; p += at_once)
                compute(std::integral_constant<int, at_once>{}, std::false_type{}, p);
        for (; p < of_w->count; ++p) compute(one, std::true_type{}, p);
    }

    // The gradient of a block's weights, for the taps of one row of the filter.
    void add_up(std::int64_t block, std::int64_t td, std::int64_t th) const {
        constexpr int some = 3;  // taps whose sums fit in registers
        std::int64_t tw = 0;
        for (; tw + some <= of.filter[2]; tw += some) add_up_taps<some>(block, td, th, tw);
        for (; tw < of.filter[2]; ++tw) add_up_taps<1>(block, td, th, tw);
    }

    template <int some>
    void add_up_taps(std::int64_t block, std::int64_t td, std::int64_t th, std::int64_t first) const {
        constexpr int part = std::min(width, 8);  // of the channels of a group, whose sums fit in registers
        const Axis *const of_d = window.axis, *const of_h = of_d + 1;
        Axis of_w = window.axis[2];
        of_w.origin += first * of_w.apart;
        of_w.taps = some;
        const Interior inside(of_w);
        const std::int64_t channels = args.c;
        for (int begin = 0; begin < width; begin += part) {
            Float totals[some][part] = {};
            for (std::int64_t image = 0; image < args.n; ++image)
                for (std::int64_t d = 0; d < of_d->count; ++d)
                    for (std::int64_t h = 0; h < of_h->count; ++h) {
                        const std::int64_t at_d = of_d->origin + d * of_d->stride + td * of_d->apart;
                        const std::int64_t at_h = of_h->origin + h * of_h->stride + th * of_h->apart;
                        if (at_d < 0 || at_d >= of_d->extent || at_h < 0 || at_h >= of_h->extent) continue;
                        const T* const seen = input.data + image * input.stride_image + block * lanes +
                                              input.index(at_d, at_h, 0) * channels;
                        const T* const made = output.data + image * output.stride_image + block * lanes +
                                              output.index(d, h, 0) * channels;
                        Float sums[some][part] = {};
                        const auto add = [&](auto checked, auto count, std::int64_t p) {
                            const Float gradient = load_first(made + p * channels, count);
#pragma GCC unroll 4
                            for (int t = 0; t < some; ++t) {
                                const std::int64_t at_w = of_w.origin + p * of_w.stride + t * of_w.apart;
                                if (checked && (at_w < 0 || at_w >= of_w.extent)) continue;
                                for_channels<width>(seen + at_w * channels, count, [&](auto j, auto x) {
                                    if (j >= begin && j < begin + part) sums[t][j % part] += gradient * x;
                                });
                            }
                        };
                        std::int64_t p = 0;
                        if (channels_of(block) == lanes) {
                            const std::integral_constant<int, lanes> whole;
                            for (; p < inside.first; ++p) add(std::true_type{}, whole, p);
                            for (; p < inside.end; ++p) add(std::false_type{}, whole, p);
                        }
                        for (; p < of_w.count; ++p) add(std::true_type{}, channels_of(block), p);
#pragma GCC unroll 4
                        for (int t = 0; t < some; ++t)
#pragma GCC unroll 8
                            for (int j = 0; j < part; ++j) totals[t][j] += sums[t][j];
                    }
            for (int t = 0; t < some; ++t)
                for (int j = 0; j < part; ++j) store_weights(block, (td * of.filter[1] + th) * of.filter[2] + first + t,
                                                             begin + j, totals[t][j]);
        }
    }

    void store_weights(std::int64_t block, std::int64_t tap, int j, Float gradients) const {
        T row[lanes];
        store(row, gradients);
        T* const to = static_cast<T*>(args.weight.data) + block * lanes * args.weight.stride_first + tap * width + j;
        for (int lane = 0; lane < channels_of(block); ++lane) to[lane * args.weight.stride_first] = row[lane];
    }

    const catalog_args& args;
    const Geometry& of;
    const Window& window;
    const int threads;
    const std::int64_t taps, blocks;
    const Image<T> input, output;
    const Interior interior;
    float* packed = nullptr;
};

// The width of groups that a vector holds whole, or 0.
inline std::int64_t narrow_width(const catalog_args& args) {
    const std::int64_t width = args.c / args.g;
    return args.c == args.k && width <= lanes && lanes % width == 0 ? width : 0;
}

// Calls body(std::integral_constant<int, width>) for the width of a call's groups.
template <int width = 1, class Body>
inline catalog_status with_width(std::int64_t of, Body body) {
    if (of == width) return body(std::integral_constant<int, width>{});
    if constexpr (2 * width <= lanes)
        return with_width<2 * width>(of, body);
    else
        return CATALOG_UNSUPPORTED;
}

}  // namespace catalog::host
