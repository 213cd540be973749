// The interface of catalog/build/host/amx.hpp in software, for CPUs without AMX: compile with `-include` of this file.
//
// A product of tiles is computed as the manual of the instruction defines it: sums of the even and of the odd factors of
// each pair, rounded to float after each fused step; subnormal results are zero, and subnormal bf16. Use of tiles that are
// not configured ends the process, as it does on a CPU.
#pragma once

#define CATALOG_AMX_EMULATED

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace catalog::host::amx {

inline constexpr int rows = 16, columns = 16;

struct Registers {
    bool configured = false;
    std::uint32_t tile[8][rows][columns];
};

inline Registers& registers() {
    thread_local Registers of_thread;
    return of_thread;
}

inline auto& configured_tile(int tile) {
    if (!registers().configured) std::abort();
    return registers().tile[tile];
}

inline bool is_permitted() { return !std::getenv("CATALOG_TEST_AMX_REFUSED"); }
inline bool multiplies_halves() { return std::getenv("CATALOG_TEST_AMX_FP16"); }

class Tiles {
   public:
    Tiles() {
        if (registers().configured) std::abort();  // nobody released them
        registers() = {};
        registers().configured = true;
    }
    ~Tiles() { registers().configured = false; }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

template <int tile>
inline void clear() {
    std::memset(configured_tile(tile), 0, sizeof configured_tile(tile));
}

template <int tile, bool passes = false>
inline void load(const void* from, std::size_t stride) {
    for (int row = 0; row < rows; ++row)
        std::memcpy(configured_tile(tile)[row], static_cast<const char*>(from) + row * stride, 64);
}

template <int tile>
inline void store(void* to, std::size_t stride) {
    for (int row = 0; row < rows; ++row)
        std::memcpy(static_cast<char*>(to) + row * stride, configured_tile(tile)[row], 64);
}

inline float as_float(std::uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline std::uint32_t as_bits(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

// Zero of the same sign for a subnormal number.
inline float flushed(float x) {
    const std::uint32_t bits = as_bits(x), sign = 0x8000'0000, exponent = 0x7f80'0000;
    return as_float(bits & exponent ? bits : bits & sign);
}

inline float of_brain(std::uint32_t bits) { return flushed(as_float(bits << 16)); }

inline float of_half(std::uint32_t bits) {
    const std::uint32_t exponent = bits >> 10 & 31, mantissa = bits & 0x3ff;
    const float size = exponent == 0 ? static_cast<float>(mantissa) * 0x1p-24f
                                     : as_float((exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13);
    return bits & 0x8000 ? -size : size;
}

template <int c, int a, int b, class Widen>
inline void multiply_add_pairs(Widen widen) {
    const auto &of_a = configured_tile(a), &of_b = configured_tile(b);
    auto& of_c = configured_tile(c);
    float even_a[rows][columns], odd_a[rows][columns], even_b[rows][columns], odd_b[rows][columns];
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < columns; ++j) {
            even_a[i][j] = widen(of_a[i][j] & 0xffff), odd_a[i][j] = widen(of_a[i][j] >> 16);
            even_b[i][j] = widen(of_b[i][j] & 0xffff), odd_b[i][j] = widen(of_b[i][j] >> 16);
        }
    for (int m = 0; m < rows; ++m) {
        float even[columns] = {}, odd[columns] = {};
        for (int k = 0; k < columns; ++k)
            for (int n = 0; n < columns; ++n) {
                even[n] = flushed(std::fma(even_a[m][k], even_b[k][n], even[n]));
                odd[n] = flushed(std::fma(odd_a[m][k], odd_b[k][n], odd[n]));
            }
        for (int n = 0; n < columns; ++n)
            of_c[m][n] = as_bits(flushed(flushed(as_float(of_c[m][n])) + flushed(even[n] + odd[n])));
    }
}

template <int c, int a, int b>
inline void multiply_add_pairs() {
    multiply_add_pairs<c, a, b>(of_brain);
}

template <int c, int a, int b>
inline void multiply_add_half_pairs() {
    multiply_add_pairs<c, a, b>(of_half);
}

template <int c, int a, int b>
inline void multiply_add_bytes() {
    const auto &of_a = configured_tile(a), &of_b = configured_tile(b);
    auto& of_c = configured_tile(c);
    for (int m = 0; m < rows; ++m)
        for (int n = 0; n < columns; ++n)
            for (int k = 0; k < columns; ++k)
                for (int byte = 0; byte < 32; byte += 8)
                    of_c[m][n] +=
                        static_cast<std::int8_t>(of_a[m][k] >> byte) * static_cast<std::int8_t>(of_b[k][n] >> byte);
}

}  // namespace catalog::host::amx
