// One launch function for the launcher of any generated header: a static member function `launch` of a type, or a free
// function. It takes CK's stream_config and one struct of arguments, in either order.
#pragma once

#include <stdint.h>

#include <type_traits>

namespace ck_tile {
struct stream_config;
}

namespace catalog::exported {

// The entry in the table of an export. Returns 0 when the kernel was launched, 1 when it refused the arguments. `args`
// points to the struct that the header's own function takes, `stream_config` to a ck_tile::stream_config.
// `milliseconds` may be NULL; it receives the result of the header's function, or 0 if that returns nothing.
using Launch = int32_t (*)(const void* args, const void* stream_config, float* milliseconds);

template <class Parameter>
using Plain = std::remove_cv_t<std::remove_reference_t<Parameter>>;

template <class Parameter>
constexpr bool is_stream = std::is_same_v<Plain<Parameter>, ck_tile::stream_config>;

template <class Parameter>
Plain<Parameter>& at(const void* place) {
    return *static_cast<Plain<Parameter>*>(const_cast<void*>(place));
}

template <auto function>
struct Call {
    static constexpr Launch launch = nullptr;
};

template <class Result, class First, class Second, Result (*function)(First, Second)>
struct Call<function> {
    static int32_t call(const void* args, const void* stream_config, float* milliseconds) {
        const void* first = is_stream<First> ? stream_config : args;
        const void* second = is_stream<First> ? args : stream_config;
        float taken = 0;
        try {
            if constexpr (std::is_void_v<Result>)
                function(at<First>(first), at<Second>(second));
            else
                taken = static_cast<float>(function(at<First>(first), at<Second>(second)));
        } catch (...) {
            return 1;
        }
        if (milliseconds) *milliseconds = taken;
        return 0;
    }

    static constexpr Launch chosen() {
        constexpr bool returns = std::is_void_v<Result> || std::is_convertible_v<Result, float>;
        constexpr bool lvalues = !std::is_rvalue_reference_v<First> && !std::is_rvalue_reference_v<Second>;
        constexpr bool objects = !std::is_pointer_v<First> && !std::is_pointer_v<Second>;
        if constexpr (returns && lvalues && objects && is_stream<First> != is_stream<Second>)
            return &call;
        else
            return nullptr;
    }

    static constexpr Launch launch = chosen();
};

// The launch function of a type; NULL if it has none, or several of that name.
template <class Kernel, class = void>
struct Of {
    static constexpr Launch launch = nullptr;
};

template <class Kernel>
struct Of<Kernel, std::void_t<decltype(&Kernel::launch)>> : Call<&Kernel::launch> {};

}  // namespace catalog::exported
