// y = x / sqrt(mean(x^2) + eps) * gain of each row.
#pragma once

#include <cmath>
#include <cstdint>

#include "abi/export.hpp"

namespace rmsnorm {

template <int lanes>
std::int32_t launch(const catalog_args* args) {
    if (const catalog_status status = catalog::check_abi(args); status != CATALOG_OK) return status;
    if (args->rows < 0 || args->columns < 1) return CATALOG_BAD_ARGUMENT;
    const auto* gain = static_cast<const float*>(args->gain.data);
#pragma omp parallel for num_threads(args->num_threads > 0 ? args->num_threads : 1)
    for (std::int64_t row = 0; row < args->rows; ++row) {
        const auto* x = static_cast<const float*>(args->x.data) + row * args->x.stride_row;
        auto* y = static_cast<float*>(args->y.data) + row * args->y.stride_row;
        float sums[lanes] = {}, sum = 0;
        for (std::int64_t column = 0; column < args->columns; ++column) {
            const float value = x[column];
            sums[column % lanes] += value * value;
        }
        for (const float one : sums) sum += one;
        const float scale = 1 / std::sqrt(sum / static_cast<float>(args->columns) + args->eps);
        for (std::int64_t column = 0; column < args->columns; ++column)
            y[column] = x[column] * scale * gain[column];
    }
    return CATALOG_OK;
}

}  // namespace rmsnorm
