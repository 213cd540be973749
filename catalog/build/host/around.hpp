// Stores that bypass the caches. A line that is stored whole in this way is not read from memory first, as for other stores,
// but the next reader finds it in no cache. So this is for results that are larger than most caches.
#pragma once

#include "dtype.hpp"

namespace catalog::host {

#if defined(__AVX__)
#define CATALOG_STORES_AROUND 1

typedef long long Words16 __attribute__((vector_size(16)));
typedef long long Words32 __attribute__((vector_size(32)));
typedef long long Words64 __attribute__((vector_size(64)));

#if defined(__clang__)
template <class Words>
inline void store_around(Words* to, Words x) { __builtin_nontemporal_store(x, to); }
#else
inline void store_around(Words16* to, Words16 x) { __builtin_ia32_movntdq(to, x); }
inline void store_around(Words32* to, Words32 x) { __builtin_ia32_movntdq256(to, x); }
#if defined(__AVX512F__)
inline void store_around(Words64* to, Words64 x) { __builtin_ia32_movntdq512(to, x); }
#endif
#endif
#endif

template <class T>
inline void copy_elements(const T* from, std::int64_t count, T* to) {
    constexpr std::int64_t chunk = vector_bytes / sizeof(T);
    if (count < chunk) {
        for (std::int64_t i = 0; i < count; ++i) to[i] = from[i];
        return;
    }
    for (std::int64_t i = 0; i + chunk < count; i += chunk) std::memcpy(to + i, from + i, vector_bytes);
    std::memcpy(to + (count - chunk), from + (count - chunk), vector_bytes);  // some of it for the second time
}

// How the vectors of a result are stored, whose memory begins at an address.
class Storing {
   public:
    Storing() = default;
    // Results of `least_bytes` and more bypass the caches.
    Storing([[maybe_unused]] const void* result, [[maybe_unused]] std::int64_t bytes,
            [[maybe_unused]] std::int64_t least_bytes = 8 << 20) {
#if defined(CATALOG_STORES_AROUND)
        around = bytes >= least_bytes && reinterpret_cast<std::uintptr_t>(result) % vector_bytes == 0;
#endif
    }

    bool is_around() const { return around; }

    // The first `count` elements.
    template <class T, class Vector>
    void store(T* to, Vector x, std::int64_t count) const {
        if (is_around() && count >= lanes && reinterpret_cast<std::uintptr_t>(to) % (lanes * sizeof(T)) == 0)
            store_whole(to, x);
        else
            store_first(to, x, count);
    }

    // A vector, at a multiple of its size if the result bypasses the caches.
    template <class T, class Vector>
    void store_whole(T* to, Vector x) const {
#if defined(CATALOG_STORES_AROUND)
        if (around) {
            constexpr int bytes = lanes * sizeof(T);
            using Words = std::conditional_t<bytes == 64, Words64, std::conditional_t<bytes == 32, Words32, Words16>>;
            static_assert(bytes == sizeof(Words));
            T elements[lanes];
            host::store(elements, x);
            Words words;
            std::memcpy(&words, elements, sizeof words);
            return store_around(reinterpret_cast<Words*>(to), words);
        }
#endif
        host::store(to, x);
    }

    // Elements that are complete, of any number.
    template <class T>
    void copy(const T* from, std::int64_t count, T* to) const {
#if defined(CATALOG_STORES_AROUND)
        if (around && reinterpret_cast<std::uintptr_t>(to) % vector_bytes == 0) {
            using Words = std::conditional_t<vector_bytes == 64, Words64, Words32>;
            constexpr std::int64_t chunk = vector_bytes / sizeof(T);
            for (; count >= chunk; count -= chunk, from += chunk, to += chunk) {
                Words words;
                std::memcpy(&words, from, sizeof words);
                store_around(reinterpret_cast<Words*>(to), words);
            }
            if (count == 0) return;
        }
#endif
        copy_elements(from, count, to);
    }

    // At the end of a share: other threads see its results in time.
    void finish() const {
#if defined(CATALOG_STORES_AROUND)
        if (around) __builtin_ia32_sfence();
#endif
    }

   private:
    bool around = false;
};

}  // namespace catalog::host
