// Convolutions whose groups have one input channel, and one or a few output channels each. Where all of these are fewer than
// the lanes of a vector, a vector holds those of several neighbouring pixels: then no product is wasted, however few channels
// there are.
//
// An item is a strip of an image, row after row. What it meets of a row is copied first, as float32, with the zeros around the
// image: pixels that are a stride apart become neighbours, and a channel is repeated for all that read it. So every tap reads
// its vectors at a fixed distance from the first one's.
#pragma once

#include "host/around.hpp"
#include "multiples.hpp"
#include "narrow.hpp"

namespace catalog::host {

// What the three directions have in common: the lanes of vectors, and the rows that they read. For the gradient of the weight
// lanes are channels of the output's gradient, and rows those of the input.
template <class Row>
class PixelRows {
   protected:
    using T = typename Row::dtype;
    static constexpr bool is_backward = Row::direction == Direction::bwd_data;
    static constexpr int most_outputs = 8;  // of a group

    PixelRows(const catalog_args& args, const Geometry& of, const Window& window, int threads)
        : args(args),
          of(of),
          window{{ascending(window.axis[0]), ascending(window.axis[1]), ascending(window.axis[2])}},
          threads(threads),
          factor(args.k / args.c),
          channels(is_backward ? args.c : args.k),
          pixels(channels < lanes ? lanes / channels : 1),
          pitch(pixels > 1 ? channels : lanes),
          blocks((channels + lanes - 1) / lanes),
          terms(is_backward ? factor : 1),
          taps(window.taps()),
          read(is_backward ? Image<const T>(args.output, of.out, args.k, 1, 0, true)
                           : Image<const T>(args.input, of.size, args.c, 1, 0, true)) {
        for (int lane = 0; lane < lanes; ++lane) pixel_of_lane[lane] = static_cast<int>(lane / pitch);
    }

    // How many positions a strip has, and where its copied rows lie. CATALOG_UNSUPPORTED for many outputs of a group, and where
    // taps are far apart.
    catalog_status divide() {
        constexpr std::int64_t strip = 32, fewest = 8, in_first_cache = 1 << 13, farthest = 1 << 12;  // vectors; floats; pixels
        const Axis &of_d = window.axis[0], &of_h = window.axis[1], &of_w = window.axis[2];
        reach = std::max<std::int64_t>(of_w.taps - 1, 0) * of_w.apart;
        if (factor > most_outputs || reach > farthest) return CATALOG_UNSUPPORTED;
        phases = std::min(of_w.stride, reach + 1);
        kept = std::clamp<std::int64_t>((of_h.taps - 1) * of_h.apart + 1, 1, of_h.extent);
        for (std::int64_t vectors = strip;; vectors /= 2) {
            wide = std::min(vectors * pixels, of_w.count);
            copied = (wide - 1) * of_w.stride + reach + 1;
            of_phase = (copied + of_w.stride - 1) / of_w.stride * pitch + lanes;  // vectors end behind the last pixel
            of_block = terms * of_d.taps * kept * phases * of_phase;
            if (vectors == fewest || of_block <= in_first_cache) break;
        }
        distances = thread_room<struct TapDistances, std::int64_t>().reserve(of_w.taps + 1);
        if (!distances) return CATALOG_NO_MEMORY;
        for (std::int64_t t = 0; t < of_w.taps; ++t) {
            const std::int64_t at = t * of_w.apart;
            distances[t] = at % of_w.stride * of_phase + at / of_w.stride * pitch;
        }
        return CATALOG_OK;
    }

    std::int64_t first_channel(std::int64_t block) const { return block * lanes; }
    std::int64_t count_of(std::int64_t block) const { return std::min<std::int64_t>(lanes, channels - first_channel(block)); }

