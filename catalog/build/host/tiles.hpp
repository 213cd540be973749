// Matrix products of pairs in AMX tiles: the counterpart of multiply_block, over the same panels.
#pragma once

#include "amx.hpp"
#include "units.hpp"

namespace catalog::host {

inline constexpr int tile_rows = 16, tile_units = 16;

// C = A B, or C += A B: C has 16 rows for each of `down` tiles, and 16 columns for each of `across`. The depth is in pairs,
// a multiple of 16; rows of A, B and C are `lda` pairs, `ldb` pairs and `ldc` floats apart. Needs amx::Tiles.
template <bool adds, int down, int across>
inline void multiply_tiles(const BrainPair* a, std::ptrdiff_t lda, const BrainPair* b, std::ptrdiff_t ldb, int depth,
                           float* c, std::ptrdiff_t ldc) {
    static_assert(down >= 1 && down <= 2 && across >= 1 && across <= 2, "four tiles of C, two of A, two of B");
    constexpr std::size_t unit = sizeof(BrainPair);
    const auto each_of_c = [&](auto visit) {
        visit(std::integral_constant<int, 0>{}, c);
        if constexpr (across > 1) visit(std::integral_constant<int, 1>{}, c + tile_rows);
        if constexpr (down > 1) visit(std::integral_constant<int, 2>{}, c + tile_rows * ldc);
        if constexpr (down > 1 && across > 1) visit(std::integral_constant<int, 3>{}, c + tile_rows * ldc + tile_rows);
    };
    each_of_c([&](auto tile, [[maybe_unused]] const float* from) {
        if constexpr (adds)
            amx::load<tile>(from, ldc * sizeof(float));
        else
            amx::clear<tile>();
    });
    for (int k = 0; k < depth; k += tile_units) {
        const BrainPair* const b_k = b + k * ldb;
        amx::load<6>(b_k, ldb * unit);
        amx::load<4>(a + k, lda * unit);
        amx::multiply_add<0, 4, 6>();
        if constexpr (across > 1) {
            amx::load<7>(b_k + tile_units, ldb * unit);
            amx::multiply_add<1, 4, 7>();
        }
        if constexpr (down > 1) {
            amx::load<5>(a + tile_rows * lda + k, lda * unit);
            amx::multiply_add<2, 5, 6>();
        }
        if constexpr (down > 1 && across > 1) amx::multiply_add<3, 5, 7>();
    }
    each_of_c([&](auto tile, float* to) { amx::store<tile>(to, ldc * sizeof(float)); });
}

}  // namespace catalog::host
