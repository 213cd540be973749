// The random bytes of dropout: Philox 4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC11).
//
// The byte of a weight depends only on its place and the state, never on tiles or threads. For sequence b, query head
// h, query i and key j it is byte j % 16 of the four little-endian words of
//
//     Philox(counter = {j / 16, i, b * nhead_q + h, low word of offset},
//            key     = {low word of seed, high word of seed ^ high word of offset})
//
// and the weight is kept if the byte is at most floor(255 (1 - p)), as in CK Tile; if p is 1, none is kept.
#pragma once

#include <cmath>

#include "call.hpp"

namespace catalog::host {

struct Philox {
    std::uint32_t word[4];
};

inline Philox philox(Philox counter, std::uint32_t key0, std::uint32_t key1) {
    auto& [c0, c1, c2, c3] = counter.word;
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {
        const std::uint64_t a = std::uint64_t{0xD2511F53u} * c0, b = std::uint64_t{0xCD9E8D57u} * c2;
        c0 = static_cast<std::uint32_t>(b >> 32) ^ c1 ^ key0;
        c2 = static_cast<std::uint32_t>(a >> 32) ^ c3 ^ key1;
        c1 = static_cast<std::uint32_t>(b);
        c3 = static_cast<std::uint32_t>(a);
    }
    return counter;
}

class Dropout {
   public:
    static constexpr int chunk = 16;  // keys of one Philox call

    explicit Dropout(const catalog_args& args) : keep(1.0f - args.p_drop), scale(keep > 0 ? 1.0f / keep : 0.0f) {
        const auto state = list_of<std::uint64_t>(args.rng_state);
        const std::uint64_t seed = state ? state[0] : 0, offset = state ? state[1] : 0;
        key0 = static_cast<std::uint32_t>(seed);
        key1 = static_cast<std::uint32_t>(seed >> 32) ^ static_cast<std::uint32_t>(offset >> 32);
        low_offset = static_cast<std::uint32_t>(offset);
        threshold = static_cast<std::uint8_t>(std::floor(keep * 255.0f));
    }

    // One row of weights: a query of a head of a sequence; `head` is sequence * nhead_q + head.
    struct WeightRow {
        std::uint32_t query, head;
    };

    static WeightRow row(const catalog_args& args, const Sequence& seq, std::int64_t head, std::int64_t query) {
        return {static_cast<std::uint32_t>(query), static_cast<std::uint32_t>(seq.index * args.nhead_q + head)};
    }

    Philox bytes(WeightRow row, std::int64_t key) const {
        return philox({static_cast<std::uint32_t>(key / chunk), row.query, row.head, low_offset}, key0, key1);
    }

    // weights[j] of key first_key + j becomes weights[j] / (1 - p), or 0. first_key is a multiple of `chunk`.
    void apply(WeightRow row, std::int64_t first_key, int columns, float* weights) const {
        each(row, first_key, columns, [&](int j, bool kept) { weights[j] = kept ? weights[j] * scale : 0.0f; });
    }

    // The factors that `apply` multiplies by: 1 / (1 - p), or 0.
    void factors(WeightRow row, std::int64_t first_key, int columns, float* factors) const {
        each(row, first_key, columns, [&](int j, bool kept) { factors[j] = kept ? scale : 0.0f; });
    }

    // Writes the random bytes of `keys`, which begin at a multiple of `chunk`, to the row starting at `randval`.
    void store(WeightRow row, KeyRange keys, std::uint8_t* randval) const {
        for (std::int64_t key = keys.begin; key < keys.end; key += chunk) {
            const Philox drawn = bytes(row, key);
            std::memcpy(randval + key, drawn.word, std::min<std::int64_t>(chunk, keys.end - key));
        }
    }

   private:
    // Calls body(j, kept) for each key first_key + j, where `kept` says whether its weight is kept.
    template <class Body>
    void each(WeightRow row, std::int64_t first_key, int columns, Body body) const {
        for (int column = 0; column < columns; column += chunk) {
            std::uint8_t random[chunk];
            const Philox drawn = bytes(row, first_key + column);
            std::memcpy(random, drawn.word, sizeof random);
            const int count = std::min<int>(chunk, columns - column);
            for (int j = 0; j < count; ++j) body(column + j, random[j] <= threshold);
        }
    }

    float keep, scale;
    std::uint32_t key0, key1, low_offset;
    std::uint8_t threshold;
};

}  // namespace catalog::host
