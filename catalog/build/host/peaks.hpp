// The peak rates of this CPU: multiply-adds in registers, and sequential reads of memory. Exports C functions, so only
// one translation unit may include this.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <vector>

#include "../abi/status.h"
#include "threads.hpp"
#include "vector.hpp"

namespace catalog::host {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

// Makes the compiler assume that the value is used.
inline void use(float value) { asm volatile("" : : "m"(value)); }

// Independent sums: enough to hide the latency of all units, few enough for the registers.
#if defined(__AVX512F__) || defined(__aarch64__)
inline constexpr int sums = 24;
#else
inline constexpr int sums = 12;
#endif

// Every sum adds its neighbour times `factor`: one instruction on every target, and never the same product.
inline float multiply_adds(int rounds, float factor) {
    const Float factors = splat(factor);
    Float sum[sums];
#pragma GCC unroll 24
    for (int i = 0; i < sums; ++i) sum[i] = splat(static_cast<float>(i + 1));
    for (int round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
        for (int i = 0; i < sums; ++i) sum[i] += sum[(i + 1) % sums] * factors;
    }
#pragma GCC unroll 24
    for (int i = 1; i < sums; ++i) sum[0] += sum[i];
    return reduce_sum(sum[0]);
}

// Calls body(thread) for every thread at once. A call takes so long that each is on a thread of its own.
template <class Body>
inline void run_on_all(int threads, Body body) {
    struct {
        catalog_pool* pool;
    } const args{&own_pool};
    parallel_for(args, threads, threads, [&](std::int64_t thread) { body(static_cast<int>(thread)); });
}

// FLOP/s of one thread: the median over a tenth of a second, in blocks so short that few are interrupted. There are
// enough of them that the first and the last, when other threads of the core may be idle, do not matter.
inline double thread_flops() {
    constexpr int blocks = 512, rounds = 1 << 16;
    volatile float factor = 1e-9F;  // keeps the compiler from knowing the sums; no overflow, no denormals
    std::array<double, blocks> rates;
    for (double& rate : rates) {
        const auto start = Clock::now();
        use(multiply_adds(rounds, factor));
        rate = 2.0 * lanes * sums * rounds / seconds_since(start);
    }
    std::nth_element(rates.begin(), rates.begin() + blocks / 2, rates.end());
    return rates[blocks / 2];
}

// FLOP/s of this number of threads together.
inline double peak_flops(int threads) {
    std::vector<double> flops(threads);
    run_on_all(threads, [&](int thread) { flops[thread] = thread_flops(); });
    return std::accumulate(flops.begin(), flops.end(), 0.0);
}

inline float sum_of(const float* from, std::int64_t count) {
    constexpr int unroll = 8;
    Float partial[unroll] = {};
    for (std::int64_t index = 0; index < count; index += unroll * lanes) {
#pragma GCC unroll 8
        for (int i = 0; i < unroll; ++i) partial[i] += load_bits<Float>(from + index + i * lanes);
    }
    for (int i = 1; i < unroll; ++i) partial[0] += partial[i];
    return reduce_sum(partial[0]);
}

// Bytes/s read by this number of threads, each from its own share of a buffer, which must be far larger than the caches
// for the bytes to come from memory. The best of many passes counts, because other load on the machine can only slow
// them down. 0: out of memory.
inline double peak_bandwidth(int threads, std::int64_t buffer_bytes) {
    constexpr double budget_seconds = 0.3;
    constexpr std::int64_t page_bytes = 2 << 20;
    const std::int64_t share_bytes = (buffer_bytes / threads + page_bytes - 1) / page_bytes * page_bytes;
    const std::int64_t share = share_bytes / static_cast<std::int64_t>(sizeof(float));
    const auto bytes = static_cast<std::size_t>(share_bytes * threads);
    const std::unique_ptr<float, void (*)(void*)> memory(static_cast<float*>(std::aligned_alloc(page_bytes, bytes)),
                                                         std::free);
    float* const buffer = memory.get();
    if (!buffer) return 0;
#if defined(MADV_HUGEPAGE)
    madvise(buffer, bytes, MADV_HUGEPAGE);  // as NumPy does for its arrays
#endif
    // Each thread writes its share first, to place it near its core. Not zeros: the system would not allocate them.
    run_on_all(threads, [&](int thread) { std::fill_n(buffer + thread * share, share, 1.0F); });

    double best = 0;
    for (const auto start = Clock::now(); seconds_since(start) < budget_seconds;) {
        const auto pass = Clock::now();
        run_on_all(threads, [&](int thread) { use(sum_of(buffer + thread * share, share)); });
        best = std::max(best, static_cast<double>(bytes) / seconds_since(pass));
    }
    return best;
}

}  // namespace catalog::host

extern "C" {

// FLOP/s of fp32 multiply-adds, each counted as two. Returns a catalog_status, as does the next function.
__attribute__((visibility("default"))) int32_t catalog_peak_flops(int32_t threads, double* rate) {
    if (threads < 1) return CATALOG_BAD_ARGUMENT;
    *rate = catalog::host::peak_flops(threads);
    return CATALOG_OK;
}

// Bytes/s read from a buffer of this size.
__attribute__((visibility("default"))) int32_t catalog_peak_bandwidth(int32_t threads, int64_t bytes, double* rate) {
    if (threads < 1 || bytes < 1) return CATALOG_BAD_ARGUMENT;
    *rate = catalog::host::peak_bandwidth(threads, bytes);
    return *rate > 0 ? CATALOG_OK : CATALOG_NO_MEMORY;
}
}
