// The two entry points of a library, and how many threads a launch has.
#pragma once

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "../abi/catalog_abi.h"

namespace catalog::host {

inline int threads_for([[maybe_unused]] const catalog_args& args) {
#if defined(_OPENMP)
    return args.num_threads > 0 ? args.num_threads : omp_get_max_threads();
#else
    return 1;
#endif
}

}  // namespace catalog::host

#define CATALOG_EXPORT(launch, description)                                                             \
    extern "C" {                                                                                        \
    __attribute__((visibility("default"))) const char* catalog_describe(void) { return description; }   \
    __attribute__((visibility("default"))) int32_t catalog_launch(const catalog_args* args, void*) {    \
        return launch(args);                                                                            \
    }                                                                                                   \
    }
