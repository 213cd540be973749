// Products whose tiles of C several blocks compute: each takes an equal share of all steps along K.
#pragma once

#include "call.hpp"
#include "instance.hpp"

namespace catalog::ck {

// CK's partitioner says how many blocks there are, persistent ones too.
template <class Row>
struct Partitioned : Row {
    static constexpr bool persistent = false;
};

template <class Row>
class Family {
    using Types = Instance<Row>;
    using Strategy = ck_tile::StreamKReductionStrategy;
    using Operation = ck_tile::memory_operation_enum;
    static constexpr Strategy strategy = Row::atomic ? Strategy::Atomic : Strategy::Reduction;
    using Partitioner = ck_tile::StreamKTilePartitioner_v2<typename Types::Tile, strategy, Row::persistent>;
    using Kernel = ck_tile::reboot::StreamKKernel<
        Partitioner, typename Types::AnyPipeline,
        typename Types::template Epilogue<Row::atomic ? Operation::atomic_add : Operation::set>>;

   public:
    // Partial tiles of C, and a flag for each block; how many there are depends on the GPU.
    static catalog_workspace workspace(const catalog_args& args) {
        if (Row::atomic || args.k == 0 || is_empty(args)) return {1, 0};
        return {1, static_cast<std::int64_t>(Kernel::GetWorkSpaceSize(arguments(args, 0)))};
    }

    static catalog_status run(const catalog_args& args, hipStream_t stream) {
        if (args.k == 0) return clear_all<Row>(args, stream);
        for (std::int64_t batch = 0; batch < args.batch; ++batch) {
            auto kernel_args = arguments(args, batch);
            if (!Kernel::IsSupportedArgument(kernel_args)) return CATALOG_BAD_ARGUMENT;
            if constexpr (Row::atomic) {
                if (!clear<Row>(args, batch, stream)) return CATALOG_DEVICE_ERROR;
            } else {
                const std::size_t bytes = Kernel::GetWorkSpaceSize(kernel_args);
                if (bytes > 0 && !args.c_acc.data) return CATALOG_BAD_ARGUMENT;
                if (bytes > 0 && !succeeded(hipMemsetAsync(args.c_acc.data, 0, bytes, stream)))
                    return CATALOG_DEVICE_ERROR;
                kernel_args.workspace_ptr = args.c_acc.data;
            }
            enqueue<Partitioned<Row>, Kernel>(stream, Kernel::GridSize(kernel_args.tile_partitioner), kernel_args);
        }
        return CATALOG_OK;
    }

   private:
    static auto arguments(const catalog_args& args, std::int64_t batch) {
        const auto size = [](std::int64_t extent) { return static_cast<ck_tile::index_t>(extent); };
        return Kernel::MakeKernelArgs(ck_tile::reboot::StreamKHostArgs(
            data_of<const typename Row::A>(args.a, batch), data_of<const typename Row::B>(args.b, batch),
            data_of<typename Row::C>(args.c, batch), size(args.m), size(args.n), size(args.k),
            size(args.a.stride_outer), size(args.b.stride_outer), size(args.c.stride_outer), strategy));
    }
};

}  // namespace catalog::ck