    // Copies the rows of a block of channels that positions at `h` meet and that the strip has not copied yet.
    void copy_rows(const T* image, std::int64_t block, std::int64_t d, std::int64_t h, std::int64_t position,
                   std::int64_t& next, float* room) const {
        const Axis &of_d = window.axis[0], &of_h = window.axis[1], &of_w = window.axis[2];
        const Range deep = of_d.inside(d);
        const std::int64_t first = of_h.origin + h * of_h.stride;
        const std::int64_t last = first + std::max<std::int64_t>(of_h.taps - 1, 0) * of_h.apart;
        next = std::max({next, first, std::int64_t{0}});
        for (const std::int64_t end = std::min(last + 1, of_h.extent); next < end; ++next)
            for (std::int64_t td = deep.first; td < deep.end; ++td) {
                const std::int64_t at_d = of_d.origin + d * of_d.stride + td * of_d.apart;
                for (std::int64_t term = 0; term < terms; ++term)
                    copy_row(image + read.index(at_d, next, 0) * read.all_channels, block, term,
                             of_w.origin + position * of_w.stride, room + place_of(term, td, next));
            }
    }

    // Where a copied row begins.
    std::int64_t place_of(std::int64_t term, std::int64_t td, std::int64_t h) const {
        return ((term * window.axis[0].taps + td) * kept + h % kept) * phases * of_phase;
    }

    const catalog_args& args;
    const Geometry& of;
    const Window window;
    const int threads;
    const std::int64_t factor;    // output channels of an input channel
    const std::int64_t channels;  // in lanes
    const std::int64_t pixels;    // of a vector
    const std::int64_t pitch;     // floats of a pixel in copied rows
    const std::int64_t blocks;    // vectors for all channels
    const std::int64_t terms;     // channels that are read for each in a lane
    const std::int64_t taps;
    const Image<const T> read;
    Ints pixel_of_lane;
    std::int64_t reach = 0, phases = 0;                 // pixels between taps of a row, and how many classes of these they meet
    std::int64_t wide = 0, copied = 0;                  // positions of a strip, and what they meet in a row
    std::int64_t kept = 0, of_phase = 0, of_block = 0;  // rows; floats
    std::int64_t* distances = nullptr;                  // between what a tap reads and the first one

   private:
    // The elements from `w` on of a row of the image: those that are a stride apart, then others that taps meet.
    void copy_row(const T* row, std::int64_t block, std::int64_t term, std::int64_t w, float* to) const {
        const Axis& of_w = window.axis[2];
        const auto before = [&](std::int64_t end, std::int64_t all) {
            return end > 0 ? std::min((end + of_w.stride - 1) / of_w.stride, all) : 0;
        };
        for (std::int64_t phase = 0; phase < phases; ++phase, ++w, to += of_phase) {
            const std::int64_t all = before(copied - phase, copied), end = before(of_w.extent - w, all);
            const std::int64_t first = std::min(before(-w, all), end);
            clear(first, to);
            const T* const from = row + (w + first * of_w.stride) * read.all_channels;
            copy_pixels(from, block, term, end - first, to + first * pitch);
            clear(all - end, to + end * pitch);
        }
    }

    // Pixels follow each other, so what a vector stores behind its own pixel is stored again.
    void clear(std::int64_t count, float* to) const {
        for (; count > 0; --count, to += pitch) store(to, Float{});
    }

    void copy_pixels(const T* from, std::int64_t block, std::int64_t term, std::int64_t count, float* to) const {
        const std::int64_t channel = first_channel(block), some = count_of(block), step = window.axis[2].stride;
        const auto copy = [&](auto load_pixel) {
            for (; count > 0; --count, from += step * read.all_channels, to += pitch) store(to, load_pixel(from));
        };
        if (factor == 1 && channels == pitch && step == 1) {
            for (count *= channels; count > 0; count -= lanes, from += lanes, to += lanes)
                store(to, load_first(from, count));
        } else if (factor == 1) {
            copy([=](const T* pixel) { return load_first(pixel + channel, some); });
        } else if constexpr (is_backward) {
            alignas(vector_bytes) float seen[lanes * most_outputs], elements[lanes] = {};
            copy([&](const T* pixel) {
                pixel += channel * factor;
                for (std::int64_t i = 0; i < some * factor; i += lanes)
                    store(seen + i, load_first(pixel + i, some * factor - i));
                for (std::int64_t lane = 0; lane < some; ++lane) elements[lane] = seen[lane * factor + term];
                return load(elements);
            });
        } else {
            const std::int64_t first = channel / factor, others = (channel + some - 1) / factor - first;
            Ints reader;
            for (int lane = 0; lane < lanes; ++lane)
                reader[lane] = static_cast<int>(std::min((channel + lane) / factor - first, others));
            copy([=](const T* pixel) { return permute(load_first(pixel + first, others + 1), reader); });
        }
    }
};

// Forward, and the gradient of the input.
template <class Row>
class PixelConvolution : PixelRows<Row> {
    using Base = PixelRows<Row>;
    using typename Base::T;
    using Base::args, Base::blocks, Base::channels, Base::count_of, Base::distances, Base::factor, Base::first_channel;
    using Base::is_backward, Base::of_block, Base::pitch, Base::pixels, Base::read, Base::taps, Base::terms, Base::threads;
    using Base::wide, Base::window;

