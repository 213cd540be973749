// The entry points of a library.
#pragma once

#include "check.hpp"

namespace catalog {

// Of kernels without workspaces.
inline std::int32_t no_workspace(const catalog_args* args, catalog_workspace* size) {
    if (const catalog_status status = check_abi(args); status != CATALOG_OK) return status;
    if (!size) return CATALOG_BAD_ARGUMENT;
    *size = {};
    size->num_splits = 1;
    return CATALOG_OK;
}

}  // namespace catalog

// `workspace` and `launch` are expressions that return a catalog_status: the first of `args` and `size`, the second of
// `args` and `stream`.
#define CATALOG_ENTRY_POINTS(description, workspace, launch)                                                    \
    extern "C" {                                                                                                \
    __attribute__((visibility("default"))) const char* catalog_describe(void) { return description; }           \
    __attribute__((visibility("default"))) int32_t catalog_workspace_size(const catalog_args* args,             \
                                                                          catalog_workspace* size) {            \
        return workspace;                                                                                       \
    }                                                                                                           \
    __attribute__((visibility("default"))) int32_t catalog_launch(const catalog_args* args,                     \
                                                                  [[maybe_unused]] void* stream) {              \
        return launch;                                                                                          \
    }                                                                                                           \
    }
