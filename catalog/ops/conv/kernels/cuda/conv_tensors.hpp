// What launches of implicit products share: their checks, the tensors as TMA reads them, and what a call says of them.
#pragma once

#include <cstdint>
#include <vector>

#include "abi/export.hpp"
#include "conv_copy.hpp"
#include "geometry/call.hpp"

namespace catalog::cuda {

template <class Row>
class ConvTensors {
   public:
    // Images may have more channels than the filters: what is in them meets zeros, or is not stored.
    ConvTensors(const catalog_args& args, cudaStream_t stream, std::int64_t image_channels)
        : args(args), of(args), stream(stream), image_channels(image_channels) {}

   protected:
    using T = typename Row::dtype;
    static constexpr int axes = Row::ndim;
    static constexpr Direction direction = Row::direction;
    static constexpr bool weighs = direction == Direction::bwd_weight;

    // Calls `launch(x, w, y)`, which returns a status, with readable images, filters and gradients; copies of some are queued
    // before.
    template <class Launch>
    catalog_status with_tensors(Launch&& launch) {
        if (args.n == 0) return without_images<Row>(args, of, stream);
        if (!valid()) return CATALOG_BAD_ARGUMENT;
        conv::for_windows<direction>(of, [&](const conv::Window& window) { windows.push_back(window); });
        if (cudaGetDevice(&device) != cudaSuccess ||
            cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
            return launched(), CATALOG_DEVICE_ERROR;
        ConvTensor x{args.input.data, args.n, args.input.stride_first, image_channels / args.g, image_channels, of.size};
        ConvTensor y{args.output.data, args.n, args.output.stride_first, args.k / args.g, args.k, of.out};
        ConvTensor w{args.weight.data, args.k, args.weight.stride_first, args.c / args.g, args.c / args.g, of.filter};
        ReadableTensors<T> readable;
        // Boxes begin at multiples of 16 bytes. Where channels are the depth, those of other groups must not be in them.
        const std::int64_t apart = weighs ? 8 : halves() ? half_block : block_channels;
        if constexpr (direction != Direction::bwd_data) readable.add(x, args.g, apart);
        if constexpr (direction != Direction::forward) readable.add(y, args.g, apart);
        if constexpr (!weighs) readable.add(w, 1, 8);
        const Scratch copies(readable.bytes(), device, stream);
        if (readable.bytes() > 0 && !copies.data) return launched(), CATALOG_NO_MEMORY;
        if (const catalog_status status = readable.run(copies.data, stream); status != CATALOG_OK) return status;
        return launch(x, w, y);
    }

    // Channels of a group that are the depth, and whether the last block of 32 of them is enough.
    std::int64_t depth() const { return (direction == Direction::bwd_data ? args.k : args.c) / args.g; }
    bool halves() const { return !weighs && depth() % block_channels > 0 && depth() % block_channels <= half_block; }

    std::int64_t columns() const { return (direction == Direction::forward ? args.k : args.c) / args.g; }

    static void in_order(const std::int32_t* extents, int (&to)[axes]) {
        for (int i = 0; i < axes; ++i) to[i] = extents[conv::axes - 1 - i];
    }

    void describe_sizes(ConvCall<axes>& call, const ConvTensor& images, const ConvTensor& gradient) const {
        in_order(of.filter, call.filter);
        in_order(direction == Direction::forward ? of.out : of.size, call.extents);
        call.groups = static_cast<int>(args.g);
        call.rows = static_cast<int>(args.k / args.g);
        call.columns = static_cast<int>(columns());
        call.channels = static_cast<int>(images.channels);
        call.aligned = images.all_channels % 16 == 0;
        call.gradient_channels = static_cast<int>(gradient.channels);
        call.blocks = static_cast<int>(parts(depth(), block_channels));
    }

    // Loads of at most `most` columns. Where the columns are rows in shared memory, those outside of the tensor are not
    // loaded: TMA fills them slowly, and what is in their place only reaches elements that are not stored.
    bool describe_weight(ConvCall<axes>& call, const ConvTensor& w, std::int64_t most) const {
        constexpr bool along = direction == Direction::forward;
        const std::int64_t all = this->columns(), left = all % most;
        const std::int64_t fitting = all < most ? parts(all, 8) * 8 : left > 0 && left <= most / 2 ? most / 2 : most;
        call.filter_columns = static_cast<int>(along ? fitting : most);
        const auto columns = static_cast<std::uint32_t>(call.filter_columns);
        const std::int64_t k = args.k / args.g;
        const std::uint64_t extents[4] = {std::uint64_t(w.all_channels), std::uint64_t(of.taps()), std::uint64_t(k),
                                          std::uint64_t(args.g)};
        const std::uint64_t filter = args.k > 1 ? w.stride * sizeof(T) : w.all_channels * of.taps() * sizeof(T);
        const std::uint64_t strides[3] = {w.all_channels * sizeof(T), filter, k * filter};
        constexpr std::uint32_t whole = block_channels, half = half_block;
        const auto describe = [&](CUtensorMap& map, std::uint32_t depth) {
            const std::uint32_t row = along ? depth : columns, rows = along ? columns : depth;
            return make_tensor_map<T>(map, w.data, extents, strides, {row, 1, rows, 1}, swizzle_of(row * sizeof(T)));
        };
        return describe(call.weight, whole) && (!halves() || describe(call.half_weight, half));
    }

    // How the result's elements can be written. Whether addresses and strides are multiples of 16 bytes, as TMA wants it.
    bool describe_result(ConvCall<axes>& call) const {
        const catalog_tensor& result = weighs ? args.weight : direction == Direction::forward ? args.output : args.input;
        call.result = result.data;
        call.stride_result = result.stride_first;
        const auto multiple = [&](std::int64_t unit) {
            const bool rows = args.g == 1 || columns() % unit == 0;
            const bool all = (weighs ? columns() : columns() * args.g) % unit == 0;
            const bool apart = (weighs ? args.k : args.n) <= 1 || call.stride_result % unit == 0;
            return rows && all && apart && reinterpret_cast<std::uintptr_t>(call.result) % (unit * sizeof(T)) == 0;
        };
        call.pairs = multiple(2) && columns() % 2 == 0;
        call.vectors = multiple(8) && columns() % 8 == 0;
        return multiple(8);
    }

    const catalog_args& args;
    const conv::Geometry of;
    const cudaStream_t stream;
    int device = 0, processors = 0;
    std::vector<conv::Window> windows;

   private:
    // Whether counts fit the types of the kernel, and axes that the row lacks have extent 1.
    bool valid() const {
        constexpr std::int64_t most = std::int64_t{1} << 30;
        std::int64_t positions = 1;
        for (const std::int32_t* extents : {of.size, of.out, of.filter})
            for (int i = 0; i < conv::axes; ++i) {
                if (i < conv::axes - axes && (extents[i] != 1 || of.pad[i] != 0)) return false;
                if (extents[i] > most) return false;
            }
        for (const std::int32_t* extents : {of.size, of.out}) {
            positions = args.n;
            for (int i = 0; i < conv::axes; ++i)
                if ((positions *= extents[i]) > most) return false;
        }
        return args.c <= most && args.k <= most && of.taps() * parts(args.c / args.g, block_channels) <= most / 64 &&
               of.taps() * parts(args.k / args.g, block_channels) <= most / 64;
    }

    const std::int64_t image_channels;
};

}  // namespace catalog::cuda
