// Convolutions whose groups have few channels, as many input as output channels or not: a vector holds those of several
// groups, and where all channels are fewer than its lanes, those of several neighbouring pixels. So no product is wasted.
//
// An item is a strip of an image, row after row. What it meets of a row is copied first, as float32, with the zeros around the
// image: pixels that are a stride apart become neighbours, and a channel is repeated for all that read it. A lane that reads
// several channels of its group finds them in as many copies. So every tap reads its vectors at a fixed distance from the
// first one's.
#pragma once

#include <numeric>

#include "pixel_copy.hpp"

namespace catalog::host {

// What the three directions have in common: the lanes of vectors, and the rows that they read. For the gradient of the weight
// lanes are channels of the output's gradient, and rows those of the input.
template <class Row>
class PixelRows {
   protected:
    using T = typename Row::dtype;
    static constexpr bool is_backward = Row::direction == Direction::bwd_data;
    static constexpr std::int64_t most_terms = 32;

    PixelRows(const catalog_args& args, const Geometry& of, const Window& window, int threads)
        : args(args),
          of(of),
          window{{ascending(window.axis[0]), ascending(window.axis[1]), ascending(window.axis[2])}},
          threads(threads),
          terms((is_backward ? args.k : args.c) / args.g),
          channels(is_backward ? args.c : args.k),
          of_group(channels / args.g),
          pixels(channels < lanes ? lanes / channels : 1),
          pitch(pixels > 1 ? channels : lanes),
          blocks((channels + lanes - 1) / lanes),
          taps(window.taps()),
          read(is_backward ? Image<const T>(args.output, of.out, args.k, 1, 0, true)
                           : Image<const T>(args.input, of.size, args.c, 1, 0, true)) {
        for (int lane = 0; lane < lanes; ++lane) pixel_of_lane[lane] = static_cast<int>(lane / pitch);
    }

    // How many positions a strip has, and where its copied rows lie. CATALOG_UNSUPPORTED where a lane reads many channels, or
    // taps are far apart.
    catalog_status divide() {
        constexpr std::int64_t strip = 32, fewest = 8, in_first_cache = 1 << 13, farthest = 1 << 12;  // vectors; floats; pixels
        const Axis &of_d = window.axis[0], &of_h = window.axis[1], &of_w = window.axis[2];
        reach = std::max<std::int64_t>(of_w.taps - 1, 0) * of_w.apart;
        if (terms > most_terms || reach > farthest) return CATALOG_UNSUPPORTED;
        phase_step = std::gcd(of_w.stride, of_w.apart);
        phases = std::min(of_w.stride - 1, reach) / phase_step + 1;
        kept = std::clamp<std::int64_t>((of_h.taps - 1) * of_h.apart + 1, 1, of_h.extent);
        for (std::int64_t vectors = strip;; vectors /= 2) {
            wide = std::min(vectors * pixels, of_w.count);
            copied = (wide - 1) * of_w.stride + reach + 1;
            of_phase = (copied + of_w.stride - 1) / of_w.stride * pitch + lanes;  // vectors end behind the last pixel
            of_term = of_d.taps * kept * phases * of_phase;
            if (vectors == fewest || terms * of_term <= in_first_cache) break;
        }
        distances = thread_room<struct TapDistances, std::int64_t>().reserve(of_w.taps + 1);
        if (!distances) return CATALOG_NO_MEMORY;
        for (std::int64_t t = 0; t < of_w.taps; ++t) {
            const std::int64_t at = t * of_w.apart;
            distances[t] = at % of_w.stride / phase_step * of_phase + at / of_w.stride * pitch;
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
                copy_row(image + read.index(at_d, next, 0) * read.all_channels, block,
                         of_w.origin + position * of_w.stride, room + place_of(0, td, next));
            }
    }

    // Where a copied row begins.
    std::int64_t place_of(std::int64_t term, std::int64_t td, std::int64_t h) const {
        return term * of_term + (td * kept + h % kept) * phases * of_phase;
    }

    const catalog_args& args;
    const Geometry& of;
    const Window window;
    const int threads;
    const std::int64_t terms;     // channels that are read for each in a lane
    const std::int64_t channels;  // in lanes
    const std::int64_t of_group;  // of them
    const std::int64_t pixels;    // of a vector
    const std::int64_t pitch;     // floats of a pixel in copied rows
    const std::int64_t blocks;    // vectors for all channels
    const std::int64_t taps;
    const Image<const T> read;
    Ints pixel_of_lane;
    std::int64_t reach = 0;                             // pixels between the taps of a row
    std::int64_t phases = 0, phase_step = 1;            // classes of pixels that are a stride apart, which taps meet
    std::int64_t wide = 0, copied = 0;                  // positions of a strip, and what they meet in a row
    std::int64_t kept = 0, of_phase = 0, of_term = 0;   // rows; floats
    std::int64_t* distances = nullptr;                  // between what a tap reads and the first one

   private:
    // The elements from `w` on of a row of the image: those that are a stride apart, then others that taps meet.
    void copy_row(const T* row, std::int64_t block, std::int64_t w, float* to) const {
        const Axis& of_w = window.axis[2];
        const auto before = [&](std::int64_t end, std::int64_t all) {
            return end > 0 ? std::min((end + of_w.stride - 1) / of_w.stride, all) : 0;
        };
        for (std::int64_t phase = 0; phase < phases; ++phase, w += phase_step, to += of_phase) {
            const std::int64_t all = before(copied - phase * phase_step, copied), end = before(of_w.extent - w, all);
            const std::int64_t first = std::min(before(-w, all), end);
            clear(first, to);
            const T* const from = row + (w + first * of_w.stride) * read.all_channels;
            copy_pixels(from, block, end - first, to + first * pitch);
            clear(all - end, to + end * pitch);
        }
    }

    // Pixels follow each other, so what a vector stores behind its own pixel is stored again.
    void clear(std::int64_t count, float* to) const {
        for (; count > 0; --count, to += pitch)
            for (std::int64_t term = 0; term < terms; ++term) store(to + term * of_term, Float{});
    }

    void copy_pixels(const T* from, std::int64_t block, std::int64_t count, float* to) const {
        const std::int64_t channel = first_channel(block), some = count_of(block), step = window.axis[2].stride;
        const std::int64_t apart = step * read.all_channels;
        if (terms > 1 || of_group > 1) {
            const std::int64_t group = channel / of_group, all = ((channel + some - 1) / of_group + 1 - group) * terms;
            ReadChannels reads{all, terms, {}};
            for (int lane = 0; lane < lanes; ++lane)
                reads.first[lane] = static_cast<int>((std::min(channel + lane, channel + some - 1) / of_group - group) * terms);
            PixelCopy<T>(reads, apart, pitch, of_term).copy(from + group * terms, count, to);
        } else if (channels == pitch && step == 1) {
            for (count *= channels; count > 0; count -= lanes, from += lanes, to += lanes)
                store(to, load_first(from, count));
        } else {
            for (; count > 0; --count, from += apart, to += pitch) store(to, load_first(from + channel, some));
        }
    }
};

}  // namespace catalog::host
