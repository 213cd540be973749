// The random bytes of dropout: Philox 4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC11), the
// same on every target.
//
// The byte of a weight depends only on its place and the state, never on tiles or threads. For sequence b, query head
// h, query i and key j it is byte j % 16 of the four little-endian words of
//
//     Philox(counter = {j / 16, i, b * nhead_q + h, low word of offset},
//            key     = {low word of seed, high word of seed ^ high word of offset})
//
// and the weight is kept if the byte is at most floor(255 (1 - p)), as in CK Tile; if p is 1, none is kept.
#pragma once

#include <cstdint>

namespace catalog {

inline constexpr int philox_keys = 16;  // of one call

struct Philox {
    std::uint32_t word[4];
};

constexpr Philox philox(Philox counter, std::uint32_t key0, std::uint32_t key1) {
    auto& [c0, c1, c2, c3] = counter.word;
#ifndef __CUDACC__  // which unrolls it anyway
#pragma GCC unroll 10
#endif
    for (int round = 0; round < 10; ++round, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {
        const std::uint64_t a = std::uint64_t{0xD2511F53u} * c0, b = std::uint64_t{0xCD9E8D57u} * c2;
        c0 = static_cast<std::uint32_t>(b >> 32) ^ c1 ^ key0;
        c2 = static_cast<std::uint32_t>(a >> 32) ^ c3 ^ key1;
        c1 = static_cast<std::uint32_t>(b);
        c3 = static_cast<std::uint32_t>(a);
    }
    return counter;
}

}  // namespace catalog