   public:
    PixelConvolution(const catalog_args& args, const Geometry& of, const Window& window, int threads)
        : Base(args, of, window, threads),
          made(is_backward ? Image<T>(args.input, of.size, args.c, 1, 0, true)
                           : Image<T>(args.output, of.out, args.k, 1, 0, true)) {}

    catalog_status run() {
        if (const catalog_status status = Base::divide(); status != CATALOG_OK) return status;
        if (!pack_weights()) return CATALOG_NO_MEMORY;
        const Axis &of_d = window.axis[0], &of_h = window.axis[1], &of_w = window.axis[2];
        constexpr std::int64_t enough_items = 64, fewest_rows = 4;
        const std::int64_t strips = (of_w.count + wide - 1) / wide, columns = args.n * of_d.count * strips * blocks;
        std::int64_t rows = 28;  // of an item: where one ends, rows are copied for the next one again
        while (rows > fewest_rows && columns * ((of_h.count + rows - 1) / rows) < enough_items) rows /= 2;
        const std::int64_t bands = (of_h.count + rows - 1) / rows;
        std::atomic<bool> failed{false};
        parallel_for(args, threads, columns * bands, [&](std::int64_t item) {
            float* const room = thread_room<struct PixelRoom, float>().reserve(of_block + lanes);
            Meeting* const meetings = thread_room<struct PixelMeetings, Meeting>().reserve(terms * of_d.taps * of_h.taps + 1);
            if (!room || !meetings) return failed.store(true);
            const std::int64_t block = take_from(item, blocks), position = take_from(item, strips) * wide;
            const Range band = piece_of(take_from(item, bands), rows, of_h.count);
            compute_rows({room, meetings, block, position, item % of_d.count, item / of_d.count}, band);
        });
        return failed ? CATALOG_NO_MEMORY : CATALOG_OK;
    }

   private:
    static constexpr int neighbours = 3;  // taps that share what they read

    // A copied row, and the factors of the taps that meet it: distances in floats.
    struct Meeting {
        std::int64_t row, factors;
    };

    struct Strip {
        float* rows;
        Meeting* meetings;
        std::int64_t block, position, d, image;  // its first position of each row
    };

    bool pack_weights() {
        packed = thread_room<struct PixelWeights, float>().reserve(blocks * terms * taps * lanes + 1);
        if (!packed) return false;
        const std::int64_t stride = args.weight.stride_first;
        const T* const weight = static_cast<const T*>(args.weight.data);
        float* to = packed;
        for (std::int64_t block = 0; block < blocks; ++block)
            for (std::int64_t term = 0; term < terms; ++term)
                for_each_tap(window, Base::of, [&](std::int64_t tap) {
                    T of_lanes[lanes] = {};
                    for (std::int64_t lane = 0; lane < count_of(block) * pixels; ++lane) {
                        const std::int64_t channel = first_channel(block) + lane % pitch;
                        of_lanes[lane] = weight[(is_backward ? channel * factor + term : channel) * stride + tap];
                    }
                    store(to, load(of_lanes));
                    to += lanes;
                });
        return true;
    }

    void compute_rows(const Strip& of, const Range& rows) const {
        const Axis &of_d = window.axis[0], &of_h = window.axis[1];
        const T* const image = read.data + of.image * read.stride_image;
        T* const result = made.data + of.image * made.stride_image;
        std::int64_t next = 0;
        for (std::int64_t h = rows.first; h < rows.end; ++h) {
            Base::copy_rows(image, of.block, of.d, h, of.position, next, of.rows);
            const std::int64_t place = made.index(of_d.first + of.d * of_d.step, of_h.first + h * of_h.step, 0);
            compute_row(of, h, result + place * channels);
        }
    }

