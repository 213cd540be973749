// Launches of kernels, among them those that may start before the kernel before them in the stream ends (programmatic
// dependent launch): their blocks take the places that its last blocks leave, and prepare.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "block.hpp"

namespace catalog::cuda {

// When a kernel may start.
enum class Start {
    in_order,  // when all that the stream had before is done
    early,     // before: the kernel calls wait_for_last_kernel()
};

// At the start of a kernel that may start early, by each thread that reads or writes the device's memory, before it does:
// until the kernel before in the stream is over, and all that it has written can be read. Every block comes here, even one
// without work, so that a kernel never ends before those that it followed.
__device__ __forceinline__ void wait_for_last_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The kernel that follows in the stream may be launched once all blocks have called this or are over, if it starts early.
// Its blocks only take room that is left: a kernel need not be nearly done to call this.
__device__ __forceinline__ void let_next_kernel_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Both, in a kernel in the middle of a call.
__device__ __forceinline__ void follow_last_kernel() {
    let_next_kernel_start();
    wait_for_last_kernel();
}

class KernelLaunch {
   public:
    KernelLaunch(dim3 grid, int threads, int shared_bytes, cudaStream_t stream, Start start = Start::in_order) {
        config.gridDim = grid;
        config.blockDim = threads;
        config.dynamicSmemBytes = shared_bytes;
        config.stream = stream;
        if (start == Start::early) {
            cudaLaunchAttribute& early = add(cudaLaunchAttributeProgrammaticStreamSerialization);
            early.val.programmaticStreamSerializationAllowed = 1;
        }
    }

    // That number of blocks, neighbours along x, are a cluster.
    KernelLaunch& in_clusters(int blocks) {
        if (blocks > 1) add(cudaLaunchAttributeClusterDimension).val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
        return *this;
    }

    template <class... Parameters, class... Arguments>
    catalog_status run(void (*kernel)(Parameters...), Arguments&&... arguments) {
        config.attrs = attributes;
        const bool ran = cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...) == cudaSuccess;
        const catalog_status status = launched();
        return ran ? status : CATALOG_DEVICE_ERROR;
    }

   private:
    cudaLaunchAttribute& add(cudaLaunchAttributeID id) {
        cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
        attribute.id = id;
        return attribute;
    }

    cudaLaunchConfig_t config{};
    cudaLaunchAttribute attributes[2]{};
};

}  // namespace catalog::cuda
