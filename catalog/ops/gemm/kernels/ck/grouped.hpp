// Products of groups of rows in one launch.
#pragma once

#include <vector>

#include "call.hpp"
#include "instance.hpp"

namespace catalog::ck {

template <class Row>
class Family {
    using Types = Instance<Row>;
    template <class Pipeline>
    using Kernel =
        ck_tile::GroupedGemmKernel<typename Types::Partitioner, Pipeline,
                                   typename Types::template Epilogue<ck_tile::memory_operation_enum::set>>;

   public:
    // CK's description of each group.
    static catalog_workspace workspace(const catalog_args& args) {
        return {1, static_cast<std::int64_t>(
                       Kernel<typename Types::AnyPipeline>::GetWorkSpaceSize(static_cast<int>(args.batch)))};
    }

    static catalog_status run(const catalog_args& args, hipStream_t stream) {
        if (args.k == 0) {  // one matrix, without a batch
            return clear<Row>(args, 0, stream) ? CATALOG_OK : CATALOG_DEVICE_ERROR;
        }
        if (!args.c_acc.data) return CATALOG_BAD_ARGUMENT;
        std::vector<std::int32_t> starts(args.batch + 1);
        if (!succeeded(hipMemcpyAsync(starts.data(), args.starts, starts.size() * sizeof starts[0],
                                      hipMemcpyDeviceToHost, stream)) ||
            !succeeded(hipStreamSynchronize(stream)))
            return CATALOG_DEVICE_ERROR;
        if constexpr (Row::persistent) {
            return multiply<typename Types::AnyPipeline>(args, starts, stream);
        } else {
            const auto loops = static_cast<ck_tile::index_t>(divide_up(args.k, Row::tile_k));
            catalog_status status = CATALOG_OK;
            const auto with = [&](auto hot_loop, auto tail) {
                status = multiply<typename Types::template Pipeline<hot_loop.value, tail.value>>(args, starts, stream);
            };
            Types::Loop::TailHandler(with, Types::Loop::BlockHasHotloop(loops),
                                     Types::Loop::GetBlockLoopTailNum(loops));
            return status;
        }
    }

   private:
    template <class Pipeline>
    static catalog_status multiply(const catalog_args& args, const std::vector<std::int32_t>& starts,
                                   hipStream_t stream) {
        using Kernel = Kernel<Pipeline>;
        std::vector<decltype(group(args, starts, 0))> groups;
        for (std::int64_t i = 0; i < args.batch; ++i)
            if (starts[i + 1] > starts[i]) groups.push_back(group(args, starts, i));
        if (groups.empty()) return CATALOG_OK;
        const auto described = Kernel::MakeKargs(groups);
        if (!Kernel::IsSupportedArgument(described)) return CATALOG_BAD_ARGUMENT;
        if (!succeeded(hipMemcpyAsync(args.c_acc.data, described.data(), described.size() * sizeof described[0],
                                      hipMemcpyHostToDevice, stream)) ||
            !succeeded(hipStreamSynchronize(stream)))  // the descriptions must live until they are there
            return CATALOG_DEVICE_ERROR;
        enqueue<Row, Kernel>(stream, Kernel::GridSize(groups),
                             ck_tile::cast_pointer_to_constant_address_space(args.c_acc.data),
                             static_cast<ck_tile::index_t>(groups.size()));
        return CATALOG_OK;
    }

    static auto group(const catalog_args& args, const std::vector<std::int32_t>& starts, std::int64_t i) {
        const auto size = [](std::int64_t extent) { return static_cast<ck_tile::index_t>(extent); };
        const std::int64_t first = starts[i];
        const auto* const a = data_of<const typename Row::A>(args.a, 0) + first * (Row::rows_a ? args.a.stride_outer : 1);
        return Headers::grouped_args(a, data_of<const typename Row::B>(args.b, i),
                                     data_of<typename Row::C>(args.c, 0) + first * args.c.stride_outer, 1,
                                     size(starts[i + 1] - first), size(args.n), size(args.k),
                                     size(args.a.stride_outer), size(args.b.stride_outer), size(args.c.stride_outer));
    }
};

}  // namespace catalog::ck
