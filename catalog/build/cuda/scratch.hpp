// Memory that a launch uses for itself, from a pool that keeps what it has: an allocation in a stream costs little.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "abi/status.h"

namespace catalog::cuda {

// Where allocations come from: a pool of the library's for each of the first devices, else the device's own.
inline cudaMemPool_t scratch_pool(int device) {
    constexpr int most_devices = 16;
    struct Pools {
        cudaMemPool_t of[most_devices];

        Pools() : of{} {
            int count = 0;
            if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
            for (int i = 0; i < count && i < most_devices; ++i) {
                cudaMemPoolProps properties{};
                properties.allocType = cudaMemAllocationTypePinned;
                properties.location = {cudaMemLocationTypeDevice, i};
                std::uint64_t kept = std::uint64_t{1} << 28;  // bytes
                if (cudaMemPoolCreate(&of[i], &properties) == cudaSuccess)
                    cudaMemPoolSetAttribute(of[i], cudaMemPoolAttrReleaseThreshold, &kept);
                else
                    of[i] = nullptr;
            }
        }
    };
    static const Pools pools;
    if (device < most_devices && pools.of[device]) return pools.of[device];
    cudaMemPool_t pool = nullptr;
    return cudaDeviceGetDefaultMemPool(&pool, device) == cudaSuccess ? pool : nullptr;
}

// Lives until the stream has done what is queued before the destructor.
class Scratch {
   public:
    void* data = nullptr;

    Scratch(std::int64_t bytes, int device, cudaStream_t stream) : stream(stream) {
        if (bytes > 0 && cudaMallocFromPoolAsync(&data, static_cast<std::size_t>(bytes), scratch_pool(device),
                                                 stream) != cudaSuccess)
            data = nullptr;
    }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() {
        if (data) cudaFreeAsync(data, stream);
    }

   private:
    cudaStream_t stream;
};

}  // namespace catalog::cuda
