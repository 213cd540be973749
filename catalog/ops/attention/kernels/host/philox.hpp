// Dropout of weights; see operation/philox.hpp for its random bytes.
#pragma once

#include "call.hpp"
#include "operation/philox.hpp"

namespace catalog::host {

class Dropout {
   public:
    static constexpr int chunk = philox_keys;

    explicit Dropout(const catalog_args& args) : keep(1.0f - args.p_drop), scale(keep > 0 ? 1.0f / keep : 0.0f) {
        const auto state = list_of<std::uint64_t>(args.rng_state);
        const std::uint64_t seed = state ? state[0] : 0, offset = state ? state[1] : 0;
        key0 = static_cast<std::uint32_t>(seed);
        key1 = static_cast<std::uint32_t>(seed >> 32) ^ static_cast<std::uint32_t>(offset >> 32);
        low_offset = static_cast<std::uint32_t>(offset);
        threshold = static_cast<std::uint8_t>(keep * 255.0f);
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
