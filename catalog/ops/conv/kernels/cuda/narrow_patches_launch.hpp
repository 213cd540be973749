// The launches of pipeline sm90_narrow: which kernel, how large the patches of its blocks are, and how TMA reads them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "conv_copy.hpp"
#include "cuda/tensor_map.hpp"
#include "narrow_gradients.hpp"
#include "narrow_row_images.hpp"

namespace catalog::cuda {

inline constexpr int narrow_box = 256;  // most positions along an axis of a box

// Fewest positions of an image whose rows stream through shared memory. Those of smaller images do not fill the ring, and
// more blocks of patches run at a time: with 14 x 14 they are up to a fifth faster.
inline constexpr int narrow_streamed = 400;

// At most 2^30 blocks.
template <class Kernel>
inline catalog_status start_narrow(Kernel kernel, NarrowCall& call, int threads, int bytes, std::int64_t blocks,
                                   cudaStream_t stream) {
    if (blocks > std::int64_t{1} << 30) return CATALOG_BAD_ARGUMENT;
    call.by_blocks = Divisor(call.blocks);
    call.by_patches_down = Divisor(call.patches_down);
    call.by_patches_across = Divisor(call.patches_across);
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, narrow_bytes) != cudaSuccess)
        return launched(), CATALOG_DEVICE_ERROR;
    return KernelLaunch(static_cast<unsigned>(blocks), threads, bytes, stream).run(kernel, call);
}

// How much of the images a number of positions meets.
inline int narrow_met(const NarrowAxis& axis, int positions) {
    return (positions - 1) * axis.step + std::max(axis.taps - 1, 0) * std::abs(axis.apart) + 1;
}

// At most `most` of `count`, in as many parts as these need.
inline int narrow_even(int count, int most) { return static_cast<int>(parts(count, parts(count, most))); }

// Sets the sizes of a patch.
inline void set_patch(NarrowCall& call, int rows, int segments) {
    call.rows = rows;
    call.segments = segments;
    call.columns = segments * narrow_run;
    call.loaded_height = narrow_met(call.height, rows);
    const int width = narrow_met(call.width, segments * narrow_run), boxes = static_cast<int>(parts(width, narrow_box));
    call.box_width = static_cast<int>(parts(parts(width, boxes), 8) * 8);
    call.box_height = boxes == 1 && call.loaded_height <= narrow_box ? call.loaded_height : 1;
    call.pitch = boxes * call.box_width;
    call.run_step = rows > 1 ? call.height.step * call.pitch : narrow_run * call.width.step;
    call.patches_down = static_cast<int>(parts(call.height.count, rows));
    call.patches_across = static_cast<int>(parts(call.width.count, segments * narrow_run));
}

// Sets those of the largest patch, of at most `runs` runs, for which bytes_of() is at most `most`. Returns the bytes, or 0.
template <class Bytes>
inline int choose_patch(NarrowCall& call, int runs, int most, Bytes bytes_of) {
    const bool flat = call.height.count == 1;
    for (; runs > 0; runs /= 2) {
        set_patch(call, flat ? 1 : narrow_even(call.height.count, runs), flat ? runs : 1);
        if (const std::int64_t bytes = bytes_of(); bytes <= most) return static_cast<int>(bytes);
    }
    return 0;
}

