// Division by a number that the host knows.
#pragma once

#include <cstdint>

namespace catalog::cuda {

// Division by a number from 1 on that is known when a kernel is launched, exact for dividends below 2^31: factor *
// divisor exceeds 2^(31 + shift) by less than 2^shift. It takes a thread five instructions; by any other number it takes
// about thirty, and 100 cycles.
struct Divisor {
    std::uint32_t divisor, factor, shift;

    __host__ Divisor() : Divisor(1) {}
    __host__ explicit Divisor(std::int64_t number) : divisor(static_cast<std::uint32_t>(number)), factor(0), shift(0) {
        while ((1ull << shift) < divisor) ++shift;
        factor = static_cast<std::uint32_t>(((1ull << (31 + shift)) + divisor - 1) / divisor);
    }

    __device__ __forceinline__ int quotient(int dividend) const {
        return static_cast<int>((static_cast<std::uint64_t>(static_cast<std::uint32_t>(dividend)) * factor) >>
                                (31 + shift));
    }

    // For functions that divide by this or by a number, which occupies fewer registers.
    friend __device__ __forceinline__ int operator/(int dividend, const Divisor& by) { return by.quotient(dividend); }
};

// a / b, of numbers from 0 on that only the device knows, where the quotient is small: a quotient of floats, and
// then corrected.
__device__ __forceinline__ int small_quotient(int a, int b) {
    int quotient = static_cast<int>(__fdividef(static_cast<float>(a), static_cast<float>(b)));
    int rest = a - quotient * b;
    for (; rest < 0; rest += b) --quotient;
    for (; rest >= b; rest -= b) ++quotient;
    return quotient;
}

}  // namespace catalog::cuda
