// The launch of a row of pipeline sm90_wgmma: its checks, the copies that it needs, and its phases.
#pragma once

#include <cstdint>
#include <vector>

#include "abi/export.hpp"
#include "conv_few.hpp"
#include "conv_wgmma.hpp"
#include "geometry/call.hpp"

namespace catalog::cuda {

template <class Row>
class ConvLaunch {
    using T = typename Row::dtype;
    using Shape = ConvShape<Row>;
    static constexpr int axes = Row::ndim;
    static constexpr Direction direction = Row::direction;
    static constexpr bool weighs = direction == Direction::bwd_weight;
    using Call = ConvCall<axes>;

   public:
    // Images may have more channels than the filters: what is in them meets zeros, or is not stored.
    ConvLaunch(const catalog_args& args, cudaStream_t stream, std::int64_t image_channels)
        : args(args), of(args), stream(stream), image_channels(image_channels) {}

    catalog_status run() {
        if (args.n == 0) return without_images<Row>(args, of, stream);
        if (!valid()) return CATALOG_BAD_ARGUMENT;
        conv::for_windows<direction>(of, [&](const conv::Window& window) { windows.push_back(window); });
        int device;
        if (cudaGetDevice(&device) != cudaSuccess ||
            cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
            cudaFuncSetAttribute(conv_wgmma<Row>, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic_bytes) !=
                cudaSuccess)
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
        for (std::size_t first = 0; first < windows.size(); first += most_phases) {
            Call call{};
            if (!describe(call, x, w, y, first)) return CATALOG_BAD_ARGUMENT;
            if (const catalog_status status = run(call, device); status != CATALOG_OK) return status;
        }
        return CATALOG_OK;
    }

   private:
    static constexpr int dynamic_bytes = Shape::bytes + Shape::alignment;

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

    // Channels of a group that are the depth, and whether the last block of 32 of them is enough.
    std::int64_t depth() const { return (direction == Direction::bwd_data ? args.k : args.c) / args.g; }
    bool halves() const { return !weighs && depth() % block_channels > 0 && depth() % block_channels <= half_block; }

    static void in_order(const std::int32_t* extents, int (&to)[axes]) {
        for (int i = 0; i < axes; ++i) to[i] = extents[conv::axes - 1 - i];
    }

    bool describe(Call& call, const ConvTensor& x, const ConvTensor& w, const ConvTensor& y, std::size_t first) const {
        const ConvTensor& images = direction == Direction::bwd_data ? y : x;
        const std::int64_t c = args.c / args.g, k = args.k / args.g;
        const std::int64_t columns = direction == Direction::forward ? k : c;
        in_order(of.filter, call.filter);
        in_order(direction == Direction::forward ? of.out : of.size, call.extents);
        call.groups = static_cast<int>(args.g);
        call.rows = static_cast<int>(k);
        call.columns = static_cast<int>(columns);
        call.channels = static_cast<int>(images.channels);
        call.gradient_channels = static_cast<int>(y.channels);
        call.blocks = static_cast<int>(parts(depth(), block_channels));
        const catalog_tensor& result = weighs ? args.weight : direction == Direction::forward ? args.output : args.input;
        call.result = result.data;
        call.stride_result = result.stride_first;
        call.tiles_n = static_cast<int>(parts(weighs ? of.taps() * call.blocks * block_channels : columns, Row::tile_n));
        std::int64_t tiles = 0;
        for (; call.phase_count < most_phases && first + call.phase_count < windows.size(); ++call.phase_count) {
            const conv::Window& window = windows[first + call.phase_count];
            ConvPhase<axes>& phase = call.phases[call.phase_count];
            if (!describe_phase<T>(phase, window, images, halves(), weighs ? Shape::tile_k : Row::tile_m)) return false;
            const std::int64_t positions = args.n * window.positions();
            phase.rows = static_cast<int>(weighs ? k : positions);
            phase.steps = static_cast<int>(weighs ? parts(positions, Shape::tile_k) : window.taps() * call.blocks);
            phase.whole_steps = phase.steps - (halves() ? static_cast<int>(window.taps()) : 0);
            phase.first_tile = static_cast<int>(tiles);
            tiles += parts(phase.rows, Row::tile_m) * call.tiles_n * args.g;
            if (tiles > 1 << 24) return false;
        }
        call.tiles = static_cast<int>(tiles);
        return (weighs ? describe_gradient(call, y) : describe_weight(call, w, k)) && describe_result(call, columns);
    }

    static bool describe_gradient(Call& call, const ConvTensor& y) {
        constexpr int none[axes]{};
        int ones[axes], extents[axes];
        for (int& one : ones) one = 1;
        in_order(y.extents, extents);
        return describe_images<T, axes>(call.gradient, y, none, ones, extents, block_channels, Shape::tile_k);
    }