    // Those of a row of the result: their end.
    const Meeting* find_meetings(const Strip& of, std::int64_t h) const {
        const Axis &of_d = window.axis[0], &of_h = window.axis[1], &of_w = window.axis[2];
        const Range deep = of_d.inside(of.d), high = of_h.inside(h);
        Meeting* end = of.meetings;
        for (std::int64_t term = 0; term < terms; ++term)
            for (std::int64_t td = deep.first; td < deep.end; ++td)
                for (std::int64_t th = high.first; th < high.end; ++th) {
                    const std::int64_t tap = ((term * of_d.taps + td) * of_h.taps + th) * of_w.taps;
                    *end++ = {Base::place_of(term, td, of_h.origin + h * of_h.stride + th * of_h.apart),
                              (of.block * terms * taps + tap) * lanes};
                }
        return end;
    }

    void compute_row(const Strip& of, std::int64_t h, T* row) const {
        const Axis& of_w = window.axis[2];
        const Meeting* const end = find_meetings(of, h);
        const std::int64_t count = std::min(wide, of_w.count - of.position), step = pixels * pitch;
        const int vectors = static_cast<int>((count + pixels - 1) / pixels);
        const std::int64_t* const apart = distances;
        const Multiples next(step * static_cast<std::int64_t>(sizeof(float)));
        // What lies behind the pixels of all vectors but a strip's last one is stored again by the next.
        const std::int64_t of_pixel = count_of(of.block), pixel_made = of_w.step * channels;
        const bool is_whole = of_pixel == lanes, overlap = pixels > 1 && of_w.step == 1;
        T* const to = row + (of_w.first + of.position * of_w.step) * channels + first_channel(of.block);
        const auto put = [=](int number, Float sum) {
            T* const here = to + number * pixels * pixel_made;
            const bool is_last = number + 1 == vectors;
            if (is_whole || (overlap && !is_last)) return store(here, sum);
            const std::int64_t some = is_last ? count - number * pixels : pixels;
            if (overlap || pixels == 1) return store_first(here, sum, some * of_pixel);
            T elements[lanes];
            store(elements, sum);
            for (std::int64_t i = 0; i < some; ++i) std::copy_n(elements + i * of_pixel, of_pixel, here + i * pixel_made);
        };
        const bool shares = pixels == 1 && of_w.stride == 1 && of_w.apart == 1;
        for_blocks<vector_registers / 4, 4, 2, 1>(0, vectors, [&](auto some, int first) {
            Float sums[some];  // set one by one: as a whole, they would be set in memory
#pragma GCC unroll 8
            for (int i = 0; i < some; ++i) sums[i] = Float{};
            for (const Meeting* meeting = of.meetings; meeting < end; ++meeting) {
                const float* const from = of.rows + meeting->row + first * step;
                const float* factors = packed + meeting->factors;
                std::int64_t t = 0;
                if constexpr (some >= neighbours)
                    for (; shares && t + neighbours <= of_w.taps; t += neighbours, factors += neighbours * lanes)
                        add_neighbours(from + apart[t], factors, sums);
                for (; t < of_w.taps; ++t, factors += lanes) {
                    const Float factor = load(factors);
                    const float* const seen = from + apart[t];
#pragma GCC unroll 8
                    for (int i = 0; i < some; ++i) sums[i] += load(next.at(seen, i)) * factor;
                }
            }
#pragma GCC unroll 8
            for (int i = 0; i < some; ++i) put(first + i, sums[i]);
        });
    }

    // Adds the products of taps that meet neighbouring pixels, of which each vector holds one: they share what they read.
    template <int some>
    [[gnu::always_inline]] static void add_neighbours(const float* seen, const float* factors, Float (&sums)[some]) {
        Float factor[neighbours];
#pragma GCC unroll 4
        for (int t = 0; t < neighbours; ++t) factor[t] = load(factors + t * lanes);
#pragma GCC unroll 16
        for (int column = 0; column < some + neighbours - 1; ++column) {
            const Float x = load(seen + column * lanes);
#pragma GCC unroll 4
            for (int t = 0; t < neighbours; ++t)
                if (column >= t && column - t < some) sums[column - t] += x * factor[t];
        }
    }

