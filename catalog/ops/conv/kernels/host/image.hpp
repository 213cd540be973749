// Images of a group of channels as matrices: a position in each row or column, and what a filter sees from there along
// the other. A block of such a matrix is copied when it is packed; all of it is never in memory.
#pragma once

#include "geometry/window.hpp"
#include "host/around.hpp"
#include "host/pack.hpp"

namespace catalog::host {

using namespace conv;

// An image with `channels` of a group from the address on; `extents` are its spatial ones.
template <class T>
struct Image {
    T* data;
    std::int64_t stride_image, all_channels, channels, extents[axes];

    Image(const catalog_tensor& tensor, const std::int32_t* size, std::int64_t all, std::int64_t groups,
          std::int64_t group, bool last)
        : data(static_cast<T*>(tensor.data)),
          stride_image(tensor.stride_first),
          all_channels(all),
          channels(all / groups),
          extents{size[0], size[1], size[2]} {
        data += group * channels * (last ? 1 : volume());
    }

    std::int64_t volume() const { return extents[0] * extents[1] * extents[2]; }
    std::int64_t index(std::int64_t d, std::int64_t h, std::int64_t w) const {
        return (d * extents[1] + h) * extents[2] + w;
    }
};

// Channels are the last axis. Rows are positions; columns are taps, and for each the channels.
template <class T>
class ImageOfRows {
   public:
    ImageOfRows(const Window& window, const Image<const T>& image)
        : window(window),
          image(image),
          is_matrix(window.is_pointwise() && image.stride_image == image.volume() * image.all_channels),
          // Taps that are neighbours in the image, with all channels, are one piece of a row.
          span(window.axis[2].apart == 1 && image.channels == image.all_channels ? window.axis[2].taps : 1) {}

    // The block from a row and a column on; `room` takes `rows` rows, `stride` apart, if it must be copied.
    Rows<const T> block(std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t columns, T* room,
                        std::int64_t stride) const {
        if (is_matrix) return {image.data + row * image.all_channels + column, image.all_channels};
        copy(row, rows, column, columns, room, stride);
        return {room, stride};
    }

    void copy(std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t columns, T* to,
              std::int64_t stride) const {
        const Axis *const of_d = window.axis, *const of_h = of_d + 1, *const of_w = of_d + 2;
        const std::int64_t piece = span * image.channels;
        const Tap first(window, column / piece * span);
        Position position(window, row);
        for (std::int64_t i = 0; i < rows;) {
            const std::int64_t run = std::min(of_w->count - position.at[2], rows - i);  // positions of one row
            const std::int64_t d = of_d->origin + position.at[0] * of_d->stride;
            const std::int64_t h = of_h->origin + position.at[1] * of_h->stride;
            const std::int64_t w = of_w->origin + position.at[2] * of_w->stride;
            const T* const from = image.data + position.image * image.stride_image;
            Tap tap = first;
            std::int64_t begin = column % piece;
            for (std::int64_t done = 0; done < columns;) {
                const std::int64_t count = std::min(piece - begin, columns - done);
                copy_pieces(from, d + tap.at[0] * of_d->apart, h + tap.at[1] * of_h->apart, w + tap.at[2] * of_w->apart,
                            begin, begin + count, run, to + done, stride);
                done += count;
                begin = 0;
                next(tap);
            }
            position.advance(window, run);
            i += run;
            to += run * stride;
        }
    }

   private:
    void next(Tap& tap) const {
        tap.at[2] += span;
        for (int i = 2; i > 0 && tap.at[i] == window.axis[i].taps; --i) tap.at[i] = 0, ++tap.at[i - 1];
    }

    // A piece of each of some positions in a row; the first one begins at (d, h, w).
    void copy_pieces(const T* from, std::int64_t d, std::int64_t h, std::int64_t w, std::int64_t begin, std::int64_t end,
                     std::int64_t positions, T* to, std::int64_t stride) const {
        const std::int64_t step = window.axis[2].stride, free = image.extents[2] - span - w;
        const bool inside = d >= 0 && d < image.extents[0] && h >= 0 && h < image.extents[1];
        const std::int64_t first = std::min(w < 0 ? (-w + step - 1) / step : 0, positions);
        const std::int64_t last = std::clamp(inside && free >= 0 ? free / step + 1 : 0, first, positions);
        std::int64_t i = 0;
        for (; i < first; ++i) copy_piece(from, d, h, w + i * step, begin, end, to + i * stride);
        const T* source = from + (image.index(d, h, w + i * step) * image.all_channels + begin);
        const auto copy = [&](auto copy_one) {
            for (; i < last; ++i, source += step * image.all_channels) copy_one(source, to + i * stride);
        };
        const std::int64_t count = end - begin;
        // Short pieces, as the 7 x 3 elements of a first layer, are a chunk from their beginning and one to their end.
        const auto copy_short = [&](auto size) {
            constexpr std::size_t bytes = size;
            constexpr std::int64_t chunk = bytes / sizeof(T);
            if (count < chunk || count > 2 * chunk) return false;
            copy([back = count - chunk](const T* one, T* there) {
                std::memcpy(there, one, bytes);
                std::memcpy(there + back, one + back, bytes);
            });
            return true;
        };
        const bool copied = copy_short(std::integral_constant<int, vector_bytes>{}) ||
                            copy_short(std::integral_constant<int, vector_bytes / 2>{}) ||
                            copy_short(std::integral_constant<int, vector_bytes / 4>{});
        if (!copied) copy([count](const T* one, T* there) { copy_elements(one, count, there); });
        for (; i < positions; ++i) copy_piece(from, d, h, w + i * step, begin, end, to + i * stride);
    }

