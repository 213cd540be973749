// A launch: its checks, the matrices of one product of the batch, and C before a kernel adds to it.
#pragma once

#include <cstdint>
#include <exception>
#include <limits>

#include <hip/hip_runtime.h>

#include "abi/check.hpp"

namespace catalog::ck {

inline bool succeeded(hipError_t error) { return error == hipSuccess; }

inline std::int64_t divide_up(std::int64_t length, std::int64_t part) { return (length + part - 1) / part; }

// A product of the batch.
template <class T>
inline T* data_of(const catalog_tensor& tensor, std::int64_t batch) {
    return static_cast<T*>(tensor.data) + batch * tensor.stride_batch;
}

// Whether CK's offsets, in bytes and of 32 bits, reach all of a matrix of `outer` x `inner` elements.
template <class T>
inline bool reaches(const catalog_tensor& tensor, std::int64_t outer, std::int64_t inner) {
    if (outer == 0 || inner == 0) return true;
    constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max() / std::int64_t{sizeof(T)};
    return tensor.data && tensor.stride_outer >= inner && tensor.stride_outer <= most && outer <= most &&
           (outer - 1) * tensor.stride_outer + inner <= most;
}

inline bool is_empty(const catalog_args& args) { return args.batch == 0 || args.m == 0 || args.n == 0; }

// Whether the row computes the call: CK's kernels have no factors, bias or activation.
template <class Row>
inline catalog_status check_call(const catalog_args* args) {
    if (const catalog_status status = check_abi(args); status != CATALOG_OK) return status;
    if (args->batch < 0 || args->m < 0 || args->n < 0 || args->k < 0) return CATALOG_BAD_ARGUMENT;
    if (Row::grouped != (args->starts != nullptr)) return CATALOG_BAD_ARGUMENT;
    if (is_empty(*args)) return CATALOG_OK;
    const bool plain = args->alpha == 1 && args->beta == 0 && !args->bias.data && args->activation == 0 &&
                       args->group_axis == CATALOG_GROUPS_OF_M;
    const bool rows_a = Row::rows_a, rows_b = Row::rows_b;
    const bool fits =
        reaches<typename Row::A>(args->a, rows_a ? args->m : args->k, rows_a ? args->k : args->m) &&
        reaches<typename Row::B>(args->b, rows_b ? args->k : args->n, rows_b ? args->n : args->k) &&
        reaches<typename Row::C>(args->c, args->m, args->n) &&
        (Row::num_d < 1 || reaches<typename Row::C>(args->d0, args->m, args->n)) &&
        (Row::num_d < 2 || reaches<typename Row::C>(args->d1, args->m, args->n));
    // Without a depth, there is nothing for D tensors to be combined with.
    return plain && fits && (args->k > 0 || Row::num_d == 0) ? CATALOG_OK : CATALOG_BAD_ARGUMENT;
}

// Zeros for C of one product.
template <class Row>
inline bool clear(const catalog_args& args, std::int64_t batch, hipStream_t stream) {
    using T = typename Row::C;
    return succeeded(hipMemset2DAsync(data_of<T>(args.c, batch), args.c.stride_outer * sizeof(T), 0,
                                      args.n * sizeof(T), args.m, stream));
}

template <class Row>
inline catalog_status clear_all(const catalog_args& args, hipStream_t stream) {
    for (std::int64_t batch = 0; batch < args.batch; ++batch)
        if (!clear<Row>(args, batch, stream)) return CATALOG_DEVICE_ERROR;
    return CATALOG_OK;
}

// Launches a kernel with `tiles` blocks, or if it is persistent with the blocks that fit on the GPU at once. CK asks how
// many these are of another kernel with the same body, which would have to be compiled as well.
template <class Row, class Kernel, class... Args>
inline void enqueue(hipStream_t stream, dim3 tiles, const Args&... args) {
    constexpr auto kernel = Headers::entry<Kernel, Row::block_per_cu, Args...>;
    const dim3 block = Kernel::BlockSize();
    if (Row::persistent) {
        int per_unit = 0;
        ck_tile::hip_check_error(hipOccupancyMaxActiveBlocksPerMultiprocessor(&per_unit, kernel, block.x, 0));
        tiles = dim3{};
        tiles.x = ck_tile::get_available_compute_units(ck_tile::stream_config{stream}) * per_unit;
    }
    hipLaunchKernelGGL(kernel, tiles, block, 0, stream, args...);
}

template <class Family>
inline std::int32_t workspace_size(const catalog_args* args, catalog_workspace* size) noexcept {
    if (const catalog_status status = check_abi(args); status != CATALOG_OK) return status;
    if (!size || args->batch < 0 || args->m < 0 || args->n < 0 || args->k < 0) return CATALOG_BAD_ARGUMENT;
    try {
        *size = Family::workspace(*args);
    } catch (const std::exception&) {
        return CATALOG_DEVICE_ERROR;
    }
    return CATALOG_OK;
}

template <class Row, class Family>
inline std::int32_t launch(const catalog_args* args, void* queue) noexcept {
    if (const catalog_status status = check_call<Row>(args); status != CATALOG_OK) return status;
    if (is_empty(*args)) return CATALOG_OK;
    const auto stream = static_cast<hipStream_t>(queue);
    try {
        if (const catalog_status status = Family::run(*args, stream); status != CATALOG_OK) return status;
    } catch (const std::exception&) {
        return CATALOG_DEVICE_ERROR;
    }
    return succeeded(hipGetLastError()) ? CATALOG_OK : CATALOG_DEVICE_ERROR;
}

}  // namespace catalog::ck
