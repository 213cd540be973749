// Kernels that process every query row of every head independently.
#pragma once

#include "call.hpp"
#include "host/fp8.hpp"
#include "launch.hpp"
#include "host/pieces.hpp"
#include "host/threads.hpp"

namespace catalog::host {

// One query of one head of one sequence.
struct QueryRow {
    const Sequence& seq;
    std::int64_t head, query;

    template <class Element>
    Element* of(const catalog_tensor& tensor, std::int64_t split = 0) const {
        return rows_of<Element>(tensor, seq.batch, head, seq.first_q, split)[query];
    }
};

template <class Row>
inline catalog_status check_rows(const catalog_args* args) {
    if (const catalog_status status = check_abi(args); status != CATALOG_OK) return status;
    if (!valid_sizes(*args)) return CATALOG_BAD_ARGUMENT;
    if (Row::mode == Mode::group && args->batch > 0 && !args->seqstart_q) return CATALOG_BAD_ARGUMENT;
    for (std::int64_t b = 0; b < args->batch; ++b) {
        const Sequence seq = queries_of<Row>(*args, b);
        const std::int64_t stored =
            Row::mode == Mode::group ? args->seqstart_q[b + 1] - args->seqstart_q[b] : args->seqlen_q;
        if (seq.first_q < 0 || seq.seqlen_q < 0 || seq.seqlen_q > stored || stored > args->seqlen_q)
            return CATALOG_BAD_ARGUMENT;
    }
    return CATALOG_OK;
}

template <class Row>
inline bool has_rows(const catalog_args& args) {
    for (std::int64_t b = 0; b < args.batch; ++b)
        if (queries_of<Row>(args, b).seqlen_q > 0) return args.nhead_q > 0;
    return false;
}

// Calls body(row) for every query row, on all threads.
template <class Row, class Body>
inline catalog_status for_rows(const catalog_args& args, Body body) {
    constexpr std::int64_t chunk = 64;
    Pieces pieces;
    const bool divided = pieces.divide(args.batch, args.nhead_q, chunk,
                                       [&](std::int64_t sequence) { return queries_of<Row>(args, sequence).seqlen_q; });
    if (!divided) return CATALOG_NO_MEMORY;
    const int threads = pieces.size() > 16 ? threads_for(args) : 1;
    parallel_for(args, threads, pieces.size(), [&](std::int64_t index) {
        const Piece piece = pieces[index];
        const Sequence seq = queries_of<Row>(args, piece.sequence);
        const std::int64_t first = piece.chunk * chunk;
        for (std::int64_t query = first; query < std::min(first + chunk, seq.seqlen_q); ++query)
            body(QueryRow{seq, piece.column, query});
    });
    return CATALOG_OK;
}

}  // namespace catalog::host
