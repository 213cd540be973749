// Backward attention, first stage: delta of a query row is the sum of dO * O over its head dim, less the gradient of LSE.
//
// dS = P * (dP - sum of dO * O) is what O gives; LSE adds P * dLSE, because P is its derivative by S.
#pragma once

#include "bwd_rows.hpp"
#include "cuda/common/launch.hpp"

namespace catalog::cuda {

// Rows that a thread reads at a time: more of them leave room for fewer threads.
inline constexpr int dot_do_o_rows = 1;

template <class Row, int lanes>
__global__ void __launch_bounds__(row_threads) dot_do_o(const __grid_constant__ catalog_args args) {
    let_next_kernel_start();
    using T = typename Row::otype;
    const ThreadRows<Row, lanes, dot_do_o_rows> rows(args);
    constexpr int pieces = pieces_of(Row::hdim_v);
    Eight<T> grad_o[dot_do_o_rows][pieces], o[dot_do_o_rows][pieces];
#pragma unroll
    for (int i = 0; i < dot_do_o_rows; ++i)
#pragma unroll
        for (int piece = 0; piece < pieces; ++piece) {
            grad_o[i][piece].bits = o[i][piece].bits = EightBits<T>{};
            if (!rows.has(i) || rows.element(piece) >= args.hdim_v) continue;
            const int distance = rows.element(piece) - rows.element(0);
            const std::int64_t left = args.hdim_v - rows.element(piece);
            grad_o[i][piece].bits = load_eight(rows.template of<const T>(args.grad_o, i) + distance, left);
            o[i][piece].bits = load_eight(rows.template of<const T>(args.o, i) + distance, left);
        }
#pragma unroll
    for (int i = 0; i < dot_do_o_rows; ++i) {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < 8 * pieces; ++j)
            sum += static_cast<float>(grad_o[i][j / 8].element[j % 8]) * static_cast<float>(o[i][j / 8].element[j % 8]);
#pragma unroll
        for (int distance = lanes / 2; distance > 0; distance /= 2)
            sum += __shfl_xor_sync(~0u, sum, distance);
        if (rows.lane != 0 || !rows.has(i)) continue;
        // The LSE of a row that sees no key is constant: what its gradient says must not reach the keys.
        if (args.dlse.data && *rows.template of<const float>(args.lse, i) != -infinity())
            sum -= *rows.template of<const float>(args.dlse, i);
        *rows.template of<float>(args.delta, i) = sum;
    }
}

template <class Row>
inline std::int32_t launch_fmha_bwd_dot_do_o(const catalog_args* args, cudaStream_t stream) noexcept {
    using T = typename Row::otype;
    if (const catalog_status status = check_rows<Row>(args); status != CATALOG_OK) return status;
    if (!valid_hdim(args->hdim_v, Row::hdim_v, Row::pad_dv, 16 / sizeof(T))) return CATALOG_BAD_ARGUMENT;
    if (!has_queries(*args)) return CATALOG_OK;
    const bool valid = args->grad_o.data && args->o.data && args->delta.data &&
                       (args->lse.data || !args->dlse.data) &&
                       has_aligned_rows<T>(*args, args->grad_o, args->nhead_q) &&
                       has_aligned_rows<T>(*args, args->o, args->nhead_q);
    if (!valid) return CATALOG_BAD_ARGUMENT;
    if (args->hdim_v <= 64) return launch_rows<8, dot_do_o_rows>(*args, stream, dot_do_o<Row, 8>, Start::in_order);
    if (args->hdim_v <= 128) return launch_rows<16, dot_do_o_rows>(*args, stream, dot_do_o<Row, 16>, Start::in_order);
    return launch_rows<32, dot_do_o_rows>(*args, stream, dot_do_o<Row, 32>, Start::in_order);
}

template <class Row>
inline constexpr Block block_of{row_threads, 0};

}  // namespace catalog::cuda
