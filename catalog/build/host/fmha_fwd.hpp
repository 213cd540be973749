// Forward attention on the host CPU, specialised for one row of the catalog.
//
// A translation unit defines a struct Row whose constexpr members are the row's traits, and exports it:
//
//     struct Row {
//         using dtype = float;                              // or catalog::host::fp16, catalog::host::bf16
//         static constexpr int hdim_q = 128, hdim_v = 128;
//         static constexpr int tile_m0 = 96, tile_n0 = 128;    // query rows and keys of one tile
//         static constexpr int warp_m0 = 12, warp_n0 = 32;     // register block of S = Q K^T
//         static constexpr int warp_m1 = 12, warp_n1 = 32;     // register block of O += P V
//         static constexpr auto mask = catalog::host::Mask::causal;
//         static constexpr bool group = false, lse = true, pad_d = false, pad_dv = false;
//     };
//     CATALOG_EXPORT_FWD(Row, R"json({"family": "fwd"})json")
#pragma once

#include <atomic>
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "attend.hpp"
#include "work.hpp"

namespace catalog::host {

inline int threads_for([[maybe_unused]] const catalog_args& args) {
#if defined(_OPENMP)
    return args.num_threads > 0 ? args.num_threads : omp_get_max_threads();
#else
    return 1;
#endif
}

template <class Row>
inline std::int32_t launch_fwd(const catalog_args* args) noexcept {
    if (const catalog_status status = check<Row>(args); status != CATALOG_OK) return status;
    const int threads = threads_for(*args);
    const WorkList list = work_list<Row>(*args, threads);
    std::atomic<bool> out_of_memory = false;
#pragma omp parallel num_threads(threads) if (list.size() > 1)
    {
        Scratch<Row>* scratch = thread_scratch<Row>();
        if (!scratch) out_of_memory = true;
#pragma omp for schedule(dynamic)
        for (std::int64_t index = 0; index < list.size(); ++index) {
            const WorkItem item = clip<Row>(list[index], *args);
            if (scratch && item.rows > 0) Attention<Row>(*args, item, *scratch).run();
        }
    }
    return out_of_memory ? CATALOG_NO_MEMORY : CATALOG_OK;
}

}  // namespace catalog::host

#define CATALOG_EXPORT_FWD(Row, description)                                                            \
    extern "C" {                                                                                        \
    __attribute__((visibility("default"))) const char* catalog_describe(void) { return description; }   \
    __attribute__((visibility("default"))) int32_t catalog_launch(const catalog_args* args, void*) {    \
        return catalog::host::launch_fwd<Row>(args);                                                    \
    }                                                                                                   \
    }
