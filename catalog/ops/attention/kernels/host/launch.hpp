// The entry points of a library, and how many threads a launch has.
#pragma once

#if defined(_OPENMP)
#include <omp.h>
#endif

#include <algorithm>

#include "abi/export.hpp"
#include "operation/workspace.hpp"

namespace catalog::host {

inline int threads_for([[maybe_unused]] const catalog_args& args) {
#if defined(_OPENMP)
    return args.num_threads > 0 ? args.num_threads : omp_get_max_threads();
#else
    return 1;
#endif
}

// A host kernel takes any number of splits.
inline std::int32_t workspace_size(const catalog_args* args, Uses uses, catalog_workspace* size) {
    if (const catalog_status status = check_abi(args); status != CATALOG_OK) return status;
    if (!size) return CATALOG_BAD_ARGUMENT;
    return dense_workspace(*args, uses, std::max<std::int64_t>(1, args->num_splits), *size);
}

}  // namespace catalog::host

// The last arguments are those of catalog::Uses.
#define CATALOG_EXPORT(launch, description, ...) \
    CATALOG_ENTRY_POINTS(description, catalog::host::workspace_size(args, {__VA_ARGS__}, size), launch(args))
