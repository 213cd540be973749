// The first check of every launch, on every target.
#pragma once

#include "catalog_abi.h"

namespace catalog {

// Only then may the struct be read.
inline catalog_status check_abi(const catalog_args* args) {
    if (!args) return CATALOG_BAD_ARGUMENT;
    if (args->struct_bytes != sizeof(catalog_args) || args->abi_version != CATALOG_ABI_VERSION)
        return CATALOG_ABI_MISMATCH;
    return CATALOG_OK;
}

}  // namespace catalog
