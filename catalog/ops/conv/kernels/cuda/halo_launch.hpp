// The launches of a row of pipeline sm90_halo, one for each phase, and their patches.
#pragma once

#include "conv_tensors.hpp"
#include "halo_wgmma.hpp"

namespace catalog::cuda {

template <class Row>
class HaloLaunch : ConvTensors<Row> {
    using Base = ConvTensors<Row>;
    using typename Base::T;
    using Base::args, Base::of, Base::stream, Base::windows, Base::processors, Base::direction, Base::axes;
    using Shape = HaloShape<Row>;
    using Call = HaloCall<axes>;

   public:
    using Base::Base;

    catalog_status run() {
        if (cudaFuncSetAttribute(conv_halo<Row>, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic_bytes) != cudaSuccess)
            return launched(), CATALOG_DEVICE_ERROR;
        return this->with_tensors([&](const ConvTensor& x, const ConvTensor& w, const ConvTensor& y) -> catalog_status {
            for (const conv::Window& window : windows) {
                Call call{};
                if (!describe(call, window, direction == Direction::bwd_data ? y : x, w, y)) return CATALOG_BAD_ARGUMENT;
                if (const catalog_status status = launch(call); status != CATALOG_OK) return status;
            }
            return CATALOG_OK;
        });
    }

   private:
    static constexpr int dynamic_bytes = Shape::bytes + Shape::alignment;

    catalog_status launch(const Call& call) const {
        int blocks = std::min(call.tiles, processors);
        // The columns of a block stay the same.
        if constexpr (Shape::keeps_filter) blocks -= blocks % static_cast<int>(call.tiles_n.divisor);
        if (blocks == 0) return CATALOG_BAD_ARGUMENT;
        return KernelLaunch(blocks, Shape::threads, dynamic_bytes, stream, Start::early).run(conv_halo<Row>, call);
    }

    // Of a phase in which the filter meets neighbours, and of images without groups.
    bool describe(Call& call, const conv::Window& window, const ConvTensor& images, const ConvTensor& w,
                  const ConvTensor& y) const {
        if (args.g != 1) return false;
        this->describe_sizes(call, images, y);
        ConvPhase<axes>& phase = call.phases[0];
        if (!describe_window(phase, window)) return false;
        for (const int step : phase.step)
            if (step != 1) return false;
        if (!choose_patch(call, Row::tile_m, Shape::patch_rows)) return false;
        call.planes = axes > 2 ? phase.taps[axes - 1] : 1;
        call.in_plane = static_cast<int>(window.taps() / call.planes);
        phase.whole_steps = static_cast<int>(window.taps() * (call.blocks - (this->halves() ? 1 : 0)));
        const std::int64_t tiles_n = parts(call.columns, Row::tile_n);
        call.tiles_n = Divisor(tiles_n);
        std::int64_t tiles = args.n * tiles_n;
        for (const Divisor& across : call.across) tiles *= across.divisor;
        if (tiles > 1 << 24 || (Shape::keeps_filter && window.taps() * call.blocks > Shape::filters)) return false;
        call.tiles = static_cast<int>(tiles);
        return describe_patches(phase.images, call, images, block_channels) &&
               (!this->halves() || describe_patches(phase.half_images, call, images, half_block)) &&
               this->describe_weight(call, w, Shape::along ? Shape::columns : 64) && describe_store(call);
    }

    // Boxes of a patch with its halo.
    static bool describe_patches(CUtensorMap& map, const Call& call, const ConvTensor& images, std::uint32_t channels) {
        std::uint32_t box[axes];
        std::int64_t extents[axes], strides[axes], stride = images.all_channels;
        for (int i = 0; i < axes; ++i) {
            box[i] = i == 0 ? call.pitch : i == 1 ? call.box_rows / call.pitch : 1;
            extents[i] = images.extents[conv::axes - 1 - i];
            strides[i] = stride;
            stride *= extents[i];
        }
        return describe_boxes(map, images, extents, strides, channels, box);
    }

    bool describe_store(Call& call) const {
        if (!this->describe_result(call)) return true;
        const ConvPhase<axes>& phase = call.phases[0];
        std::uint32_t box[axes];
        std::int64_t extents[axes], strides[axes], stride = call.columns, first = 0;
        for (int i = 0; i < axes; ++i) {
            box[i] = call.patch[i];
            extents[i] = phase.count[i].divisor;
            strides[i] = stride * phase.spread[i];
            first += stride * phase.origin[i];
            stride *= call.extents[i];
        }
        const ConvTensor result{static_cast<T*>(call.result) + first, args.n, call.stride_result, call.columns, call.columns,
                                nullptr};
        call.plain = describe_boxes(call.out, result, extents, strides, Shape::columns, box);
        return true;
    }

    // Of a tensor's positions, which have these extents and strides.
    static bool describe_boxes(CUtensorMap& map, const ConvTensor& tensor, const std::int64_t (&extents)[axes],
                               const std::int64_t (&strides)[axes], std::uint32_t channels,
                               const std::uint32_t (&box)[axes]) {
        std::uint64_t all_extents[axes + 2], all_strides[axes + 1];
        std::uint32_t boxes[axes + 2];
        all_extents[0] = tensor.all_channels, boxes[0] = channels;
        for (int i = 0; i < axes; ++i) {
            all_extents[i + 1] = extents[i], boxes[i + 1] = box[i];
            all_strides[i] = strides[i] * sizeof(T);
        }
        all_extents[axes + 1] = tensor.count, boxes[axes + 1] = 1;
        all_strides[axes] = (tensor.count > 1 ? tensor.stride : extents[axes - 1] * strides[axes - 1]) * sizeof(T);
        return make_tensor_map<T>(map, tensor.data, all_extents, all_strides, boxes, swizzle_of(channels * sizeof(T)));
    }
};

template <class Row>
inline std::int32_t launch_halo(const catalog_args* args, cudaStream_t stream) noexcept {
    if (const catalog_status status = conv::check_call<Row::direction>(args); status != CATALOG_OK) return status;
    return HaloLaunch<Row>(*args, stream, args->c).run();
}

template <class Row>
inline constexpr Block block_of{HaloShape<Row>::threads, HaloShape<Row>::bytes + HaloShape<Row>::alignment};

}  // namespace catalog::cuda
