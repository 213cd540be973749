// Backward attention, last stage: dQ is the sum of the parts that the splits of the keys gave, in their order.
#pragma once

#include "bwd_rows.hpp"
#include "hopper.hpp"
#include "launch.hpp"

namespace catalog::cuda {

template <class Row, int lanes>
__global__ void __launch_bounds__(row_threads) convert_dq(const __grid_constant__ catalog_args args) {
    using T = typename Row::dtype;
    const ThreadRows<Row, lanes> rows(args);
    if (rows.lane * 8 >= args.hdim_q) return;
    float sum[rows_in_flight][8] = {};
    for (int split = 0; split < args.num_splits; ++split) {
#pragma unroll
        for (int i = 0; i < rows_in_flight; ++i) {
            if (!rows.has(i)) continue;
            const auto* const part =
                reinterpret_cast<const float4*>(rows.template of<const float>(args.dq_acc, i, split));
            const float4 low = __ldcs(part), high = __ldcs(part + 1);
            sum[i][0] += low.x, sum[i][1] += low.y, sum[i][2] += low.z, sum[i][3] += low.w;
            sum[i][4] += high.x, sum[i][5] += high.y, sum[i][6] += high.z, sum[i][7] += high.w;
        }
    }
#pragma unroll
    for (int i = 0; i < rows_in_flight; ++i)
        if (rows.has(i))
            *reinterpret_cast<uint4*>(rows.template of<T>(args.dq, i)) =
                make_uint4(pack<T>(sum[i][0], sum[i][1]), pack<T>(sum[i][2], sum[i][3]),
                           pack<T>(sum[i][4], sum[i][5]), pack<T>(sum[i][6], sum[i][7]));
}

template <class Row>
inline std::int32_t launch_fmha_bwd_convert_dq(const catalog_args* args, cudaStream_t stream) noexcept {
    using T = typename Row::dtype;
    static_assert(Row::hdim_q <= 256, "a row belongs to one warp");
    if (const catalog_status status = check_rows<Row>(args); status != CATALOG_OK) return status;
    if (!valid_hdim(args->hdim_q, Row::hdim_q, Row::pad_d)) return CATALOG_BAD_ARGUMENT;
    if (!has_queries(*args)) return CATALOG_OK;
    const bool valid = args->dq.data && args->dq_acc.data && has_aligned_rows<T>(*args, args->dq, args->nhead_q) &&
                       has_aligned_rows<float>(*args, args->dq_acc, args->nhead_q);
    if (!valid) return CATALOG_BAD_ARGUMENT;
    if (args->hdim_q <= 64) return launch_rows<8>(*args, stream, convert_dq<Row, 8>);
    if (args->hdim_q <= 128) return launch_rows<16>(*args, stream, convert_dq<Row, 16>);
    return launch_rows<32>(*args, stream, convert_dq<Row, 32>);
}

template <class Row>
inline constexpr Block block_of{row_threads, 0};

}  // namespace catalog::cuda
