// The entry points of a library.
#pragma once

#include <algorithm>

#include "abi/export.hpp"
#include "host/threads.hpp"
#include "operation/workspace.hpp"

namespace catalog::host {

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
