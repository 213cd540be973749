// The launch of a row of pipeline sm90_narrow: its checks, the copies that it needs, and its patches.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "abi/export.hpp"
#include "conv_copy.hpp"
#include "geometry/call.hpp"
#include "narrow_gradients.hpp"
#include "narrow_images.hpp"

namespace catalog::cuda {

template <class Row>
class NarrowLaunch {
    using T = typename Row::dtype;
    static constexpr Direction direction = Row::direction;
    static constexpr bool weighs = direction == Direction::bwd_weight;

   public:
    NarrowLaunch(const catalog_args& args, cudaStream_t stream) : args(args), of(args), stream(stream) {}

    catalog_status run() {
        const std::int64_t width = args.c / args.g;
        const bool power = width > 0 && (width & (width - 1)) == 0 && width <= 32;
        if (args.c != args.k || !power || !valid()) return CATALOG_BAD_ARGUMENT;
        if (args.n == 0) return without_images<Row>(args, of, stream);
        int device;
        if (cudaGetDevice(&device) != cudaSuccess ||
            cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
            return launched(), CATALOG_DEVICE_ERROR;
        ConvTensor x{args.input.data, args.n, args.input.stride_first, args.c, args.c, of.size};
        ConvTensor y{args.output.data, args.n, args.output.stride_first, args.k, args.k, of.out};
        ReadableTensors<T> readable;
        if constexpr (direction != Direction::bwd_data) readable.add(x, 1, 8);
        if constexpr (direction != Direction::forward) readable.add(y, 1, 8);
        ConvTensor w{args.weight.data, args.k, args.weight.stride_first, width, width, of.filter};
        if (!weighs && width >= 8) readable.add(w, 1, 8);
        const Scratch copies(readable.bytes(), device, stream);
        if (readable.bytes() > 0 && !copies.data) return launched(), CATALOG_NO_MEMORY;
        readable.run(copies.data, stream);
        catalog_status status = CATALOG_OK;
        conv::for_windows<direction>(of, [&](const conv::Window& window) {
            if (status == CATALOG_OK) status = compute(window, x, y, w, device);
        });
        return status;
    }

   private:
    bool valid() const {
        constexpr std::int64_t most = std::int64_t{1} << 30;
        for (const std::int32_t* extents : {of.size, of.out})
            if (args.n * conv::Geometry::volume(extents) > most || extents[0] != 1) return false;
        return of.filter[0] == 1 && of.pad[0] == 0 && of.taps() <= 1024 && args.c <= most / 64;
    }

    static NarrowAxis axis_of(const conv::Axis& axis) {
        const auto number = [](std::int64_t value) { return static_cast<int>(value); };
        return {number(axis.count),  number(axis.first),  number(axis.step),   number(axis.taps),   number(axis.tap),
                number(axis.tap_step), number(axis.extent), number(axis.origin), number(axis.stride), number(axis.apart)};
    }

    // How much of the images a number of positions meets.
    static int met(const NarrowAxis& axis, int positions) {
        return (positions - 1) * axis.step + std::max(axis.taps - 1, 0) * std::abs(axis.apart) + 1;
    }

    // At most `most` of `count`, in as many parts as these need.
    static int even(int count, int most) { return static_cast<int>(parts(count, parts(count, most))); }

    // Sizes of a patch; bytes of shared memory.
    static int fit(NarrowCall& call, int rows, int segments) {
        call.rows = rows;
        call.segments = segments;
        call.loaded_height = met(call.height, rows);
        call.loaded_width = met(call.width, segments * narrow_run);
        call.pitch = (call.loaded_width + 7) / 8 * 8;
        call.run_step = rows > 1 ? call.height.step * call.pitch : narrow_run * call.width.step;
        const int taps = std::max(call.height.taps * call.width.taps, 1);
        const std::int64_t table = std::int64_t{taps} * narrow_eights(call.of_group) * static_cast<int>(sizeof(NarrowItem));
        std::int64_t patch = std::int64_t{call.loaded_height} * call.pitch * 128, other = table;
        if (weighs) {
            patch += rows * segments * narrow_run * 128;
            other += std::int64_t{narrow_pairs(taps, call.of_group)} * 512 * 8;
        } else if (call.of_group >= 8) {
            other += narrow_channels * narrow_filter_bytes(call.elements, call.of_group);
        } else {
            other = std::int64_t{4} * taps * call.of_group * narrow_channels;
        }
        call.stages = weighs && 2 * patch + other <= narrow_bytes ? 2 : 1;
        const std::int64_t bytes = call.stages * patch + other;
        return bytes <= narrow_bytes ? static_cast<int>(bytes) : 0;
    }

    catalog_status compute(const conv::Window& window, const ConvTensor& x, const ConvTensor& y, const ConvTensor& w,
                           int device) const {
        NarrowCall call{};
        const ConvTensor& images = direction == Direction::bwd_data ? y : x;
        const catalog_tensor& result = weighs ? args.weight : direction == Direction::forward ? args.output : args.input;
        const std::int32_t* const extents = direction == Direction::forward ? of.out : of.size;
        call.images = images.data;
        call.stride_images = images.stride;
        call.image_channels = static_cast<int>(images.all_channels);
        call.gradient = y.data;
        call.stride_gradient = y.stride;
        call.gradient_channels = static_cast<int>(y.all_channels);
        call.weight = w.data;
        call.stride_weight = w.stride;
        call.result = result.data;
        call.stride_result = result.stride_first;
        call.height = axis_of(window.axis[1]);
        call.width = axis_of(window.axis[2]);
        call.channels = static_cast<int>(args.c);
        call.of_group = static_cast<int>(args.c / args.g);
        call.elements = static_cast<int>(of.taps());
        call.filter_width = of.filter[2];
        call.result_width = extents[2];
        call.gradient_height = of.out[1];
        call.gradient_width = of.out[2];
        call.images_count = static_cast<int>(args.n);
        call.blocks = static_cast<int>(parts(args.c, narrow_channels));
        call.vectors = args.c % 8 == 0 && (args.n <= 1 || result.stride_first % 8 == 0) &&
                       reinterpret_cast<std::uintptr_t>(result.data) % 16 == 0;
        const bool flat = call.height.count == 1;
        int runs = narrow_runs, bytes = 0;
        for (; runs > 0 && bytes == 0; runs /= 2) bytes = fit(call, flat ? 1 : even(call.height.count, runs), flat ? runs : 1);
        if (bytes == 0) return CATALOG_BAD_ARGUMENT;
        call.patches_down = static_cast<int>(parts(call.height.count, call.rows));
        call.patches_across = static_cast<int>(parts(call.width.count, call.segments * narrow_run));
        const std::int64_t patches = args.n * call.patches_down * call.patches_across;
        if (patches * call.blocks > std::int64_t{1} << 30) return CATALOG_BAD_ARGUMENT;
        if constexpr (weighs)
            return add_gradients(call, bytes, patches, device);
        else if (call.of_group >= 8)
            return start(narrow_images_mma<Row>, call, bytes, patches * call.blocks);
        else if (call.of_group == 4)
            return start(narrow_images_fma<Row, 4>, call, bytes, patches * call.blocks);
        else if (call.of_group == 2)
            return start(narrow_images_fma<Row, 2>, call, bytes, patches * call.blocks);
        else
            return start(narrow_images_fma<Row, 1>, call, bytes, patches * call.blocks);
    }

    template <class Kernel>
    catalog_status start(Kernel kernel, const NarrowCall& call, int bytes, std::int64_t blocks) const {
        if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, narrow_bytes) != cudaSuccess)
            return launched(), CATALOG_DEVICE_ERROR;
        kernel<<<static_cast<unsigned>(blocks), narrow_threads, bytes, stream>>>(call);
        return launched();
    }

