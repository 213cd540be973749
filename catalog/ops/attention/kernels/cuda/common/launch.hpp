// The entry points of a library.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "abi/export.hpp"
#include "operation/workspace.hpp"
#include "cuda/block.hpp"
#include "cuda/traits.hpp"

namespace catalog::cuda {

// A kernel takes any number of splits.
inline std::int32_t workspace_size(const catalog_args* args, Uses uses, catalog_workspace* size) {
    if (const catalog_status status = check_abi(args); status != CATALOG_OK) return status;
    if (!size) return CATALOG_BAD_ARGUMENT;
    return dense_workspace(*args, uses, std::max<std::int64_t>(1, args->num_splits), *size);
}

}  // namespace catalog::cuda

// `launch` takes the arguments and the stream, `workspace` the arguments, what is used, and the size to fill in; the
// last arguments are those of catalog::Uses.
#define CATALOG_EXPORT_SIZED(launch, workspace, description, ...)              \
    CATALOG_ENTRY_POINTS(description, workspace(args, {__VA_ARGS__}, size), \
                         launch(args, static_cast<cudaStream_t>(stream)))

#define CATALOG_EXPORT(launch, description, ...) \
    CATALOG_EXPORT_SIZED(launch, catalog::cuda::workspace_size, description, __VA_ARGS__)
