// What a library of the catalog says about its blocks, and what became of a launch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "abi/status.h"

namespace catalog::cuda {

// What a kernel's blocks are: threads, and bytes of shared memory. A kernel header defines `block_of<Row>`.
struct Block {
    std::int32_t threads, shared_bytes;
};

// The error of a launch is not left behind for the next call.
inline catalog_status launched() { return cudaGetLastError() == cudaSuccess ? CATALOG_OK : CATALOG_DEVICE_ERROR; }

}  // namespace catalog::cuda

// Read from the library's file, for the registry.
#define CATALOG_EXPORT_BLOCK(block)                                                                              \
    extern "C" {                                                                                                 \
    extern __attribute__((visibility("default"))) const catalog::cuda::Block catalog_block;                      \
    const catalog::cuda::Block catalog_block = block;                                                            \
    }
