// Backward attention, last stage: dQ in its type, from its sums in float32, in which of every 8 columns the even ones
// come first, unless its elements have 32 bits.
#pragma once

#include "bwd_rows.hpp"
#include "cuda/hopper.hpp"
#include "cuda/common/launch.hpp"

namespace catalog::cuda {

inline constexpr int convert_dq_rows = 4;

template <class Row, int lanes>
__global__ void __launch_bounds__(row_threads) convert_dq(const __grid_constant__ catalog_args args) {
    wait_for_last_kernel();
    using T = typename Row::dtype;
    const ThreadRows<Row, lanes, convert_dq_rows> rows(args);
#pragma unroll
    for (int piece = 0; piece < pieces_of(Row::hdim_q); ++piece) {
        const std::int64_t left = args.hdim_q - rows.element(piece);
        if (left <= 0) return;
        const int distance = rows.element(piece) - rows.element(0);
        float4 even[convert_dq_rows], odd[convert_dq_rows];  // or the first four, and the others
#pragma unroll
        for (int i = 0; i < convert_dq_rows; ++i) {
            if (!rows.has(i)) continue;
            const float* const sums = rows.template of<const float>(args.dq_acc, i) + distance;
            even[i] = __ldcs(reinterpret_cast<const float4*>(sums));
            if (sizeof(T) < 4 || left > 4) odd[i] = __ldcs(reinterpret_cast<const float4*>(sums) + 1);
        }
        // Streamed, so that the sums of other rows, which are read next, stay in the L2 cache.
#pragma unroll
        for (int i = 0; i < convert_dq_rows; ++i) {
            if (!rows.has(i)) continue;
            T* const dq = rows.template of<T>(args.dq, i) + distance;
            if constexpr (sizeof(T) == 4) {
                __stcs(reinterpret_cast<float4*>(dq), even[i]);
                if (left > 4) __stcs(reinterpret_cast<float4*>(dq) + 1, odd[i]);
            } else {
                __stcs(reinterpret_cast<uint4*>(dq),
                       make_uint4(pack<T>(even[i].x, odd[i].x), pack<T>(even[i].y, odd[i].y),
                                  pack<T>(even[i].z, odd[i].z), pack<T>(even[i].w, odd[i].w)));
            }
        }
    }
}

template <class Row>
inline std::int32_t launch_fmha_bwd_convert_dq(const catalog_args* args, cudaStream_t stream) noexcept {
    using T = typename Row::dtype;
    if (const catalog_status status = check_rows<Row>(args); status != CATALOG_OK) return status;
    if (!valid_hdim(args->hdim_q, Row::hdim_q, Row::pad_d, in_vector<Row>)) return CATALOG_BAD_ARGUMENT;
    if (!has_queries(*args)) return CATALOG_OK;
    const bool valid = args->num_splits == 1 && args->dq.data && args->dq_acc.data &&
                       has_aligned_rows<T>(*args, args->dq, args->nhead_q) &&
                       has_aligned_rows<float>(*args, args->dq_acc, args->nhead_q);
    if (!valid) return CATALOG_BAD_ARGUMENT;
    if (args->hdim_q <= 64) return launch_rows<8, convert_dq_rows>(*args, stream, convert_dq<Row, 8>, Start::early);
    if (args->hdim_q <= 128) return launch_rows<16, convert_dq_rows>(*args, stream, convert_dq<Row, 16>, Start::early);
    return launch_rows<32, convert_dq_rows>(*args, stream, convert_dq<Row, 32>, Start::early);
}

template <class Row>
inline constexpr Block block_of{row_threads, 0};

}  // namespace catalog::cuda
