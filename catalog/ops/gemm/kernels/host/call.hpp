// A launch: its checks, and the matrices of one product of the batch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "abi/export.hpp"
#include "host/panels.hpp"
#include "scales.hpp"

namespace catalog::host {

template <class T>
inline T* data_of(const catalog_tensor& tensor, std::int64_t batch) {
    return static_cast<T*>(tensor.data) + batch * tensor.stride_batch;
}

// The rows and columns of a factor, and their depth, as `along` of Factor has them.
template <bool along, class T>
inline Factor<along, T> factor_of(const catalog_tensor& tensor, std::int64_t batch) {
    return {data_of<const T>(tensor, batch), tensor.stride_outer};
}

// Multiplications of a product.
inline double work_of(const catalog_args& args) {
    return static_cast<double>(args.m) * static_cast<double>(args.n) * static_cast<double>(args.k);
}

// Multiplications up to which threads pack what they multiply themselves.
inline constexpr double small_product = 1 << 27;

// Units of a thread's room that are kept from launch to launch; room for more is freed.
inline constexpr std::size_t kept_units = 8 << 20;

// The columns of a share where rows of B are contiguous, at most `most`: each thread has as many shares. The fewer threads,
// the longer the pieces in which rows are read.
inline std::int64_t width_of_shares(std::int64_t columns, std::int64_t most, int threads) {
    constexpr std::int64_t least = 256, whole = 128;  // a block of scales, and whole strips
    const std::int64_t fewest = (columns + most - 1) / most, for_threads = (fewest + threads - 1) / threads * threads;
    const std::int64_t shares = std::min(for_threads, (columns + least - 1) / least);
    return std::min((columns + shares * whole - 1) / (shares * whole) * whole, most);
}

// Whether there are groups for a kernel of groups, and only there, and they fill their axis.
template <class Row>
inline catalog_status check_groups(const catalog_args& args) {
    if (Row::grouped != (args.starts != nullptr)) return CATALOG_BAD_ARGUMENT;
    if (!Row::grouped) return CATALOG_OK;
    if (args.group_axis < CATALOG_GROUPS_OF_M || args.group_axis > CATALOG_GROUPS_OF_K) return CATALOG_BAD_ARGUMENT;
    if (scales_of<Row> == Scales::block && args.group_axis != CATALOG_GROUPS_OF_M) return CATALOG_BAD_ARGUMENT;
    const std::int64_t extent = args.group_axis == CATALOG_GROUPS_OF_M ? args.m : args.k;
    if (args.starts[0] != 0 || args.starts[args.batch] != extent) return CATALOG_BAD_ARGUMENT;
    for (std::int64_t i = 0; i < args.batch; ++i)
        if (args.starts[i] > args.starts[i + 1]) return CATALOG_BAD_ARGUMENT;
    return CATALOG_OK;
}

// Whether the sizes are possible, and the tensors that will be read or written are present.
template <class Row>
inline catalog_status check_call(const catalog_args* args) {
    if (const catalog_status status = check_abi(args); status != CATALOG_OK) return status;
    if (args->batch < 0 || args->m < 0 || args->n < 0 || args->k < 0) return CATALOG_BAD_ARGUMENT;
    if (args->activation < CATALOG_PASS_THROUGH || args->activation > CATALOG_SILU) return CATALOG_BAD_ARGUMENT;
    if (const catalog_status status = check_groups<Row>(*args); status != CATALOG_OK) return status;
    if (args->batch == 0 || args->m == 0 || args->n == 0) return CATALOG_OK;
    const bool missing = !args->c.data || (Row::num_d > 0 && !args->d0.data) || (Row::num_d > 1 && !args->d1.data);
    if (!check_scales<Row>(*args)) return CATALOG_BAD_ARGUMENT;
    return missing || (args->k > 0 && !(args->a.data && args->b.data)) ? CATALOG_BAD_ARGUMENT : CATALOG_OK;
}

}  // namespace catalog::host
