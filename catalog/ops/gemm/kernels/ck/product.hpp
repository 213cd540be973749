// Products, with D tensors or without: a launch for each one of a batch.
#pragma once

#include <array>

#include "call.hpp"
#include "instance.hpp"

namespace catalog::ck {

template <class Row>
class Family {
    using Types = Instance<Row>;
    using Operation = ck_tile::memory_operation_enum;

    // Parts of K, whose products are added to C atomically: whole tiles, equally many in each part.
    static bool divides(const catalog_args& args, std::int64_t splits) {
        return splits == 1 || (Row::num_d == 0 && args.k % (splits * Row::tile_k) == 0);
    }

   public:
    static catalog_workspace workspace(const catalog_args& args) {
        std::int64_t splits = std::max<std::int64_t>(args.num_splits, 1);
        while (!divides(args, splits)) --splits;
        return {splits, 0};
    }

    static catalog_status run(const catalog_args& args, hipStream_t stream) {
        if (args.k == 0) return clear_all<Row>(args, stream);
        const std::int64_t splits = std::max<std::int64_t>(args.num_splits, 1);
        if (!divides(args, splits)) return CATALOG_BAD_ARGUMENT;
        const auto loops = static_cast<ck_tile::index_t>(divide_up(args.k, splits * Row::tile_k));
        catalog_status status = CATALOG_OK;
        const auto multiply = [&](auto hot_loop, auto tail) {
            using Pipeline = typename Types::template Pipeline<hot_loop.value, tail.value>;
            if (splits == 1)
                status = multiply_all<Pipeline, Operation::set>(args, splits, stream);
            else if constexpr (Row::num_d == 0)
                status = multiply_all<Pipeline, Operation::atomic_add>(args, splits, stream);
        };
        Types::Loop::TailHandler(multiply, Types::Loop::BlockHasHotloop(loops),
                                 Types::Loop::GetBlockLoopTailNum(loops));
        return status;
    }

   private:
    template <class Pipeline, Operation operation>
    static catalog_status multiply_all(const catalog_args& args, std::int64_t splits, hipStream_t stream) {
        using Epilogue = typename Types::template Epilogue<operation>;
        using Partitioner = typename Types::Partitioner;
        using Kernel = std::conditional_t<Row::num_d == 0, ck_tile::GemmKernel<Partitioner, Pipeline, Epilogue>,
                                          ck_tile::GemmKernelMultiD<Partitioner, Pipeline, Epilogue>>;
        const auto parts = static_cast<ck_tile::index_t>(splits);
        for (std::int64_t batch = 0; batch < args.batch; ++batch) {
            if (operation == Operation::atomic_add && !clear<Row>(args, batch, stream)) return CATALOG_DEVICE_ERROR;
            const auto kernel_args = Kernel::MakeKernelArgs(arguments(args, batch, parts));
            if (!Kernel::IsSupportedArgument(kernel_args)) return CATALOG_BAD_ARGUMENT;
            enqueue<Row, Kernel>(stream, Kernel::GridSize(kernel_args.M, kernel_args.N, parts), kernel_args);
        }
        return CATALOG_OK;
    }

    static auto arguments(const catalog_args& args, std::int64_t batch, ck_tile::index_t splits) {
        const auto size = [](std::int64_t extent) { return static_cast<ck_tile::index_t>(extent); };
        const void* const a = data_of<const typename Row::A>(args.a, batch);
        const void* const b = data_of<const typename Row::B>(args.b, batch);
        void* const c = data_of<typename Row::C>(args.c, batch);
        const ck_tile::index_t m = size(args.m), n = size(args.n), k = size(args.k);
        const ck_tile::index_t stride_a = size(args.a.stride_outer), stride_b = size(args.b.stride_outer);
        const ck_tile::index_t stride_c = size(args.c.stride_outer);
        if constexpr (Row::num_d == 0) {
            return ck_tile::GemmHostArgs(a, b, c, splits, m, n, k, stride_a, stride_b, stride_c);
        } else {
            const catalog_tensor* const all[] = {&args.d0, &args.d1};
            std::array<const void*, Row::num_d> ds;
            std::array<ck_tile::index_t, Row::num_d> strides;
            for (int i = 0; i < Row::num_d; ++i) {
                ds[i] = data_of<const typename Row::C>(*all[i], batch);
                strides[i] = size(all[i]->stride_outer);
            }
            return ck_tile::GemmMultiDHostArgs<Row::num_d>(a, b, ds, c, splits, m, n, k, stride_a, stride_b, strides,
                                                           stride_c);
        }
    }
};

}  // namespace catalog::ck
