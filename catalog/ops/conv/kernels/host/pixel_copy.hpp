// Copies of pixels in which each lane of a vector has the channel that it reads, or several: a term after the other.
#pragma once

#include "narrow.hpp"

namespace catalog::host {

// Lane i of the result is lane index[i] of the concatenation of a and b.
inline Float permute(Float a, Float b, Ints index) {
#if !defined(__clang__)
    return __builtin_shuffle(a, b, index);
#elif defined(__AVX512F__)
    return __builtin_ia32_vpermi2varps512(a, index, b);
#else
    const Ints within = index % lanes;
    return index % (2 * lanes) >= lanes ? permute(b, within) : permute(a, within);
#endif
}

// What lanes read of a pixel, which has `all` channels for them: lane i its channel first[i], and the terms - 1 that follow.
struct ReadChannels {
    std::int64_t all, terms;
    Ints first;
};

template <class T>
class PixelCopy {
   public:
    // Pixels are `apart` elements from each other, their copies `pitch` floats, and copies of terms `term_step`. A vector is
    // stored for each pixel, in ascending order.
    PixelCopy(const ReadChannels& reads, std::int64_t apart, std::int64_t pitch, std::int64_t term_step)
        : reads(reads), apart(apart), pitch(pitch), term_step(term_step) {}

    void copy(const T* from, std::int64_t count, float* to) const {
        constexpr std::int64_t most_chosen = 8;
        const std::int64_t vectors = (reads.all + lanes - 1) / lanes;
        if (vectors > most_chosen || vectors * std::min<std::int64_t>(reads.terms, lanes) > shuffles_of_transpose)
            return copy_transposed(from, count, to);
        if (vectors == 1) return copy_chosen<1>(from, count, to);
        if (vectors == 2) return copy_chosen<2>(from, count, to);
        if (vectors <= 4) return copy_chosen<4>(from, count, to);
        copy_chosen<most_chosen>(from, count, to);
    }

   private:
    static constexpr int shuffles_of_transpose = lanes * __builtin_ctz(lanes);

    // A pixel's channels are in `vectors` vectors, of which lanes choose elements.
    template <int vectors>
    void copy_chosen(const T* from, std::int64_t count, float* to) const {
        for (; count > 0; --count, from += apart, to += pitch) {
            Float seen[vectors];
#pragma GCC unroll 8
            for (int v = 0; v < vectors; ++v) seen[v] = load_first(from + v * lanes, reads.all - v * lanes);
            Ints chosen = reads.first;
            float* of_term = to;
            for (std::int64_t term = 0; term < reads.terms; ++term, chosen += 1, of_term += term_step)
                if constexpr (vectors == 1)
                    store(of_term, permute(seen[0], chosen));
                else {
                    Float found = permute(seen[0], seen[1], chosen);
#pragma GCC unroll 4
                    for (int v = 2; v < vectors; v += 2)
                        found = chosen >= v * lanes ? permute(seen[v], seen[v + 1], chosen) : found;
                    store(of_term, found);
                }
        }
    }

    // Each lane's channels are a row of a square.
    void copy_transposed(const T* from, std::int64_t count, float* to) const {
        for (; count > 0; --count, from += apart, to += pitch)
            for (std::int64_t term = 0; term < reads.terms; term += lanes) {
                Float square[lanes];
#pragma GCC unroll 16
                for (int lane = 0; lane < lanes; ++lane)
                    square[lane] = load_first(from + reads.first[lane] + term, reads.terms - term);
                transpose(square);
                const std::int64_t some = std::min<std::int64_t>(reads.terms - term, lanes);
                for (std::int64_t i = 0; i < some; ++i) store(to + (term + i) * term_step, square[i]);
            }
    }

    const ReadChannels reads;
    const std::int64_t apart, pitch, term_step;
};

}  // namespace catalog::host