    catalog_status add_gradients(NarrowCall& call, int bytes, std::int64_t patches, int device) const {
        // One block a processor: its registers are all in use.
        call.parts = static_cast<int>(std::clamp<std::int64_t>(processors / call.blocks, 1, patches));
        const std::int64_t sums = std::int64_t{call.blocks} * 256 * narrow_pairs(static_cast<int>(of.taps()), call.of_group);
        const Scratch room(sums * call.parts * static_cast<std::int64_t>(sizeof(float4)), device, stream);
        if (!room.data) return launched(), CATALOG_NO_MEMORY;
        call.sums = static_cast<float*>(room.data);
        const catalog_status status = start(narrow_gradients<Row>, call, bytes, std::int64_t{call.parts} * call.blocks);
        if (status != CATALOG_OK) return status;
        narrow_add_parts<Row><<<static_cast<unsigned>(sums / 32), narrow_threads, 0, stream>>>(call);
        return launched();
    }

    const catalog_args& args;
    const conv::Geometry of;
    const cudaStream_t stream;
    int processors = 0;
};

template <class Row>
inline std::int32_t launch_conv_narrow(const catalog_args* args, cudaStream_t stream) noexcept {
    if (const catalog_status status = conv::check_call<Row::direction>(args); status != CATALOG_OK) return status;
    return NarrowLaunch<Row>(*args, stream).run();
}

template <class Row>
inline constexpr Block block_of{narrow_threads, narrow_bytes};

}  // namespace catalog::cuda
