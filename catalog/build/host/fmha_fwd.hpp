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

namespace catalog::host {

inline int threads_for([[maybe_unused]] const catalog_args& args) {
#if defined(_OPENMP)
    return args.num_threads > 0 ? args.num_threads : omp_get_max_threads();
#else
    return 1;
#endif
}

// Work items of a launch: chunks of query rows, for every K/V head of every sequence.
struct WorkList {
    std::int64_t heads_k, columns, rows, chunk;

    std::int64_t chunks() const { return (rows + chunk - 1) / chunk; }
    std::int64_t size() const { return columns * chunks(); }

    // The last chunks come first: under a causal mask they see the most keys, and the longest item must not start last.
    WorkItem operator[](std::int64_t index) const {
        const std::int64_t column = index % columns;
        const std::int64_t first_row = (chunks() - 1 - index / columns) * chunk;
        return {column / heads_k, column % heads_k, first_row, std::min(chunk, rows - first_row)};
    }
};

// Large chunks share packed K/V tiles among more rows, small ones keep all threads busy.
template <class Row>
inline WorkList work_list(const catalog_args& args, int threads) {
    constexpr int items_per_thread = 4;
    const std::int64_t heads = args.nhead_k > 0 ? args.nhead_q / args.nhead_k : 0;
    WorkList list{args.nhead_k, args.batch * args.nhead_k, args.seqlen_q * heads, Scratch<Row>::item_rows};
    while (list.chunk > Row::tile_m0 && list.size() < items_per_thread * threads) list.chunk -= Row::tile_m0;
    return list;
}

// A sequence shorter than the longest has fewer rows than the work list assumes.
template <class Row>
inline WorkItem clip(WorkItem item, const catalog_args& args) {
    const std::int64_t heads = args.nhead_q / args.nhead_k;
    const std::int64_t rows = sequence<Row::group>(args, item.batch).seqlen_q * heads;
    item.rows = std::min(item.rows, rows - item.first_row);
    return item;
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

#define CATALOG_EXPORT_FWD(Row, description)                                                               \
    extern "C" __attribute__((visibility("default"))) const char* catalog_describe(void) {                 \
        return description;                                                                                \
    }                                                                                                      \
    extern "C" __attribute__((visibility("default"))) int32_t catalog_launch(const catalog_args* args, void*) { \
        return catalog::host::launch_fwd<Row>(args);                                                       \
    }