    // Elements `begin` to `end` of the `span` taps from (d, h, w) on.
    void copy_piece(const T* from, std::int64_t d, std::int64_t h, std::int64_t w, std::int64_t begin,
                    std::int64_t end, T* to) const {
        const bool inside = d >= 0 && d < image.extents[0] && h >= 0 && h < image.extents[1];
        const std::int64_t skipped = std::clamp<std::int64_t>(-w, 0, span);
        const std::int64_t seen = inside ? std::clamp<std::int64_t>(image.extents[2] - w, skipped, span) : skipped;
        const std::int64_t first = std::clamp(skipped * image.channels, begin, end);
        const std::int64_t last = std::clamp(seen * image.channels, first, end);
        if (first > begin) std::fill(to, to + (first - begin), T{});
        if (first < last)
            copy_elements(from + (image.index(d, h, w) * image.all_channels + first), last - first,
                          to + (first - begin));
        if (last < end) std::fill(to + (last - begin), to + (end - begin), T{});
    }

    const Window& window;
    const Image<const T> image;
    const bool is_matrix;
    const std::int64_t span;
};

// Channels come before the extents. Rows are channels, and for each the taps; columns are positions.
template <class T>
class ImageOfColumns {
   public:
    ImageOfColumns(const Window& window, const Image<const T>& image)
        : window(window), image(image), taps(window.taps()), is_matrix(window.is_pointwise()) {}

    // As of ImageOfRows.
    Rows<const T> block(std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t columns, T* room,
                        std::int64_t stride) const {
        const std::int64_t volume = image.volume(), first = column / volume;
        if (is_matrix && (column + columns - 1) / volume == first)
            return {image.data + first * image.stride_image + row * volume + column % volume, volume};
        copy(row, rows, column, columns, room, stride);
        return {room, stride};
    }

    void copy(std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t columns, T* to,
              std::int64_t stride) const {
        const Position first(window, column);
        for (std::int64_t i = 0; i < rows; ++i, to += stride) {
            const Tap tap(window, (row + i) % taps);
            const T* const channel = image.data + (row + i) / taps * image.volume();
            Position position = first;
            for (std::int64_t done = 0; done < columns;) {
                const std::int64_t count = std::min(window.axis[2].count - position.at[2], columns - done);
                copy_run(channel + position.image * image.stride_image, position, tap, count, to + done);
                done += count;
                position.advance(window, count);
            }
        }
    }

   private:
    // What a tap meets from `count` positions of one row of the image.
    void copy_run(const T* from, const Position& position, const Tap& tap, std::int64_t count, T* to) const {
        std::int64_t at[axes];
        for (int i = 0; i < axes; ++i)
            at[i] = window.axis[i].origin + position.at[i] * window.axis[i].stride + tap.at[i] * window.axis[i].apart;
        const std::int64_t stride = window.axis[2].stride, extent = image.extents[2];
        const bool inside = at[0] >= 0 && at[0] < image.extents[0] && at[1] >= 0 && at[1] < image.extents[1];
        const std::int64_t first = at[2] < 0 ? std::min((-at[2] + stride - 1) / stride, count) : 0;
        const std::int64_t seen = inside && at[2] < extent ? (extent - 1 - at[2]) / stride + 1 : 0;
        const std::int64_t last = std::clamp(seen, first, count);
        std::fill(to, to + first, T{});
        if (first < last) {
            const T* const source = from + (image.index(at[0], at[1], at[2]) + first * stride);
            if (stride == 1)
                copy_elements(source, last - first, to + first);
            else
                for (std::int64_t j = 0; j < last - first; ++j) to[first + j] = source[j * stride];
        }
        std::fill(to + last, to + count, T{});
    }

    const Window& window;
    const Image<const T> image;
    const std::int64_t taps;
    const bool is_matrix;
};

}  // namespace catalog::host
