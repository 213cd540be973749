// A row of A times the columns of B: an element of C is a dot product.
#pragma once

#include <algorithm>

#include "host/epilogue.hpp"
#include "host/threads.hpp"

namespace catalog::gemv {

using namespace catalog::host;  // the checks of a call, and what follows the sums

struct Row {
    using otype = float;
    static constexpr int num_d = 0;
    static constexpr bool multiplies = false, grouped = false, in_tiles = false;
};

// A thread takes `columns` columns of B at a time, a multiple of the lanes of a vector.
template <int columns>
std::int32_t launch(const catalog_args* args) noexcept {
    if (const catalog_status status = check_call<Row>(args); status != CATALOG_OK) return status;
    const std::int64_t groups = (args->n + columns - 1) / columns;
    parallel_for(*args, threads_for(*args), args->batch * args->m * groups, [&](std::int64_t share) {
        const std::int64_t batch = share / groups / args->m, row = share / groups % args->m;
        const std::int64_t first = share % groups * columns;
        const float* a = data_of<const float>(args->a, batch) + row * args->a.stride_outer;
        const int count = static_cast<int>(std::min<std::int64_t>(columns, args->n - first));
        float sums[columns] = {};
        for (int j = 0; j < count; ++j) {
            const float* b = data_of<const float>(args->b, batch) + (first + j) * args->b.stride_outer;
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (std::int64_t k = 0; k < args->k; ++k) sum += a[k] * b[k];
            sums[j] = sum;
        }
        finish<Row>(*args, batch, sums, columns, row, first, 1, count);
    });
    return CATALOG_OK;
}

}  // namespace catalog::gemv
