// A convolution, or one of its gradients, in one launch.
#pragma once

#include "call.hpp"

namespace catalog::ck {

template <class Row>
class Family {
    using Types = Instance<Row>;
    using Sizes = typename Types::Arguments;

    static ck_tile::index_t index(std::int64_t extent) { return static_cast<ck_tile::index_t>(extent); }

    // Steps of the main loop.
    static ck_tile::index_t steps(ck_tile::index_t depth) { return (depth + Row::tile_k - 1) / Row::tile_k; }

   public:
    static catalog_status run(const catalog_args& args, const Geometry& geometry, hipStream_t stream) {
        if (args.n == 0) return clear(args.weight, args.k * (args.c / args.g) * geometry.product(Geometry::filter),
                                      sizeof(typename Row::Weight), stream);
        const Sizes sizes = arguments(args, geometry);
        if constexpr (Row::simple_loop) {
            return convolve<typename Types::template Pipeline<false, ck_tile::TailNumber::Full>>(args, geometry, sizes,
                                                                                                 stream);
        } else {
            using Loop = typename Types::template Loop<Row>;
            const auto depths = Types::depths(sizes, depth(args, geometry));
            const ck_tile::index_t first = steps(depths.at(0));
            // One kernel computes all products of a launch: all need its hot loop and its tail.
            for (const ck_tile::index_t other : depths)
                if (Loop::BlockHasHotloop(steps(other)) != Loop::BlockHasHotloop(first) ||
                    Loop::GetBlockLoopTailNum(steps(other)) != Loop::GetBlockLoopTailNum(first))
                    return CATALOG_BAD_ARGUMENT;
            catalog_status status = CATALOG_OK;
            const auto with = [&](auto hot_loop, auto tail) {
                status = convolve<typename Types::template Pipeline<hot_loop.value, tail.value>>(args, geometry, sizes,
                                                                                                 stream);
            };
            Loop::TailHandler(with, Loop::BlockHasHotloop(first), Loop::GetBlockLoopTailNum(first));
            return status;
        }
    }

   private:
    static catalog_status clear(const catalog_tensor& tensor, std::int64_t elements, std::size_t bytes,
                                hipStream_t stream) {
        return succeeded(hipMemsetAsync(tensor.data, 0, elements * bytes, stream)) ? CATALOG_OK : CATALOG_DEVICE_ERROR;
    }

    // Elements along K.
    static ck_tile::index_t depth(const catalog_args& args, const Geometry& geometry) {
        if (Row::direction == Direction::bwd_weight) return index(args.n * geometry.product(Geometry::output));
        return index(args.c / args.g * geometry.product(Geometry::filter));
    }

    static Sizes arguments(const catalog_args& args, const Geometry& geometry) {
        const auto zeros = geometry[Geometry::padding];
        const ck_tile::conv::ConvParam sizes(index(Row::ndim), index(args.g), index(args.n), index(args.k / args.g),
                                             index(args.c / args.g), geometry[Geometry::filter],
                                             geometry[Geometry::input], geometry[Geometry::stride],
                                             geometry[Geometry::dilation], zeros, zeros);
        return Sizes(sizes, args.input.data, args.weight.data, {}, args.output.data, 1);
    }

    template <class Pipeline>
    static catalog_status convolve(const catalog_args& args, const Geometry& geometry, const Sizes& sizes,
                                   hipStream_t stream) {
        using Kernel = typename Types::template Kernel<typename Types::Geometry, typename Types::Partitioner, Pipeline,
                                                       typename Types::Epilogue>;
        const auto kernel_args = Kernel::MakeKernelArgs(sizes);
        if (!Kernel::IsSupportedArgument(kernel_args)) return CATALOG_BAD_ARGUMENT;
        if constexpr (Row::direction == Direction::bwd_data) {  // inputs that no window sees are not stored
            const std::int64_t elements = args.n * args.c * geometry.product(Geometry::input);
            const auto status = clear(args.input, elements, sizeof(typename Row::In), stream);
            if (status != CATALOG_OK) return status;
        }
        constexpr auto kernel = Types::template entry<Kernel, std::remove_const_t<decltype(kernel_args)>>;
        hipLaunchKernelGGL(kernel, Kernel::GridSize(kernel_args), Kernel::BlockSize(), 0, stream, kernel_args);
        return CATALOG_OK;
    }
};

}  // namespace catalog::ck