    const Image<T> made;
    float* packed = nullptr;
};

// The gradient of the weight. Strips are taken in chunks, whose sums are added at the end in the same order for any number of
// threads.
template <class Row>
class PixelGradients : PixelRows<Row> {
    using Base = PixelRows<Row>;
    using typename Base::T;
    using Base::args, Base::blocks, Base::channels, Base::count_of, Base::distances, Base::first_channel, Base::of_block;
    using Base::pitch, Base::pixel_of_lane, Base::pixels, Base::read, Base::taps, Base::threads, Base::wide, Base::window;

   public:
    PixelGradients(const catalog_args& args, const Geometry& of, const Window& window, int threads)
        : Base(args, of, window, threads), output(args.output, of.out, args.k, 1, 0, true) {}

    catalog_status run() {
        const Axis &of_d = window.axis[0], &of_h = window.axis[1], &of_w = window.axis[2];
        if (const catalog_status status = Base::divide(); status != CATALOG_OK) return status;
        constexpr std::int64_t in_chunk = 1 << 22, most_chunks = 16, rows = 28;  // products
        const std::int64_t bands = (of_h.count + rows - 1) / rows, strips = (of_w.count + wide - 1) / wide;
        const std::int64_t pieces = args.n * of_d.count * bands * strips;
        const std::int64_t products = args.n * window.positions() * channels * taps;
        const std::int64_t most = std::clamp<std::int64_t>(pieces, 1, most_chunks);
        const std::int64_t chunks = std::clamp<std::int64_t>(products / in_chunk, std::min<std::int64_t>(most, 2), most);
        sums = thread_room<struct PixelSums, float>().reserve(chunks * blocks * taps * lanes + 1);
        if (!sums) return CATALOG_NO_MEMORY;
        std::atomic<bool> failed{false};
        parallel_for(args, threads, chunks * blocks, [&](std::int64_t item) {
            float* const room = thread_room<struct PixelRoom, float>().reserve(of_block + lanes);
            float* const gradients = thread_room<struct PixelGradientRow, float>().reserve(wide * pitch + 2 * lanes);
            Met* const met = thread_room<struct PixelsMet, Met>().reserve(taps + 1);
            if (!room || !gradients || !met) return failed.store(true);
            float* const to = sums + item * taps * lanes;
            std::fill_n(to, taps * lanes, 0.0f);
            const std::int64_t block = take_from(item, blocks);
            for (std::int64_t piece = item * pieces / chunks; piece < (item + 1) * pieces / chunks; ++piece) {
                std::int64_t at = piece;
                const std::int64_t position = take_from(at, strips) * wide;
                const Range band = piece_of(take_from(at, bands), rows, of_h.count);
                add_rows({room, gradients, met, to, block, position, at % of_d.count, at / of_d.count}, band);
            }
        });
        if (failed) return CATALOG_NO_MEMORY;
        store_weights(chunks);
        return CATALOG_OK;
    }

   private:
    // A tap that meets the image in a row: where it reads, its sums, and at which positions of the strip.
    struct Met {
        const float* from;
        float* sum;
        Range positions;
    };

    struct Strip {
        float *rows, *gradients;
        Met* met;
        float* sums;
        std::int64_t block, position, d, image;
    };

    void add_rows(const Strip& of, const Range& rows) const {
        const Axis &of_d = window.axis[0], &of_h = window.axis[1], &of_w = window.axis[2];
        const T* const image = read.data + of.image * read.stride_image;
        const T* const made = output.data + of.image * output.stride_image;
        const std::int64_t count = std::min(wide, of_w.count - of.position);
        const Range deep = of_d.inside(of.d);
        std::int64_t next = 0;
        for (std::int64_t h = rows.first; h < rows.end; ++h) {
            Base::copy_rows(image, of.block, of.d, h, of.position, next, of.rows);
            copy_gradients(made + (output.index(of.d, h, 0) + of.position) * channels, of.block, count, of.gradients);
            const Range high = of_h.inside(h);
            Range inner{0, count};
            Met* end = of.met;
            for (std::int64_t td = deep.first; td < deep.end; ++td)
                for (std::int64_t th = high.first; th < high.end; ++th)
                    for (std::int64_t tw = 0; tw < of_w.taps; ++tw) {
                        const Range met = of_w.positions_of(tw);
                        const Range here{std::clamp<std::int64_t>(met.first - of.position, 0, count),
                                         std::clamp<std::int64_t>(met.end - of.position, 0, count)};
                        if (here.first >= here.end) continue;
                        const std::int64_t row = Base::place_of(0, td, of_h.origin + h * of_h.stride + th * of_h.apart);
                        *end++ = {of.rows + row + distances[tw],
                                  of.sums + ((td * of_h.taps + th) * of_w.taps + tw) * lanes, here};
                        inner = {std::max(inner.first, here.first), std::min(inner.end, here.end)};
                    }
            add_row(of, static_cast<int>(end - of.met), inner, count);
        }
    }

