// The parts of a split forward become one: O is their mean weighted by exp(LSE of the part).
#pragma once

#include <climits>

#include "cuda/common/launch.hpp"
#include "cuda/kernel_launch.hpp"
#include "cuda/common/scores.hpp"

namespace catalog::cuda {

// Of a block, which combines the parts of one row. Threads have four columns each; more threads than columns form
// groups that divide the parts.
inline constexpr int combine_threads = 128;

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

template <class Row>
__global__ void __launch_bounds__(combine_threads)
    combine_splits(const __grid_constant__ catalog_args args) {
    static_assert(Row::hdim_v <= 4 * combine_threads);
    wait_for_last_kernel();
    __shared__ float4 totals[combine_threads];
    const int nhead_q = static_cast<int>(args.nhead_q), seqlen_q = static_cast<int>(args.seqlen_q);
    const int index = static_cast<int>(blockIdx.x), splits = static_cast<int>(args.num_splits);
    const Sequence seq = queries_of<Row>(args, index / seqlen_q / nhead_q);
    const CombinedRow<Row> row{args, seq, index / seqlen_q % nhead_q, index % seqlen_q};
    if (row.query >= seq.seqlen_q) return;

    const int thread = static_cast<int>(threadIdx.x), pieces = static_cast<int>(args.hdim_v) / 4;
    const int groups = combine_threads / pieces, group = thread / pieces, column = (thread - group * pieces) * 4;
    const LseOfSplits lse(row, splits);
    totals[thread] = sum_of_splits(row, lse, splits, group, groups, column);
    __syncthreads();
    if constexpr (Row::lse)
        if (thread == 0) *row.template of<float>(args.lse) = lse.reference + logf(lse.sum);
    if (group > 0) return;
    const float normalize = lse.sum == 0.0f ? 0.0f : 1.0f / lse.sum;
    float4 o = make_float4(0, 0, 0, 0);
    for (int of_group = 0; of_group < groups; ++of_group) {
        const float4 part = totals[of_group * pieces + thread];
        o = make_float4(o.x + part.x, o.y + part.y, o.z + part.z, o.w + part.w);
    }
    using T = typename Row::otype;
    *reinterpret_cast<uint2*>(row.template of<T>(args.o) + column) =
        make_uint2(pack<T>(o.x * normalize, o.y * normalize), pack<T>(o.z * normalize, o.w * normalize));
}

template <class Row>
inline std::int32_t launch_fmha_fwd_splitkv_combine(const catalog_args* args, cudaStream_t stream) noexcept {
    if (const catalog_status status = check_abi(args); status != CATALOG_OK) return status;
    if (!valid_sizes(*args) || !valid_hdim(args->hdim_v, Row::hdim_v, Row::pad_dv)) return CATALOG_BAD_ARGUMENT;
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
    return KernelLaunch(static_cast<unsigned>(rows), combine_threads, 0, stream, Start::early)
        .run(combine_splits<Row>, *args);
}

template <class Row>
inline constexpr Block block_of{combine_threads, 0};

}  // namespace catalog::cuda
