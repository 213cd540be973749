// The launch of a row of pipeline sm90_wgmma: its phases, and the parts of their depth.
#pragma once

#include <cstdint>

#include "conv_few.hpp"
#include "conv_tensors.hpp"
#include "conv_wgmma.hpp"

namespace catalog::cuda {

template <class Row>
class ConvLaunch : ConvTensors<Row> {
    using Base = ConvTensors<Row>;
    using typename Base::T;
    using Base::args, Base::of, Base::stream, Base::windows, Base::processors, Base::direction, Base::weighs, Base::axes;
    using Shape = ConvShape<Row>;
    using Call = ConvCall<axes>;

   public:
    using Base::Base;

    catalog_status run() {
        if (cudaFuncSetAttribute(conv_wgmma<Row>, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic_bytes) != cudaSuccess)
            return launched(), CATALOG_DEVICE_ERROR;
        return this->with_tensors([&](const ConvTensor& x, const ConvTensor& w, const ConvTensor& y) -> catalog_status {
            for (std::size_t first = 0; first < windows.size(); first += most_phases) {
                Call call{};
                if (!describe(call, x, w, y, first)) return CATALOG_BAD_ARGUMENT;
                if (const catalog_status status = launch(call); status != CATALOG_OK) return status;
            }
            return CATALOG_OK;
        });
    }

   private:
    static constexpr int dynamic_bytes = Shape::bytes + Shape::alignment;

    bool describe(Call& call, const ConvTensor& x, const ConvTensor& w, const ConvTensor& y, std::size_t first) const {
        const ConvTensor& images = direction == Direction::bwd_data ? y : x;
        this->describe_sizes(call, images, y);
        const std::int64_t columns = weighs ? of.taps() * call.blocks * block_channels : this->columns();
        const std::int64_t tiles_n = parts(columns, Row::tile_n);
        call.tiles_n = Divisor(tiles_n);
        call.of_groups = Divisor(args.g);
        std::int64_t tiles = 0;
        for (; call.phase_count < most_phases && first + call.phase_count < windows.size(); ++call.phase_count) {
            const conv::Window& window = windows[first + call.phase_count];
            ConvPhase<axes>& phase = call.phases[call.phase_count];
            if (!describe_phase<T>(phase, window, images, this->halves(), weighs ? Shape::tile_k : Row::tile_m)) return false;
            const std::int64_t positions = args.n * window.positions();
            phase.rows = static_cast<int>(weighs ? call.rows : positions);
            phase.steps = static_cast<int>(weighs ? parts(positions, Shape::tile_k) : window.taps() * call.blocks);
            phase.whole_steps = phase.steps - (this->halves() ? static_cast<int>(window.taps()) : 0);
            phase.first_tile = static_cast<int>(tiles);
            tiles += parts(phase.rows, Row::tile_m) * tiles_n * args.g;
            if (tiles > 1 << 24) return false;
        }
        call.tiles = static_cast<int>(tiles);
        call.of_tiles = Divisor(tiles);
        return (weighs ? describe_gradient(call, y) : this->describe_weight(call, w, 64)) && describe_store(call);
    }

    static bool describe_gradient(Call& call, const ConvTensor& y) {
        constexpr int none[axes]{};
        int ones[axes], extents[axes];
        Divisor counts[axes];
        for (int& one : ones) one = 1;
        Base::in_order(y.extents, extents);
        for (int i = 0; i < axes; ++i) counts[i] = Divisor(extents[i]);
        return describe_images<T, axes>(call.gradient, y, none, ones, counts, block_channels, Shape::tile_k);
    }

    bool describe_store(Call& call) const {
        if (!this->describe_result(call)) return true;
        const std::int64_t columns = this->columns();
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
    catalog_status launch(Call& call) const {
        std::int64_t steps = 0;
        for (int i = 0; i < call.phase_count; ++i) steps = std::max<std::int64_t>(steps, call.phases[i].steps);
        const double share = this->halves() ? 1 - 0.5 / call.blocks : 1;
        call.splits = choose_splits<Row>(call.tiles, steps, share, call.aligned, processors);
        call.of_splits = Divisor(call.splits);
        const int blocks = call.tiles * call.splits;
        const bool in_memory = call.splits > most_cluster_blocks;
        call.in_cluster = call.splits > 1 && !in_memory;
        const std::int64_t bytes = in_memory ? blocks * ConvSums<Row>::floats * static_cast<std::int64_t>(sizeof(float)) : 0;
        const Scratch sums(bytes, Base::device, stream);
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
};

template <class Row>
inline std::int32_t launch_wgmma(const catalog_args* args, cudaStream_t stream) noexcept {
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
