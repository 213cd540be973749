// y = x / sqrt(mean(x^2) + eps) * w, row by row.
#include <cmath>
#include <cstdint>

#include "abi/export.hpp"
#include "host/threads.hpp"

namespace {

// The squares of a row are summed in `lanes` partial sums, which the compiler turns into vectors.
template <int lanes>
void normalise(const float* __restrict x, const float* __restrict w, float* __restrict y, std::int64_t columns, float eps) {
    float sums[lanes] = {};
    std::int64_t column = 0;
    for (; column + lanes <= columns; column += lanes)
        for (int lane = 0; lane < lanes; ++lane) sums[lane] += x[column + lane] * x[column + lane];
    float sum = 0;
    for (; column < columns; ++column) sum += x[column] * x[column];
    for (const float partial : sums) sum += partial;
    const float scale = 1 / std::sqrt(sum / static_cast<float>(columns) + eps);
    for (column = 0; column < columns; ++column) y[column] = x[column] * scale * w[column];
}

template <int lanes>
std::int32_t rmsnorm(const catalog_args* args) {
    if (const catalog_status status = catalog::check_abi(args); status != CATALOG_OK) return status;
    const auto x = static_cast<const float*>(args->x.data), w = static_cast<const float*>(args->w.data);
    const auto y = static_cast<float*>(args->y.data);
    catalog::host::parallel_for(*args, catalog::host::threads_for(*args), args->rows, [&](std::int64_t row) {
        normalise<lanes>(x + row * args->x.stride_row, w, y + row * args->y.stride_row, args->columns, args->eps);
    });
    return CATALOG_OK;
}

}  // namespace
