// The parts of a split forward become one: O is their mean weighted by exp(LSE of the part).
#pragma once

#include <algorithm>
#include <climits>

#include "cuda/common/launch.hpp"
#include "cuda/common/results.hpp"
#include "cuda/kernel_launch.hpp"
#include "cuda/common/scores.hpp"

namespace catalog::cuda {

// Of a block. Threads of a row have four columns each; more threads than columns form groups that divide the parts.
inline constexpr int combine_threads = 128;

// Rows of a block: one, whose parts are added by as many threads as possible, or, where such blocks would not all run at
// once on 132 multiprocessors, one for each warp.
inline constexpr int few_rows = 132 * 16, rows_together = combine_threads / 32;

template <class Row>
struct CombinedRow {
    const catalog_args& args;
    const Sequence& seq;
    int head, query;

    template <class Element>
    __device__ __forceinline__ Element* of(const catalog_tensor& tensor, int split = 0) const {
        return rows_of<Element>(tensor, seq.batch, head, seq.first_q + query, split);
    }

    __device__ __forceinline__ float lse_of(int split) const { return *of<const float>(args.lse_acc, split); }
};

// Each warp finds out for itself: the largest LSE of the splits, 0 of a row that sees no key, and the sum of their
// powers of e above it.
struct LseOfSplits {
    float reference, sum;

    template <class Row>
    __device__ __forceinline__ LseOfSplits(const CombinedRow<Row>& row, int splits) : sum(0.0f) {
        const int lane = threadIdx.x % 32;
        float largest = minus_infinity();
        for (int split = lane; split < splits; split += 32) largest = fmaxf(largest, row.lse_of(split));
        for (int step = 16; step > 0; step /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, step));
        reference = largest == minus_infinity() ? 0.0f : largest;
        for (int split = lane; split < splits; split += 32) sum += expf(row.lse_of(split) - reference);
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
    }
};

// Groups take turns at the splits; those of weight 0 need not have an O.
template <class Row>
__device__ __forceinline__ float4 sum_of_splits(const CombinedRow<Row>& row, const LseOfSplits& lse, int splits,
                                                int group, int groups, int column) {
    float4 total = make_float4(0, 0, 0, 0);
    if (group >= groups) return total;
#pragma unroll 4
    for (int split = group; split < splits; split += groups) {
        const float weight = expf(row.lse_of(split) - lse.reference);
        const float* o = row.template of<const float>(row.args.o_acc, split);
        const float4 part = *reinterpret_cast<const float4*>(o + column);
        if (weight > 0.0f)
            total = make_float4(fmaf(part.x, weight, total.x), fmaf(part.y, weight, total.y),
                                fmaf(part.z, weight, total.z), fmaf(part.w, weight, total.w));
    }
    return total;
}

template <class Row, int rows>
__global__ void __launch_bounds__(combine_threads)
    combine_splits(const __grid_constant__ catalog_args args) {
    constexpr int threads = combine_threads / rows;  // of a row
    wait_for_last_kernel();
    __shared__ float4 totals[combine_threads];
    const int nhead_q = static_cast<int>(args.nhead_q), seqlen_q = static_cast<int>(args.seqlen_q);
    const int splits = static_cast<int>(args.num_splits), last = static_cast<int>(args.batch) * nhead_q * seqlen_q - 1;
    const int index = static_cast<int>(blockIdx.x) * rows + static_cast<int>(threadIdx.x) / threads;
    const int of_head = min(index, last) / seqlen_q;
    const Sequence seq = queries_of<Row>(args, of_head / nhead_q);
    const CombinedRow<Row> row{args, seq, of_head % nhead_q, min(index, last) % seqlen_q};
    const bool exists = index <= last && row.query < seq.seqlen_q;

    const int thread = static_cast<int>(threadIdx.x) % threads, pieces = static_cast<int>(args.hdim_v) / 4;
    const int across = min(pieces, threads), groups = threads / across, group = thread / across;
    const LseOfSplits lse(row, exists ? splits : 0);
    const float normalize = lse.sum == 0.0f ? 0.0f : 1.0f / lse.sum;
    using T = typename Row::otype;
    const auto store = [&](int piece, float4 o) {
        store_four(row.template of<T>(args.o) + piece * 4,
                   make_float4(o.x * normalize, o.y * normalize, o.z * normalize, o.w * normalize));
    };
    if constexpr (Row::lse)
        if (exists && thread == 0) *row.template of<float>(args.lse) = lse.reference + logf(lse.sum);
    if (groups == 1) {
        for (int piece = thread; group == 0 && exists && piece < pieces; piece += across)
            store(piece, sum_of_splits(row, lse, splits, 0, 1, piece * 4));
        return;
    }
    const int piece = thread - group * across;
    totals[threadIdx.x] = sum_of_splits(row, lse, exists ? splits : 0, group, groups, piece * 4);
    __syncthreads();
    if (group > 0 || !exists) return;
    float4 o = make_float4(0, 0, 0, 0);
    for (int of_group = 0; of_group < groups; ++of_group) {
        const float4 part = totals[threadIdx.x + of_group * across];
        o = make_float4(o.x + part.x, o.y + part.y, o.z + part.z, o.w + part.w);
    }
    store(piece, o);
}

template <class Row>
inline std::int32_t launch_fmha_fwd_splitkv_combine(const catalog_args* args, cudaStream_t stream) noexcept {
    if (const catalog_status status = check_abi(args); status != CATALOG_OK) return status;
    constexpr int vector = std::min(8, in_vector<Row>);
    if (!valid_sizes(*args) || !valid_hdim(args->hdim_v, Row::hdim_v, Row::pad_dv, vector)) return CATALOG_BAD_ARGUMENT;
    if (!has_queries(*args)) return CATALOG_OK;
    const bool has_tensors =
        args->o.data && args->o_acc.data && args->lse_acc.data && (!Row::lse || args->lse.data) &&
        (Row::mode == Mode::batch || args->seqstart_q);
    if (!has_tensors || !aligned_queries<Row, typename Row::otype>(*args, args->o) ||
        !aligned_queries<Row, float>(*args, args->o_acc, args->num_splits))
        return CATALOG_BAD_ARGUMENT;
    std::int64_t rows;
    if (__builtin_mul_overflow(args->batch * args->nhead_q, args->seqlen_q, &rows) || rows > INT_MAX)
        return CATALOG_BAD_ARGUMENT;
    const auto run = [&](std::int64_t blocks, auto kernel) {
        return KernelLaunch(static_cast<unsigned>(blocks), combine_threads, 0, stream, Start::early).run(kernel, *args);
    };
    return rows <= few_rows ? run(rows, combine_splits<Row, 1>)
                            : run((rows + rows_together - 1) / rows_together, combine_splits<Row, rows_together>);
}

template <class Row>
inline constexpr Block block_of{combine_threads, 0};

}  // namespace catalog::cuda
