// NEON's conversions of elements, in assembly: g++ would convert one element at a time.
#pragma once

#include "vector.hpp"

namespace catalog::host {

// From fp16, and to it.
inline Float widen_floats(HalfBits x) {
    Float wide;
    asm("fcvtl %0.4s, %1.4h" : "=w"(wide) : "w"(x));
    return wide;
}
inline HalfBits narrow_floats(Float x) {
    HalfBits narrow;
    asm("fcvtn %0.4h, %1.4s" : "=w"(narrow) : "w"(x));
    return narrow;
}

inline Bits widen(HalfBits x) {
    Bits wide;
    asm("uxtl %0.4s, %1.4h" : "=w"(wide) : "w"(x));
    return wide;
}

// As the upper half of each lane.
inline Bits widen_upwards(HalfBits x) {
    Bits wide;
    asm("shll %0.4s, %1.4h, #16" : "=w"(wide) : "w"(x));
    return wide;
}

// A vector of bytes fills a quarter of a register, as a float does.
inline HalfBits load_unsigned(const void* from) {
    float bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    HalfBits wide;
    asm("uxtl %0.8h, %1.8b" : "=w"(wide) : "w"(bytes));
    return wide;
}
inline Ints load_signed(const void* from) {
    float bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    Ints wide;
    asm("sxtl %0.8h, %1.8b\n\tsxtl %0.4s, %0.4h" : "=w"(wide) : "w"(bytes));
    return wide;
}
inline void store_bytes(void* to, Bits x) {
    float bytes;
    asm("xtn %0.4h, %1.4s\n\txtn %0.8b, %0.8h" : "=w"(bytes) : "w"(x));
    std::memcpy(to, &bytes, sizeof bytes);
}

}  // namespace catalog::host
