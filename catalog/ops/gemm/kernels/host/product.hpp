// The launch of a row: the units that this CPU multiplies best, and the products of a batch.
#pragma once

#include "grouped.hpp"
#include "host/choice.hpp"
#include "split.hpp"

namespace catalog::host {

template <class Row, class Unit>
using Product = std::conditional_t<
    Row::streams, StreamProduct<Row, Unit>,
    std::conditional_t<Row::transposes, OfTranspose<StreamProduct<TransposedRow<Row>, Unit>>, PanelProduct<Row, Unit>>>;

// A batch of small products is divided among threads by products, other work within each.
template <class One>
inline catalog_status multiply(const catalog_args& args) {
    const double work = work_of(args);
    const int threads = work * static_cast<double>(args.batch) < small_work ? 1 : threads_for(args);
    const bool by_products = args.batch > 1 && (work < small_work || One::tiles(args) < threads);
    const int inside = by_products ? 1 : threads;
    std::atomic<catalog_status> status = CATALOG_OK;
    parallel_for(args, by_products ? threads : 1, args.batch, [&](std::int64_t batch) {
        const catalog_status of_one = One(args, batch, inside).run();
        if (of_one != CATALOG_OK) status = of_one;
    });
    return status;
}

template <class Row, class Unit>
inline catalog_status multiply_all(const catalog_args& args) {
    if constexpr (Row::grouped) return GroupedProduct<Row, Unit>(args).run();
    using OfFewRows = FewRowsInTiles<Row, Unit>;
    if constexpr (OfFewRows::exists) {
        // Rows of a small product that are not few beside the columns take less time if B is packed, too.
        const bool packs_both = 2 * args.m >= args.n && work_of(args) <= small_product;
        if (args.num_splits < 2 && !packs_both && OfFewRows::takes(args)) return multiply<InParts<Row, Unit, OfFewRows>>(args);
    }
    using One = Product<Row, Unit>;
    if (args.num_splits > 1) return SplitProduct<Row, Unit, One>(args, 0, args.batch, threads_for(args)).run();
    return multiply<InParts<Row, Unit, One>>(args);
}

template <class Row>
inline std::int32_t launch(const catalog_args* args) noexcept {
    if (const catalog_status status = check_call<Row>(args); status != CATALOG_OK) return status;
    if (args->batch == 0 || args->m == 0 || args->n == 0) return CATALOG_OK;
    return with_units<typename Row::dtype, Row::in_tiles>(
        [&](auto unit) { return multiply_all<Row, typename decltype(unit)::type>(*args); });
}

}  // namespace catalog::host