// Sets the sizes of patches whose rows stream through shared memory: `at_a_time` run at the same time, each in at most
// `most` bytes. Returns the bytes, or 0.
template <class Shape, int runs>
inline int choose_strip(NarrowCall& call, std::int64_t at_a_time, int most) {
    using Rows = NarrowRows<Shape>;
    constexpr int positions = runs * narrow_run;
    const auto eight = [](int number) { return static_cast<int>(parts(number, 8) * 8); };
    call.columns = narrow_even(call.width.count, positions);
    call.box_width = narrow_met(call.width, call.columns);
    call.box_height = 1;
    call.pitch = eight(std::max(call.box_width, positions));
    call.row_bytes = call.pitch * 128;
    call.patches_across = static_cast<int>(parts(call.width.count, call.columns));
    // Patches that all run at once are fastest; pieces meet some rows twice, and a block needs a while until it computes.
    std::int64_t least = INT64_MAX;
    for (int pieces = 1; pieces <= std::min(call.height.count, 16); ++pieces) {
        const int rows = static_cast<int>(parts(call.height.count, pieces));
        const int down = static_cast<int>(parts(call.height.count, rows));
        const std::int64_t patches = std::int64_t{call.images_count} * call.patches_across * down;
        const std::int64_t time = parts(patches, at_a_time) * (narrow_met(call.height, rows) + 6 * Shape::step);
        if (time >= least) continue;
        least = time;
        call.rows = rows;
        call.patches_down = down;
    }
    // A row is read until the last position, even behind its end.
    const int behind = std::max((positions - 1) * Shape::step + Shape::across - call.pitch, 0) * 128;
    const int slot = Rows::of_slot * call.row_bytes;
    const int slots = static_cast<int>(parts(narrow_met(call.height, call.rows), Rows::of_slot));
    call.stages = std::min({(most - behind) / slot, slots, narrow_slots});
    return call.stages >= std::min(slots, 2) ? call.stages * slot + behind : 0;
}

// Whether the filter of a launch is of a shape.
template <class Shape>
inline bool is_shape(const NarrowTensors& call) {
    const auto fits = [](const NarrowAxis& axis, int taps) {
        return axis.taps == taps && (taps == 1 || std::abs(axis.apart) == 1) && axis.step == Shape::step;
    };
    return fits(call.height, Shape::down) && fits(call.width, Shape::across);
}

// A map of images, or of some of their positions: `stride` elements from image to image, `row` and `column` from position
// to position.
template <class T>
inline bool map_positions(CUtensorMap& map, const T* data, int channels, std::int64_t column, int width, std::int64_t row,
                          int height, std::int64_t stride, int images, int box_width, int box_height) {
    const auto extent = [](int number) { return static_cast<std::uint64_t>(number); };
    const auto bytes = [](std::int64_t number) { return static_cast<std::uint64_t>(number) * sizeof(T); };
    return make_tensor_map<T, 4>(map, data, {extent(channels), extent(width), extent(height), extent(images)},
                                 {bytes(column), bytes(row), images > 1 ? bytes(stride) : bytes(8)},
                                 {narrow_channels, static_cast<std::uint32_t>(box_width),
                                  static_cast<std::uint32_t>(box_height), 1});
}

template <class T>
inline bool map_images(NarrowCall& call) {
    const std::int64_t channels = call.image_channels;
    return map_positions<T>(call.images_map, static_cast<const T*>(call.images), call.image_channels, channels,
                            call.width.extent, channels * call.width.extent, call.height.extent, call.stride_images,
                            call.images_count, call.box_width, call.box_height);
}

// Forward and backward data.
template <class Row>
class ImagesLaunch {
    using T = typename Row::dtype;

   public:
    ImagesLaunch(const NarrowTensors& tensors, int processors, cudaStream_t stream)
        : call{tensors}, processors(processors), stream(stream) {}

    catalog_status run() {
        call.blocks = static_cast<int>(parts(call.channels, narrow_channels));
        if (call.height.count > 1) {
            if (start<NarrowShape<1, 1, 1>>()) return status;
            if (start<NarrowShape<3, 3, 1>>()) return status;
            if (start<NarrowShape<5, 5, 1>>()) return status;
            if (start<NarrowShape<7, 7, 1>>()) return status;
            if constexpr (Row::direction == Direction::forward) {
                if (start<NarrowShape<3, 3, 2>>()) return status;
                if (start<NarrowShape<5, 5, 2>>()) return status;
            } else {
                // The parts of 3 x 3 or 5 x 5, of a stride of 2.
                if (start<NarrowShape<1, 2, 1>>()) return status;
                if (start<NarrowShape<2, 1, 1>>()) return status;
                if (start<NarrowShape<2, 2, 1>>()) return status;
                if (start<NarrowShape<2, 3, 1>>()) return status;
                if (start<NarrowShape<3, 2, 1>>()) return status;
            }
        }
        return start_patches<AnyNarrowShape, true>() ? status : CATALOG_BAD_ARGUMENT;
    }

