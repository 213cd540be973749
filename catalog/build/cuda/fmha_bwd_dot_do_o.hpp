// Backward attention, first stage: delta of a query row is the sum of dO * O over its head dim.
#pragma once

#include "bwd_rows.hpp"
#include "launch.hpp"

namespace catalog::cuda {

template <class Row>
__global__ void __launch_bounds__(row_threads) dot_do_o(const __grid_constant__ catalog_args args) {
    using T = typename Row::otype;
    using Lanes = RowLanes<Row::hdim_v>;
    Sequence sequence;
    find_queries<Row>(args, blockIdx.z, sequence);
    const int head = blockIdx.y, lane = threadIdx.x % Lanes::lanes;
    const int first = blockIdx.x * Lanes::rows * rows_in_flight + threadIdx.x / Lanes::lanes;
    Eight<T> grad_o[rows_in_flight], o[rows_in_flight];
#pragma unroll
    for (int i = 0; i < rows_in_flight; ++i) {
        const int query = first + i * Lanes::rows;
        grad_o[i].bits = o[i].bits = make_uint4(0, 0, 0, 0);
        if (query >= sequence.seqlen_q || lane * 8 >= args.hdim_v) continue;
        const std::int64_t token = sequence.first_q + query;
        const T* const grad_o_row =
            static_cast<const T*>(args.grad_o.data) + offset_of(args.grad_o, sequence.batch, head, token);
        const T* const o_row = static_cast<const T*>(args.o.data) + offset_of(args.o, sequence.batch, head, token);
        grad_o[i].bits = __ldg(reinterpret_cast<const uint4*>(grad_o_row) + lane);
        o[i].bits = __ldg(reinterpret_cast<const uint4*>(o_row) + lane);
    }
#pragma unroll
    for (int i = 0; i < rows_in_flight; ++i) {
        const int query = first + i * Lanes::rows;
        float sum = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j)
            sum += static_cast<float>(grad_o[i].element[j]) * static_cast<float>(o[i].element[j]);
#pragma unroll
        for (int distance = Lanes::lanes / 2; distance > 0; distance /= 2)
            sum += __shfl_xor_sync(~0u, sum, distance);
        if (lane == 0 && query < sequence.seqlen_q)
            static_cast<float*>(
                args.delta.data)[offset_of(args.delta, sequence.batch, head, sequence.first_q + query)] = sum;
    }
}

template <class Row>
inline std::int32_t launch_fmha_bwd_dot_do_o(const catalog_args* args, cudaStream_t stream) noexcept {
    using T = typename Row::otype;
    if (const catalog_status status = check_rows<Row>(args); status != CATALOG_OK) return status;
    if (!valid_hdim(args->hdim_v, Row::hdim_v, Row::pad_dv)) return CATALOG_BAD_ARGUMENT;
    if (!has_rows(*args)) return CATALOG_OK;
    const bool valid = args->grad_o.data && args->o.data && args->delta.data && has_aligned_rows<T>(args->grad_o) &&
                       has_aligned_rows<T>(args->o);
    return valid ? launch_rows<Row::hdim_v>(*args, stream, dot_do_o<Row>) : CATALOG_BAD_ARGUMENT;
}

template <class Row>
inline constexpr Block block_of{row_threads, 0};

}  // namespace catalog::cuda
