// Addresses of elements whose distance only a call knows.
#pragma once

#include <cstdint>
#include <type_traits>

namespace catalog::host {

// Elements that are some bytes apart, for numbers below 16 that are known when a kernel is compiled, and for few registers:
// four of them reach all these elements, because an address scales one by 1, 2 or 4.
class Multiples {
   public:
    explicit Multiples(std::int64_t bytes) : one(bytes), three(3 * bytes), five(5 * bytes), seven(7 * bytes) {
        asm("" : "+r"(three), "+r"(five), "+r"(seven));  // or compilers would keep more distances, in memory
    }

    template <class T>
    [[gnu::always_inline]] T* at(T* first, int number) const {
        using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
        auto* from = reinterpret_cast<Byte*>(first);
        if (number >= 8) from += 8 * one, number -= 8;
        const std::int64_t distance = number % 7 == 0   ? number / 7 * seven
                                      : number % 5 == 0 ? number / 5 * five
                                      : number % 3 == 0 ? number / 3 * three
                                                        : number * one;
        return reinterpret_cast<T*>(from + distance);
    }

   private:
    std::int64_t one, three, five, seven;
};

}  // namespace catalog::host