   private:
    // Whether the kernel of a shape takes the call.
    template <class Shape>
    bool start() {
        if (!is_shape<Shape>(call)) return false;
        if (call.of_group > 8) return start_patches<Shape, true>();
        if (std::int64_t{call.height.count} * call.width.count < narrow_streamed) return start_patches<Shape, false>();
        if constexpr (narrow_takes_two_runs<Shape>)
            if (call.width.count > narrow_run && start_rows<Shape, 2>()) return true;
        return start_rows<Shape, 1>();
    }

    template <class Shape, int runs>
    bool start_rows() {
        constexpr int blocks = narrow_row_images_blocks<Shape>;
        const int filters = bytes_of_filters();
        const int bytes = choose_strip<Shape, runs>(call, std::max(blocks * processors / call.blocks, 1),
                                                    narrow_bytes_of_block(blocks) - filters);
        call.weights_at = filters > 0 ? bytes : 0;
        return bytes > 0 && start_kernel(narrow_row_images<Row, Shape, runs>, narrow_rows_threads, bytes + filters,
                                         call.columns, 1);
    }

    // Those of 64 channels, if they can be copied to shared memory at once.
    int bytes_of_filters() const {
        const std::int64_t of_channel = std::int64_t{call.filter_elements} * sizeof(T);
        const bool dense = call.stride_weight == call.filter_elements && call.channels * of_channel % 16 == 0;
        const bool aligned = reinterpret_cast<std::uintptr_t>(call.weight) % 16 == 0;
        const std::int64_t bytes = narrow_channels * of_channel;
        return dense && aligned && bytes <= 64 * 1024 ? static_cast<int>(bytes) : 0;
    }

    // Whether a patch fits into shared memory.
    template <class Shape, bool deep>
    bool start_patches() {
        const auto bytes_of = [&] {
            return std::int64_t{std::max(call.loaded_height, Shape::rows)} * call.pitch * 128;
        };
        const int bytes = choose_patch(call, narrow_images_runs, narrow_bytes, bytes_of);
        if (bytes == 0) return false;
        return start_kernel(narrow_images<Row, Shape, deep>, narrow_images_threads, bytes, call.columns, call.rows);
    }

    // TMA writes the result in boxes of that size, if it can.
    template <class Kernel>
    bool start_kernel(Kernel kernel, int threads, int bytes, int box_width, int box_height) {
        status = CATALOG_BAD_ARGUMENT;
        if (!map_images<T>(call)) return true;
        const NarrowAxis &down = call.height, &across = call.width;
        const std::int64_t pixel = call.channels, row = pixel * call.result_width;
        const T* const first = static_cast<const T*>(call.result) + down.first * row + across.first * pixel;
        call.tma_stores = map_positions<T>(call.result_map, first, call.channels, across.spread * pixel, across.count,
                                           down.spread * row, down.count, call.stride_result, call.images_count,
                                           box_width, box_height);
        const std::int64_t patches = std::int64_t{call.images_count} * call.patches_down * call.patches_across;
        status = start_narrow(kernel, call, threads, bytes, patches * call.blocks, stream);
        return true;
    }

    NarrowCall call;
    const int processors;
    const cudaStream_t stream;
    catalog_status status = CATALOG_OK;
};

// Backward weight.
template <class Row>
class GradientsLaunch {
    using T = typename Row::dtype;

