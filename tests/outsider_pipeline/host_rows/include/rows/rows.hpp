// Attention, one query at a time. When a key has the largest score so far, what was summed before shrinks.
#pragma once

#include <cmath>

#include "host/call.hpp"
#include "host/launch.hpp"
#include "host/threads.hpp"

namespace catalog::rows {

using namespace catalog::host;  // the values of traits, and the checks of a call

template <class Row>
void attend(const catalog_args& args, const Sequence& seq, std::int64_t head, std::int64_t token) {
    const std::int64_t kv_head = head / heads_per_kv_head(args);
    const float* q = rows_of<const float>(args.q, seq.batch, head, seq.first_q)[token];
    const Rows<const float> k = rows_of<const float>(args.k, seq.batch, kv_head, seq.first_k);
    const Rows<const float> v = rows_of<const float>(args.v, seq.batch, kv_head, seq.first_k);
    float sums[Row::hdim_v] = {}, largest = -INFINITY, sum = 0;
    if (args.sink.data) largest = list_of<float>(args.sink)[head], sum = 1;
    const KeyRange keys = window_of<Row>(args, seq, {0, seq.seqlen_k}).visible(token);
    for (std::int64_t key = keys.begin; key < keys.end; ++key) {
        float score = 0;
#pragma omp simd reduction(+ : score)
        for (int d = 0; d < Row::hdim_q; ++d) score += q[d] * k[key][d];
        score *= args.scale;
        const float before = largest;
        largest = std::max(largest, score);
        const float shrink = std::exp(before - largest), weight = std::exp(score - largest);
        sum = sum * shrink + weight;
        for (int d = 0; d < Row::hdim_v; ++d) sums[d] = sums[d] * shrink + weight * v[key][d];
    }
    float* o = rows_of<float>(args.o, seq.batch, head, seq.first_q)[token];
    for (int d = 0; d < Row::hdim_v; ++d) o[d] = sum > 0 ? sums[d] / sum : 0;
    if constexpr (Row::lse) *rows_of<float>(args.lse, seq.batch, head, seq.first_q)[token] = largest + std::log(sum);
}

template <class Row>
std::int32_t launch_rows(const catalog_args* args) noexcept {
    if (const catalog_status status = check_call<Row>(args); status != CATALOG_OK) return status;
    if (args->num_splits != 1) return CATALOG_BAD_ARGUMENT;
    const std::int64_t heads = args->batch * args->nhead_q;
    parallel_for(*args, threads_for(*args), heads * args->seqlen_q, [&](std::int64_t share) {
        const std::int64_t head = share / args->seqlen_q, token = share % args->seqlen_q;
        const Sequence seq = sequence_of<Row>(*args, head / args->nhead_q);
        if (token < seq.seqlen_q) attend<Row>(*args, seq, head % args->nhead_q, token);
    });
    return CATALOG_OK;
}

}  // namespace catalog::rows
