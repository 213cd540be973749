// Convolutions whose groups have few channels: forward, and the gradient of the input. See pixel_rows.hpp.
#pragma once

#include "multiples.hpp"
#include "pixel_rows.hpp"

namespace catalog::host {

template <class Row>
class PixelConvolution : PixelRows<Row> {
    using Base = PixelRows<Row>;
    using typename Base::T;
    using Base::args, Base::blocks, Base::channels, Base::count_of, Base::distances, Base::first_channel, Base::of_group;
    using Base::is_backward, Base::of_term, Base::pitch, Base::pixels, Base::read, Base::taps, Base::terms, Base::threads;
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
        const std::int64_t strips = (of_w.count + wide - 1) / wide, columns = args.n * of_d.count * strips * blocks;
        const std::int64_t rows = rows_of_item(columns, of_h.count), bands = (of_h.count + rows - 1) / rows;
        std::atomic<bool> failed{false};
        parallel_for(args, threads, columns * bands, [&](std::int64_t item) {
            float* const room = thread_room<struct PixelRoom, float>().reserve(terms * of_term + lanes);
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
        float* to = packed;
        for (std::int64_t block = 0; block < blocks; ++block)
            for (std::int64_t term = 0; term < terms; ++term)
                for_each_tap(window, Base::of, [&](std::int64_t tap) {
                    store(to, factors_of(block, term, tap));
                    to += lanes;
                });
        return true;
    }

    Float factors_of(std::int64_t block, std::int64_t term, std::int64_t tap) const {
        const T* const weight = static_cast<const T*>(args.weight.data) + tap * (args.c / args.g);
        T of_lanes[lanes] = {};
        for (std::int64_t lane = 0; lane < count_of(block) * pixels; ++lane) {
            const std::int64_t channel = first_channel(block) + lane % pitch;
            const std::int64_t output = is_backward ? channel / of_group * terms + term : channel;
            const std::int64_t input = is_backward ? channel % of_group : term;  // of the group
            of_lanes[lane] = weight[output * args.weight.stride_first + input];
        }
        return load(of_lanes);
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
        const bool shares = pixels == 1 && of_w.stride == of_w.apart;
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

}  // namespace catalog::host