    bool describe_weight(Call& call, const ConvTensor& w, std::int64_t k) const {
        const std::uint64_t extents[4] = {std::uint64_t(w.all_channels), std::uint64_t(of.taps()), std::uint64_t(k),
                                          std::uint64_t(args.g)};
        const std::uint64_t filter = args.k > 1 ? w.stride * sizeof(T) : w.all_channels * of.taps() * sizeof(T);
        const std::uint64_t strides[3] = {w.all_channels * sizeof(T), filter, k * filter};
        constexpr bool along = direction == Direction::forward;
        constexpr std::uint32_t columns = 64, whole = block_channels, half = half_block;
        const auto describe = [&](CUtensorMap& map, std::uint32_t depth) {
            const auto swizzle = along && depth == half ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
            return make_tensor_map<T>(map, w.data, extents, strides,
                                      {along ? depth : columns, 1, along ? columns : depth, 1}, swizzle);
        };
        return describe(call.weight, whole) && (!halves() || describe(call.half_weight, half));
    }

    bool describe_result(Call& call, std::int64_t columns) const {
        const auto multiple = [&](std::int64_t unit) {
            const bool rows = args.g == 1 || columns % unit == 0;
            const bool all = (weighs ? columns : columns * args.g) % unit == 0;
            const bool apart = (weighs ? args.k : args.n) <= 1 || call.stride_result % unit == 0;
            return rows && all && apart && reinterpret_cast<std::uintptr_t>(call.result) % (unit * sizeof(T)) == 0;
        };
        call.pairs = multiple(2) && columns % 2 == 0;
        call.vectors = multiple(8) && columns % 8 == 0;
        if (!multiple(8)) return true;
        if constexpr (weighs) {
            const std::int64_t taps = of.taps(), filter = args.k > 1 ? call.stride_result : taps * columns;
            const std::uint64_t extents[4] = {std::uint64_t(columns), std::uint64_t(taps), std::uint64_t(call.rows),
                                              std::uint64_t(args.g)};
            const std::uint64_t strides[3] = {columns * sizeof(T), filter * sizeof(T), call.rows * filter * sizeof(T)};
            call.plain = make_tensor_map<T>(call.out, call.result, extents, strides, {block_channels, 1, 64, 1});
        } else {
            const std::int64_t volume = conv::Geometry::volume(direction == Direction::forward ? of.out : of.size);
            const std::int64_t row = columns * args.g;
            const bool dense = args.n == 1 || call.stride_result == volume * row;
            if (windows.size() > 1 || !windows[0].is_dense() || !dense) return true;
            const std::uint64_t extents[3] = {std::uint64_t(columns), std::uint64_t(args.n * volume),
                                              std::uint64_t(args.g)};
            const std::uint64_t strides[2] = {row * sizeof(T), std::max<std::uint64_t>(columns * sizeof(T) / 16 * 16, 16)};
            call.plain = make_tensor_map<T>(call.out, call.result, extents, strides, {block_channels, Shape::piece_rows, 1});
        }
        return true;
    }

    // Up to as many parts of the depth as a cluster has blocks are blocks of one, which add their sums; more of them leave
    // their sums in memory to another kernel.
    catalog_status run(Call& call, int device) {
        std::int64_t steps = 0;
        for (int i = 0; i < call.phase_count; ++i) steps = std::max<std::int64_t>(steps, call.phases[i].steps);
        call.splits = choose_splits<Row>(call.tiles, steps, processors);
        const int blocks = call.tiles * call.splits;
        const bool in_memory = call.splits > most_cluster_blocks;
        call.in_cluster = call.splits > 1 && !in_memory;
        const std::int64_t bytes = in_memory ? blocks * ConvSums<Row>::floats * static_cast<std::int64_t>(sizeof(float)) : 0;
        const Scratch sums(bytes, device, stream);
        if (bytes > 0 && !sums.data) return launched(), CATALOG_NO_MEMORY;
        call.sums = static_cast<float*>(sums.data);
        const int grid = call.in_cluster ? blocks : std::min(blocks, processors);
        KernelLaunch launch(grid, Shape::threads, dynamic_bytes, stream, Start::early);
        const catalog_status status = launch.in_clusters(call.in_cluster ? call.splits : 1).run(conv_wgmma<Row>, call);
        if constexpr (!Shape::swapped)
            if (status == CATALOG_OK && in_memory)
                return KernelLaunch(dim3(call.tiles, ConvSums<Row>::chunks), ConvSums<Row>::threads, 0, stream, Start::early)
                    .run(conv_add_parts<Row>, call);
        return status;
    }

    const catalog_args& args;
    const conv::Geometry of;
    const cudaStream_t stream;
    const std::int64_t image_channels;
    int processors = 0;
    std::vector<conv::Window> windows;
};

template <class Row>
inline std::int32_t launch_conv_wgmma(const catalog_args* args, cudaStream_t stream) noexcept {
    if (const catalog_status status = conv::check_call<Row::direction>(args); status != CATALOG_OK) return status;
    if constexpr (Row::direction != Direction::bwd_data) {
        if (FewChannels<Row>::applies(*args)) {
            FewChannels<Row> few(*args, stream);
            return few.status == CATALOG_OK ? ConvLaunch<Row>(few.args, stream, few.channels).run() : few.status;
        }
    }
    return ConvLaunch<Row>(*args, stream, args->c).run();
}

}  // namespace catalog::cuda
