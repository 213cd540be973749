// Dropout: which weights are kept, for the keys of one call of Philox; see operation/philox.hpp for its random bytes.
#pragma once

#include <cmath>
#include <cstdint>

#include "abi/catalog_abi.h"
#include "operation/philox.hpp"

namespace catalog::cuda {

struct Dropout {
    const std::uint64_t* state;  // seed and offset; NULL: zeros
    std::uint32_t threshold;     // four times the largest byte of a weight that is kept
    float scale;                 // of weights that are kept; 0 if none is

    // The bytes of philox_keys keys from a multiple of it on. `head`: sequence * nhead_q + head.
    __device__ __forceinline__ Philox bytes(int head, int query, int key) const {
        const std::uint64_t seed = state ? __ldg(state) : 0, offset = state ? __ldg(state + 1) : 0;
        const Philox counter{static_cast<std::uint32_t>(key) / philox_keys, static_cast<std::uint32_t>(query),
                             static_cast<std::uint32_t>(head), static_cast<std::uint32_t>(offset)};
        return philox(counter, static_cast<std::uint32_t>(seed),
                      static_cast<std::uint32_t>(seed >> 32) ^ static_cast<std::uint32_t>(offset >> 32));
    }

    // Bit i: the weight of key + i is kept.
    __device__ __forceinline__ std::uint32_t kept(int head, int query, int key) const {
        const Philox drawn = bytes(head, query, key);
        std::uint32_t bits = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const std::uint32_t of_bytes = __vcmpleu4(drawn.word[i], threshold) & 0x01010101u;
            bits |= (of_bytes * 0x01020408u >> 24 & 15) << 4 * i;  // no sum carries
        }
        return bits;
    }

    // Writes the bytes to `target` for those of the keys that are before `end`.
    __device__ __forceinline__ void store(std::uint8_t* target, int head, int query, int key, int end) const {
        const Philox drawn = bytes(head, query, key);
#pragma unroll
        for (int i = 0; i < philox_keys; ++i)
            if (key + i < end) target[key + i] = static_cast<std::uint8_t>(drawn.word[i / 4] >> i % 4 * 8);
    }
};

// Weights that are dropped become 0: those of two rows, of which a lane has two of every eight keys, from `key` on. Of every
// four chunks of keys each lane of a quad draws one, for both rows. `kept(r, key)`: as Dropout::kept, of one of the rows.
template <int keys, class Kept>
__device__ __forceinline__ void drop_weights(float (&p)[keys / 2], int key, const Kept& kept) {
    constexpr int chunks = keys / philox_keys;
    const int lane = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int first = 0; first < chunks; first += 4) {
        const int drawn = key + (first + lane) * philox_keys;
        const std::uint32_t bits = kept(0, drawn) | kept(1, drawn) << 16;
#pragma unroll
        for (int chunk = first; chunk < chunks && chunk < first + 4; ++chunk) {
            const std::uint32_t mine = __shfl_sync(0xffffffffu, bits, chunk - first, 4) >> 2 * lane;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int bit = i / 4 * 8 + i % 2 + i / 2 % 2 * 16;
                p[8 * chunk + i] = mine >> bit & 1 ? p[8 * chunk + i] : 0.0f;
            }
        }
    }
}

__host__ __device__ __forceinline__ Dropout dropout_of(const catalog_args& args) {
    const float keep = 1.0f - args.p_drop;
    return {static_cast<const std::uint64_t*>(args.rng_state.data),
            static_cast<std::uint8_t>(floorf(keep * 255.0f)) * 0x01010101u, keep > 0 ? 1.0f / keep : 0.0f};
}

}  // namespace catalog::cuda
