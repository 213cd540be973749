// The gradient of the weight of a convolution whose groups have few channels. See pixel_rows.hpp.
#pragma once

#include "pixel_rows.hpp"

namespace catalog::host {

// Strips are taken in chunks, whose sums are added at the end in the same order for any number of threads.
template <class Row>
class PixelGradients : PixelRows<Row> {
    using Base = PixelRows<Row>;
    using typename Base::T;
    using Base::args, Base::blocks, Base::channels, Base::count_of, Base::distances, Base::first_channel, Base::of_term;
    using Base::pitch, Base::pixel_of_lane, Base::pixels, Base::read, Base::taps, Base::terms, Base::threads, Base::wide;
    using Base::window;

   public:
    PixelGradients(const catalog_args& args, const Geometry& of, const Window& window, int threads)
        : Base(args, of, window, threads), output(args.output, of.out, args.k, 1, 0, true) {}

    catalog_status run() {
        const Axis &of_d = window.axis[0], &of_h = window.axis[1], &of_w = window.axis[2];
        if (const catalog_status status = Base::divide(); status != CATALOG_OK) return status;
        constexpr std::int64_t in_chunk = 1 << 22, most_chunks = 16, rows = 28;  // products
        const std::int64_t bands = (of_h.count + rows - 1) / rows, strips = (of_w.count + wide - 1) / wide;
        const std::int64_t pieces = args.n * of_d.count * bands * strips;
        const std::int64_t of_item = terms * taps * lanes;  // sums
        const std::int64_t products = args.n * window.positions() * channels * terms * taps;
        const std::int64_t most = std::clamp<std::int64_t>(pieces, 1, most_chunks);
        const std::int64_t chunks = std::clamp<std::int64_t>(products / in_chunk, std::min<std::int64_t>(most, 2), most);
        sums = thread_room<struct PixelSums, float>().reserve(chunks * blocks * of_item + 1);
        if (!sums) return CATALOG_NO_MEMORY;
        std::atomic<bool> failed{false};
        parallel_for(args, threads, chunks * blocks, [&](std::int64_t item) {
            float* const room = thread_room<struct PixelRoom, float>().reserve(terms * of_term + lanes);
            float* const gradients = thread_room<struct PixelGradientRow, float>().reserve(wide * pitch + 2 * lanes);
            Met* const met = thread_room<struct PixelsMet, Met>().reserve(terms * taps + 1);
            if (!room || !gradients || !met) return failed.store(true);
            float* const to = sums + item * of_item;
            std::fill_n(to, of_item, 0.0f);
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
    // A tap that meets the image in a row, and one of the channels that it reads: where, its sums, and at which positions of the
    // strip.
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
        const T* const image = read.data + of.image * read.stride_image;
        const T* const made = output.data + of.image * output.stride_image;
        const std::int64_t count = std::min(wide, window.axis[2].count - of.position);
        std::int64_t next = 0;
        for (std::int64_t h = rows.first; h < rows.end; ++h) {
            Base::copy_rows(image, of.block, of.d, h, of.position, next, of.rows);
            copy_gradients(made + (output.index(of.d, h, 0) + of.position) * channels, of.block, count, of.gradients);
            Range inner{0, count};
            const Met* const end = find_taps(of, h, count, inner);
            add_row(of, static_cast<int>(end - of.met), inner, count);
        }
    }

    // The taps that meet the image in a row: their end. `inner` becomes the positions at which all of them do.
    const Met* find_taps(const Strip& of, std::int64_t h, std::int64_t count, Range& inner) const {
        const Axis &of_d = window.axis[0], &of_h = window.axis[1], &of_w = window.axis[2];
        const Range deep = of_d.inside(of.d), high = of_h.inside(h);
        const auto in_strip = [&](std::int64_t at) { return std::clamp<std::int64_t>(at - of.position, 0, count); };
        Met* end = of.met;
        const std::int64_t rows = high.end - high.first, planes = deep.end - deep.first;
        for (std::int64_t number = 0; number < terms * planes * rows; ++number) {
            std::int64_t term = number;
            const std::int64_t th = high.first + take_from(term, rows), td = deep.first + take_from(term, planes);
            const std::int64_t at_h = of_h.origin + h * of_h.stride + th * of_h.apart;
            const float* const row = of.rows + Base::place_of(term, td, at_h);
            float* sum = of.sums + ((term * of_d.taps + td) * of_h.taps + th) * of_w.taps * lanes;
            for (std::int64_t tw = 0; tw < of_w.taps; ++tw, sum += lanes) {
                const Range all = of_w.positions_of(tw), here{in_strip(all.first), in_strip(all.end)};
                if (here.first >= here.end) continue;
                *end++ = {row + distances[tw], sum, here};
                inner = {std::max(inner.first, here.first), std::min(inner.end, here.end)};
            }
        }
        return end;
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
        const std::int64_t of_block = terms * taps, of_chunk = blocks * of_block * lanes, stride = args.weight.stride_first;
        T* const weight = static_cast<T*>(args.weight.data);
        for (std::int64_t block = 0; block < blocks; ++block)
            for (std::int64_t product = 0; product < of_block; ++product) {
                const float* const from = sums + (block * of_block + product) * lanes;
                const std::int64_t to = product % taps * terms + product / taps;
                float total[lanes] = {};
                for (std::int64_t chunk = 0; chunk < chunks; ++chunk)
                    for (std::int64_t lane = 0; lane < count_of(block) * pixels; ++lane)
                        total[lane % pitch] += from[chunk * of_chunk + lane];
                T rounded[lanes];
                store(rounded, load(total));
                for (std::int64_t lane = 0; lane < count_of(block); ++lane)
                    weight[(first_channel(block) + lane) * stride + to] = rounded[lane];
            }
    }

    const Image<const T> output;
    float* sums = nullptr;
};

}  // namespace catalog::host