   public:
    GradientsLaunch(const NarrowTensors& tensors, int processors, int device, cudaStream_t stream)
        : call{tensors}, processors(processors), device(device), stream(stream) {}

    catalog_status run() {
        call.blocks = static_cast<int>(parts(call.channels, narrow_channels));
        if (call.of_group <= 8 && call.height.count > 1) {
            if (start<NarrowShape<3, 3, 1>>()) return status;
            if (start<NarrowShape<3, 3, 2>>()) return status;
            if (start<NarrowShape<5, 5, 1>>()) return status;
            if (start<NarrowShape<5, 5, 2>>()) return status;
            if (start<NarrowShape<7, 7, 1>>()) return status;
        }
        return start_any();
    }

   private:
    // Whether the kernel of a shape takes the call.
    template <class Shape>
    bool start() {
        if (!is_shape<Shape>(call)) return false;
        call.item_columns = 2 * Shape::steps;
        constexpr int blocks = narrow_gradients_blocks<Shape>;
        const int bytes = choose(Shape::runs, Shape::rows, 0, narrow_bytes / blocks);
        if (bytes == 0) return false;
        status = start(narrow_gradients<Row, Shape>, narrow_gradients_threads, bytes, blocks);
        return true;
    }

    catalog_status start_any() {
        call.item_columns = call.width.taps;
        const int items = call.height.taps * call.width.taps * narrow_eights(call.of_group);
        const std::int64_t sums = std::int64_t{narrow_pairs(call)} * 512 * 8 + items * std::int64_t{sizeof(NarrowItem)};
        const int bytes = choose(narrow_gradients_any_runs, 0, sums, narrow_bytes);
        // One block a processor: its registers are all in use.
        return bytes == 0 ? CATALOG_BAD_ARGUMENT : start(narrow_gradients_any<Row>, narrow_gradients_any_threads, bytes, 1);
    }

    // Chooses the patch, with at least `least_rows` rows of images, and the stages. Returns their bytes with `more`, or 0.
    int choose(int runs, int least_rows, std::int64_t more, int most) {
        const auto bytes_of = [&] {
            const std::int64_t images = std::int64_t{std::max(call.loaded_height, least_rows)} * call.pitch * 128;
            const std::int64_t stage = images + call.rows * call.segments * narrow_run * 128;
            call.stages = narrow_stages * stage + more <= most ? narrow_stages : 1;
            call.images_bytes = static_cast<int>(images);
            call.stage_bytes = static_cast<int>(stage);
            return call.stages * stage + more;
        };
        return choose_patch(call, runs, most, bytes_of);
    }

    template <class Kernel>
    catalog_status start(Kernel kernel, int threads, int bytes, int blocks) {
        if (!map_images<T>(call) || !map_gradient()) return CATALOG_BAD_ARGUMENT;
        const std::int64_t patches = std::int64_t{call.images_count} * call.patches_down * call.patches_across;
        if (patches > std::int64_t{1} << 30) return CATALOG_BAD_ARGUMENT;
        call.by_pairs = Divisor(narrow_pairs(call));
        call.by_item_columns = Divisor(call.item_columns);
        call.parts = static_cast<int>(std::clamp<std::int64_t>(blocks * processors / call.blocks, 1, patches));
        return with_parts<NarrowSums<Row>>(call, device, stream, [&] {
            return start_narrow(kernel, call, threads, bytes, std::int64_t{call.parts} * call.blocks, stream);
        });
    }

    bool map_gradient() {
        const std::int64_t channels = call.gradient_channels;
        return map_positions<T>(call.gradient_map, static_cast<const T*>(call.gradient), call.gradient_channels, channels,
                                call.width.count, channels * call.width.count, call.height.count, call.stride_gradient,
                                call.images_count, call.segments * narrow_run, call.rows);
    }

    NarrowCall call;
    const int processors, device;
    const cudaStream_t stream;
    catalog_status status = CATALOG_OK;
};

}  // namespace catalog::cuda
