// The weights of a group as matrices; `stride` is that between output channels.
#pragma once

#include "geometry/window.hpp"
#include "host/around.hpp"
#include "host/pack.hpp"

namespace catalog::host {

using namespace conv;

// Rows are output channels; columns are the other axes in the tensor's own order.
template <class T>
class Weights {
   public:
    Weights(const T* data, std::int64_t stride) : data(data), stride(stride) {}

    Rows<const T> block(std::int64_t row, std::int64_t, std::int64_t column, std::int64_t, T*, std::int64_t) const {
        return {data + row * stride + column, stride};
    }

   private:
    const T* const data;
    const std::int64_t stride;
};

// What the gradient of the input is multiplied with. The depth is taps of a window and output channels, in the order of the
// image that is read: if channels are last, it is the axis of rows, and columns are input channels; otherwise columns.
template <class T, bool last>
class TransposedWeights {
   public:
    TransposedWeights(const Window& window, const Geometry& of, const T* data, std::int64_t stride,
                      std::int64_t channels_in, std::int64_t channels_out)
        : window(window),
          of(of),
          data(data),
          stride_out(stride),
          taps(window.taps()),
          all_taps(of.taps()),
          channels_in(channels_in),
          channels_out(channels_out) {}

    // The block from a row and a column on, copied to `room` with rows `stride` apart.
    Rows<const T> block(std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t columns, T* room,
                        std::int64_t stride) const {
        const std::int64_t first = last ? row : column, depth = last ? rows : columns;
        const std::int64_t channel = last ? column : row, channels = last ? columns : rows;
        const std::int64_t inner = last ? channels_out : taps;
        std::int64_t outer_at = first / inner, inner_at = first % inner, tap = 0;
        for (std::int64_t k = 0; k < depth; ++k) {
            // Divisions would take longer than the copy.
            if (!last || k == 0 || inner_at == 0) tap = Tap(window, last ? outer_at : inner_at).number(window, of);
            const T* const from = data + (last ? inner_at : outer_at) * stride_out;
            if (++inner_at == inner) inner_at = 0, ++outer_at;
            if constexpr (last)
                copy_elements(from + tap * channels_in + channel, channels, room + k * stride);
            else
                for (std::int64_t c = 0; c < channels; ++c) room[k + c * stride] = from[tap + (channel + c) * all_taps];
        }
        return {room, stride};
    }

   private:
    const Window& window;
    const Geometry& of;
    const T* const data;
    const std::int64_t stride_out, taps, all_taps, channels_in, channels_out;
};

}  // namespace catalog::host