    // A row of gradients, vector after vector, with zeros in lanes that have none.
    void copy_gradients(const T* from, std::int64_t block, std::int64_t count, float* to) const {
        const std::int64_t of_pixel = count_of(block);
        for (std::int64_t p = 0; p < count; p += pixels, to += lanes)
            store(to, load_first(from + p * channels + first_channel(block), std::min(pixels, count - p) * of_pixel));
    }

    // Adds the products of a row. `inner`: positions at which all taps meet the image.
    void add_row(const Strip& of, int taps_met, const Range& inner, std::int64_t count) const {
        const std::int64_t step = pixels * pitch, vectors = (count + pixels - 1) / pixels;
        const std::int64_t first = std::min((inner.first + pixels - 1) / pixels, vectors);
        const std::int64_t end = std::max(inner.end == count && pixels == 1 ? vectors : inner.end / pixels, first);
        for_blocks<8, 4, 2, 1>(0, taps_met, [&](auto some, int tap) {
            const Met* const met = of.met + tap;
            Float total[some];
#pragma GCC unroll 8
            for (int t = 0; t < some; ++t) total[t] = load(met[t].sum);
            for (std::int64_t v = first; v < end; ++v) {
                const Float gradient = load(of.gradients + v * lanes);
#pragma GCC unroll 8
                for (int t = 0; t < some; ++t) total[t] += load(met[t].from + v * step) * gradient;
            }
            const auto add_checked = [&](std::int64_t v) {
                // A position that does not meet a tap is zero in both factors: the other one could be an infinity.
                const Ints position = pixel_of_lane + static_cast<int>(v * pixels);
                const Bits gradient = (Bits)load(of.gradients + v * lanes);
#pragma GCC unroll 8
                for (int t = 0; t < some; ++t) {
                    const Range meets = met[t].positions;
                    const Bits kept = (Bits)((position >= static_cast<int>(meets.first)) &
                                             (position < static_cast<int>(meets.end)));
                    total[t] += (Float)((Bits)load(met[t].from + v * step) & kept) * (Float)(gradient & kept);
                }
            };
            for (std::int64_t v = 0; v < first; ++v) add_checked(v);
            for (std::int64_t v = end; v < vectors; ++v) add_checked(v);
#pragma GCC unroll 8
            for (int t = 0; t < some; ++t) store(met[t].sum, total[t]);
        });
    }

    void store_weights(std::int64_t chunks) const {
        const std::int64_t of_chunk = blocks * taps * lanes, stride = args.weight.stride_first;
        T* const weight = static_cast<T*>(args.weight.data);
        for (std::int64_t block = 0; block < blocks; ++block)
            for (std::int64_t tap = 0; tap < taps; ++tap) {
                const float* const from = sums + (block * taps + tap) * lanes;
                float total[lanes] = {};
                for (std::int64_t chunk = 0; chunk < chunks; ++chunk)
                    for (std::int64_t lane = 0; lane < count_of(block) * pixels; ++lane)
                        total[lane % pitch] += from[chunk * of_chunk + lane];
                T rounded[lanes];
                store(rounded, load(total));
                for (std::int64_t lane = 0; lane < count_of(block); ++lane)
                    weight[(first_channel(block) + lane) * stride + tap] = rounded[lane];
            }
    }

    const Image<const T> output;
    float* sums = nullptr;
};

}  // namespace catalog::host
