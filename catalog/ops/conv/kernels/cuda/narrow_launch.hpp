// The launch of a row of pipeline sm90_narrow: its checks, the copies that it needs, and the tensors as kernels take them.
#pragma once

#include <cstdint>

#include "abi/export.hpp"
#include "conv_copy.hpp"
#include "geometry/call.hpp"
#include "narrow_patches_launch.hpp"

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
        catalog_status status = readable.run(copies.data, stream);
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

    catalog_status compute(const conv::Window& window, const ConvTensor& x, const ConvTensor& y, const ConvTensor& w,
                           int device) const {
        const NarrowTensors tensors = describe(window, x, y, w);
        if constexpr (!weighs)
            return ImagesLaunch<Row>(tensors, processors, stream).run();
        else
            return GradientsLaunch<Row>(tensors, processors, device, stream).run();
    }

    NarrowTensors describe(const conv::Window& window, const ConvTensor& x, const ConvTensor& y,
                           const ConvTensor& w) const {
        NarrowTensors tensors{};
        const ConvTensor& images = direction == Direction::bwd_data ? y : x;
        const catalog_tensor& result = weighs ? args.weight : direction == Direction::forward ? args.output : args.input;
        const std::int32_t* const extents = direction == Direction::forward ? of.out : of.size;
        tensors.images = images.data;
        tensors.of_group = static_cast<int>(args.c / args.g);
        tensors.stride_images = images.stride;
        tensors.image_channels = static_cast<int>(images.all_channels);
        tensors.gradient = y.data;
        tensors.stride_gradient = y.stride;
        tensors.gradient_channels = static_cast<int>(y.all_channels);
        tensors.weight = w.data;
        tensors.stride_weight = w.stride;
        tensors.filter_elements = static_cast<int>(of.taps()) * tensors.of_group;
        const bool even = w.stride % 2 == 0 && reinterpret_cast<std::uintptr_t>(w.data) % 4 == 0;
        tensors.even_weights = even && tensors.of_group > 1;
        tensors.result = result.data;
        tensors.stride_result = result.stride_first;
        tensors.height = axis_of(window.axis[1]);
        tensors.width = axis_of(window.axis[2]);
        tensors.channels = static_cast<int>(args.c);
        tensors.filter_width = of.filter[2];
        tensors.result_width = extents[2];
        tensors.images_count = static_cast<int>(args.n);
        return tensors;
    }

    const catalog_args& args;
    const conv::Geometry of;
    const cudaStream_t stream;
    int processors = 0;
};

template <class Row>
inline std::int32_t launch_narrow(const catalog_args* args, cudaStream_t stream) noexcept {
    if (const catalog_status status = conv::check_call<Row::direction>(args); status != CATALOG_OK) return status;
    return NarrowLaunch<Row>(*args, stream).run();
}

template <class Row>
inline constexpr Block block_of{
    Row::direction == Direction::bwd_weight ? narrow_gradients_threads : narrow_images_threads, narrow_bytes};

}  // namespace catalog::cuda
