// A launch: its checks, and the matrices of one product of the batch.
#pragma once

#include <cstdint>

#include "abi/export.hpp"
#include "host/panels.hpp"

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

// Whether the sizes are possible, and the tensors that will be read or written are present.
template <class Row>
inline catalog_status check_call(const catalog_args* args) {
    if (const catalog_status status = check_abi(args); status != CATALOG_OK) return status;
    if (args->batch < 0 || args->m < 0 || args->n < 0 || args->k < 0) return CATALOG_BAD_ARGUMENT;
    if (args->activation < CATALOG_PASS_THROUGH || args->activation > CATALOG_SILU) return CATALOG_BAD_ARGUMENT;
    if (args->batch == 0 || args->m == 0 || args->n == 0) return CATALOG_OK;
    const bool missing = !args->c.data || (Row::num_d > 0 && !args->d0.data) || (Row::num_d > 1 && !args->d1.data);
    return missing || (args->k > 0 && !(args->a.data && args->b.data)) ? CATALOG_BAD_ARGUMENT : CATALOG_OK;
}

}  // namespace catalog::host
