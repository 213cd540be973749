// Forward attention with mma.sync: a block answers a tile of rows of one K/V head of one sequence.
//
// Every group of warps (see mma_tile.hpp) streams its keys through a ring of shared memory: while a tile is worked on, the
// copies of the next ones are under way. Each copy of K, and each of V, is a group of cp.async of its own, so that work on
// K starts before V is there. The groups know nothing of each other until their results are merged.
#pragma once

#include <climits>

#include "mma_tile.hpp"
#include "scores.hpp"

namespace catalog::cuda {

struct MmaGrid {
    int tiles;  // of the longest sequence
    Divisor heads, page_size;
};

// `partial`: O and LSE of one split go to the workspaces o_acc and lse_acc.
template <class Row, bool partial>
class MmaAttention {
    using T = typename Row::dtype;
    using Shape = MmaShape<Row>;
    static constexpr int atoms = Shape::atoms, keys = Shape::keys, stages = Shape::stages;
    static constexpr int tile_m0 = Row::tile_m0, tile_n0 = Row::tile_n0, hdim_v = Row::hdim_v;

   public:
    __device__ __forceinline__ MmaAttention(const catalog_args& args, const MmaGrid& grid, const Sequence& seq,
                                            int head_k, int split, int first_row, std::uint32_t shared)
        : args(args),
          grid(grid),
          seq(seq),
          head_k(head_k),
          split(split),
          first_row(first_row),
          hdim(static_cast<int>(args.hdim_v)),
          rows(min(tile_m0, seq.seqlen_q * static_cast<int>(grid.heads.divisor) - first_row)),
          lane(threadIdx.x % 32),
          warp_m(threadIdx.x / 32 % Shape::waves_m),
          warp_n(threadIdx.x / 32 / Shape::waves_m),
          shared(shared),
          window(window_of<Row::mask>(args, seq.seqlen_q, seq.seqlen_k,
                                      partial ? keys_of_split(seq.seqlen_k, split, static_cast<int>(args.num_splits),
                                                              tile_n0)
                                              : KeyRange{0, seq.seqlen_k})),
          scores(args, args.scale == 0.0f ? 1.0f : fabsf(args.scale)),
          k_copy(args.k, seq, head_k, static_cast<int>(args.hdim_q), warp_m * Shape::copied),
          v_copy(args.v, seq, head_k, static_cast<int>(args.hdim_v), warp_m * Shape::copied),
          tile(shared + warp_m * Shape::rows * Row::hdim_q * 2, lane) {
#pragma unroll
        for (int m = 0; m < atoms; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                max[m][half] = minus_infinity();
                sum[m][half] = 0.0f;
            }
    }

    __device__ __forceinline__ void run() {
        const KeyRange first = window.visible(row_at(0).query), last = window.visible(row_at(rows - 1).query);
        const KeyRange some = seen_by_some(first, last), all = seen_by_all(first, last);
        const int start = some.begin / tile_n0 * tile_n0;
        tiles = some.begin < some.end ? (some.end - start + tile_n0 - 1) / tile_n0 : 0;
        first_key = start + warp_n * keys;
        end = some.end;
        ring = shared + Shape::q_bytes + warp_n * Shape::group_bytes;

        k_copy.advance(first_key);
        v_copy.advance(first_key);
        start_copies();
        for (int number = 0, slot = 0; number < tiles; ++number, slot = slot + 1 < stages ? slot + 1 : 0) {
            const int key = first_key + number * tile_n0;
            copy_wait<2 * stages - 2>();  // K of this tile
            sync_group();                 // nobody reads V of the last tile any more
            start_v(number + stages - 1, slot > 0 ? slot - 1 : stages - 1);
            find_places(number + stages);
            tile.multiply_q_k(ring + slot * Shape::k_bytes);
            finish_scores(key, all);
            weigh();
            copy_wait<2 * stages - 2>();  // V of this tile
            sync_group();                 // nobody reads K of this tile any more
            start_k(number + stages, slot);
            tile.multiply_p_v(ring + stages * Shape::k_bytes + slot * Shape::v_bytes);
        }
        copy_wait<0>();
        if constexpr (Shape::waves_n > 1)
            merge();
        else
            store();
    }

   private:
    // ---- Copies

    __device__ __forceinline__ void sync_group() const {
        if constexpr (Shape::waves_n == 1)
            __syncthreads();
        else if constexpr (Shape::waves_m == 1)
            __syncwarp();
        else
            named_barrier_sync(1 + warp_n, 32 * Shape::waves_m);
    }

    __device__ __forceinline__ void find_places(int number) {
        if constexpr (Row::paged_kv)
            places.find(args, grid.page_size, seq.index, first_key + number * tile_n0 + warp_m * Shape::copied, end);
    }

    // To a slot of the ring: the next tile of K, number `number`. A group even where there is no such tile: waits count
    // groups.
    __device__ __forceinline__ void start_k(int number, int slot) {
        start(k_copy, ring + slot * Shape::k_bytes, number);
    }

    __device__ __forceinline__ void start_v(int number, int slot) {
        start(v_copy, ring + stages * Shape::k_bytes + slot * Shape::v_bytes, number);
    }

    template <class Copy>
    __device__ __forceinline__ void start(Copy& copy, std::uint32_t target, int number) {
        if (number < tiles) {
            if constexpr (Row::paged_kv)
                copy.copy(target, places);
            else
                copy.copy(target, end - first_key - number * tile_n0);
            copy.advance(tile_n0);
        }
        copy_commit();
    }

    __device__ __forceinline__ void start_copies() {
        find_places(0);
        copy_queries();
        copy_commit();
#pragma unroll
        for (int number = 0; number < stages; ++number) {
            if (number > 0) {
                start_v(number - 1, number - 1);
                find_places(number);
            }
            start_k(number, number);
        }
        copy_wait<2 * stages - 1>();
        __syncthreads();
        if (!(args.scale > 0.0f)) {
            rescale_queries();
            __syncthreads();
        }
        tile.load_queries();
    }

    __device__ __forceinline__ void copy_queries() const {
        constexpr int pieces = Row::hdim_q / 8;
        const int hdim = static_cast<int>(args.hdim_q);
#pragma unroll
        for (int first = 0; first < tile_m0 * pieces; first += Shape::threads) {
            const int index = first + static_cast<int>(threadIdx.x), row = index / pieces, piece = index % pieces;
            if (tile_m0 * pieces % Shape::threads && row >= tile_m0) break;
            const bool exists = row < rows && (!Row::pad_d || piece * 8 < hdim);
            const T* source = element_of<const T>(args.q, row_at(row < rows ? row : 0)) + piece * 8;
            copy_async(shared + piece_offset<Row::hdim_q>(row, piece), source, exists);
        }
    }

    // The softmax insists on a positive scale: what is negative about it, or zero, goes to the queries.
    __device__ __forceinline__ void rescale_queries() const {
        const std::uint32_t kept = args.scale == 0.0f ? 0u : 0xffffffffu, flipped = args.scale == 0.0f ? 0 : 0x80008000u;
        for (int offset = threadIdx.x * 4; offset < Shape::q_bytes; offset += Shape::threads * 4) {
            std::uint32_t pair;
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(shared + offset) : "memory");
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared + offset), "r"((pair & kept) ^ flipped) : "memory");
        }
    }

    // ---- Scores

    // Row `row` of the block's tile.
    __device__ __forceinline__ QueryRow row_at(int row) const { return query_row(first_row + row, grid.heads); }

    // The row of the lane's elements 2 half and 2 half + 1 of the warp's 16 rows number m.
    __device__ __forceinline__ int tile_row(int m, int half) const {
        return warp_m * Shape::rows + 16 * m + 8 * half + lane / 4;
    }

    __device__ __forceinline__ int head_of(const QueryRow& at) const {
        return head_k * static_cast<int>(grid.heads.divisor) + at.head;
    }

    // Products become scores, -infinity where the query does not see the key. `all`: keys that every row sees.
    __device__ __forceinline__ void finish_scores(int key, KeyRange all) {
        const bool hidden = key < all.begin || all.end < key + keys;
        if (!Scores<Row>::finished && !hidden) return;
#pragma unroll
        for (int m = 0; m < atoms; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const QueryRow at = row_at(tile_row(m, half));
                const int first = key + lane % 4 * 2;
                if constexpr (Scores<Row>::finished) {
                    const float slope =
                        Row::bias == Bias::alibi && tile_row(m, half) < rows ? slope_of(args, seq.index, head_of(at)) : 0;
                    const int distance = first - window.center(at.query);
#pragma unroll
                    for (int n = 0; n < keys / 8; ++n)
#pragma unroll
                        for (int c = 0; c < 2; ++c) {
                            float& score = tile.s[m][n][2 * half + c];
                            score = scores.finish(score, slope, distance + 8 * n + c);
                        }
                }
                if (!hidden) continue;
                const KeyRange seen = window.visible(at.query);
#pragma unroll
                for (int n = 0; n < keys / 8; ++n)
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        const int column = 8 * n + c;
                        if (column < seen.begin - first || column >= seen.end - first)
                            tile.s[m][n][2 * half + c] = minus_infinity();
                    }
            }
    }

    // Scores become weights, relative to the largest score so far, or to an earlier one that was less than 2^8 times
    // smaller: they fit any type, and few tiles change what earlier tiles have accumulated.
    __device__ __forceinline__ void weigh() {
        float rescale[atoms][2];
        bool changed = false;
#pragma unroll
        for (int m = 0; m < atoms; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float& reference = max[m][half];
                float largest = minus_infinity();
#pragma unroll
                for (int n = 0; n < keys / 8; ++n)
                    largest = fmaxf(largest, fmaxf(tile.s[m][n][2 * half], tile.s[m][n][2 * half + 1]));
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 1));
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 2));
                const bool grows = (largest - reference) * scores.exponent > 8.0f;
                rescale[m][half] = grows ? exp2_approximate((reference - largest) * scores.exponent) : 1.0f;
                reference = grows ? largest : reference;
                changed |= grows;
                sum[m][half] *= rescale[m][half];
            }
        if (__any_sync(0xffffffff, changed))
#pragma unroll
            for (int m = 0; m < atoms; ++m)
#pragma unroll
                for (int n = 0; n < hdim_v / 8; ++n)
#pragma unroll
                    for (int c = 0; c < 4; ++c) tile.o[m][n][c] *= rescale[m][c / 2];
#pragma unroll
        for (int m = 0; m < atoms; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // A row that has seen no key: subtracting -infinity from itself would give NaN.
                const float zero = max[m][half] == minus_infinity() ? 0.0f : max[m][half] * scores.exponent;
#pragma unroll
                for (int n = 0; n < keys / 8; ++n)
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        float& weight = tile.s[m][n][2 * half + c];
                        weight = exp2_approximate(fmaf(weight, scores.exponent, -zero));
                        sum[m][half] += weight;
                    }
            }
    }

    // ---- Results

    template <class Element>
    __device__ __forceinline__ Element* element_of(const catalog_tensor& tensor, const QueryRow& at) const {
        return rows_of<Element>(tensor, seq.batch, head_of(at), seq.first_q + at.query, partial ? split : 0);
    }

    __device__ __forceinline__ RowEnd end_of(const QueryRow& at, float largest, float total) const {
        return end_of_row<Row>(args, largest, total, seq.index, head_of(at), window.center(at.query),
                               !partial || split == 0);
    }

    __device__ __forceinline__ void store_lse(const QueryRow& at, float lse) const {
        if constexpr (partial || Row::lse) *element_of<float>(partial ? args.lse_acc : args.lse, at) = lse;
    }

    // The lane's maxima and sums, now of whole rows; maxima in units of log2.
    __device__ __forceinline__ void complete_rows() {
#pragma unroll
        for (int m = 0; m < atoms; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                max[m][half] *= scores.exponent;
                sum[m][half] += __shfl_xor_sync(0xffffffff, sum[m][half], 1);
                sum[m][half] += __shfl_xor_sync(0xffffffff, sum[m][half], 2);
            }
    }

    // Where no other group has part in the rows. 16-bit results take the way through the warp's rows of Q.
    __device__ __forceinline__ void store() {
        const std::uint32_t staged = shared + warp_m * Shape::rows * Row::hdim_q * 2;
        complete_rows();
        __syncwarp();
#pragma unroll
        for (int m = 0; m < atoms; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = tile_row(m, half);
                const QueryRow at = row_at(row < rows ? row : 0);
                const RowEnd row_end = end_of(at, max[m][half], sum[m][half]);
                if (row < rows && lane % 4 == 0) store_lse(at, row_end.lse);
                float* target = partial ? element_of<float>(args.o_acc, at) : nullptr;
#pragma unroll
                for (int n = 0; n < hdim_v / 8; ++n) {
                    const float first = tile.o[m][n][2 * half] * row_end.normalize;
                    const float second = tile.o[m][n][2 * half + 1] * row_end.normalize;
                    if constexpr (partial) {
                        if (row < rows && 8 * n < hdim)
                            *reinterpret_cast<float2*>(target + 8 * n + lane % 4 * 2) = make_float2(first, second);
                    } else {
                        const std::uint32_t offset = piece_offset<hdim_v>(16 * m + 8 * half + lane / 4, n);
                        asm volatile("st.shared.u32 [%0], %1;" ::"r"(staged + offset + lane % 4 * 4),
                                     "r"(pack<T>(first, second))
                                     : "memory");
                    }
                }
            }
        if constexpr (!partial) store_staged(staged);
    }

    __device__ __forceinline__ void store_staged(std::uint32_t staged) const {
        constexpr int pieces = hdim_v / 8;
        __syncwarp();
#pragma unroll
        for (int first = 0; first < Shape::rows * pieces; first += 32) {
            const int index = first + lane, row = index / pieces, piece = index % pieces;
            const int in_tile = warp_m * Shape::rows + row;
            uint4 data;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(data.x), "=r"(data.y), "=r"(data.z), "=r"(data.w)
                         : "r"(staged + piece_offset<hdim_v>(row, piece))
                         : "memory");
            if (in_tile < rows && piece * 8 < hdim)
                *reinterpret_cast<uint4*>(element_of<typename Row::otype>(args.o, row_at(in_tile)) + piece * 8) = data;
        }
    }

    // Every group has weighed its keys by itself.
    __device__ __forceinline__ void merge() {
        extern __shared__ __align__(1024) float merged[];
        float* maxima = merged + Shape::merge_rows * Shape::merge_stride;
        float* sums = maxima + Shape::merge_rows;
        complete_rows();
        __syncthreads();
#pragma unroll
        for (int m = 0; m < atoms; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = warp_n * tile_m0 + tile_row(m, half);
                if (lane % 4 == 0) {
                    maxima[row] = max[m][half];
                    sums[row] = sum[m][half];
                }
#pragma unroll
                for (int n = 0; n < hdim_v / 8; ++n)
                    *reinterpret_cast<float2*>(merged + row * Shape::merge_stride + 8 * n + lane % 4 * 2) =
                        make_float2(tile.o[m][n][2 * half], tile.o[m][n][2 * half + 1]);
            }
        __syncthreads();
        for (int index = threadIdx.x; index < rows * (hdim_v / 4); index += Shape::threads)
            merge_piece(index / (hdim_v / 4), index % (hdim_v / 4) * 4, merged, maxima, sums);
    }

    // Four columns of a row.
    __device__ __forceinline__ void merge_piece(int row, int column, const float* merged, const float* maxima,
                                                const float* sums) const {
        float largest = minus_infinity(), total = 0.0f;
#pragma unroll
        for (int group = 0; group < Shape::waves_n; ++group) largest = fmaxf(largest, maxima[group * tile_m0 + row]);
        const float reference = largest == minus_infinity() ? 0.0f : largest;
        float4 o = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int group = 0; group < Shape::waves_n; ++group) {
            const int place = group * tile_m0 + row;
            const float weight = exp2_approximate(maxima[place] - reference);
            const float4 part = *reinterpret_cast<const float4*>(merged + place * Shape::merge_stride + column);
            total = fmaf(sums[place], weight, total);
            o = make_float4(fmaf(part.x, weight, o.x), fmaf(part.y, weight, o.y), fmaf(part.z, weight, o.z),
                            fmaf(part.w, weight, o.w));
        }
        const QueryRow at = row_at(row);
        const RowEnd row_end = end_of(at, largest, total);
        if (column == 0) store_lse(at, row_end.lse);
        if (column >= hdim) return;
        const float scale = row_end.normalize;
        if constexpr (partial)
            *reinterpret_cast<float4*>(element_of<float>(args.o_acc, at) + column) =
                make_float4(o.x * scale, o.y * scale, o.z * scale, o.w * scale);
        else
            *reinterpret_cast<uint2*>(element_of<typename Row::otype>(args.o, at) + column) =
                make_uint2(pack<T>(o.x * scale, o.y * scale), pack<T>(o.z * scale, o.w * scale));
    }

    const catalog_args& args;
    const MmaGrid& grid;
    const Sequence& seq;
    const int head_k, split, first_row, hdim, rows;  // hdim of V; rows that exist of the tile's
    const int lane, warp_m, warp_n;
    const std::uint32_t shared;
    const Window<Row::mask> window;
    const Scores<Row> scores;
    KvCopy<Row, Row::hdim_q, Shape::copied, Row::pad_d> k_copy;
    KvCopy<Row, hdim_v, Shape::copied, Row::pad_dv> v_copy;
    Places<Shape::copied> places;
    MmaTile<Row> tile;

    int tiles, first_key, end;  // of this group; no row sees keys from `end` on
    std::uint32_t ring;         // the group's stages of K, then those of V
    float max[atoms][2], sum[atoms][2];  // of the lane's rows: what weights are relative to, the lane's part of the sum
};

template <class Row, bool partial>
__global__ void __launch_bounds__(MmaShape<Row>::threads, MmaShape<Row>::blocks)
    attend_mma(const __grid_constant__ catalog_args args, const __grid_constant__ MmaGrid grid) {
    extern __shared__ __align__(1024) unsigned char shared[];
    // Heads of one sequence are worked on at the same time; the last tiles, which see most under a causal mask, first.
    const int nhead_k = static_cast<int>(args.nhead_k), batch = static_cast<int>(args.batch);
    const int splits = partial ? static_cast<int>(args.num_splits) : 1;
    int index = static_cast<int>(blockIdx.x);
    const int head_k = index % nhead_k;
    index /= nhead_k;
    const int sequence = index % batch;
    index /= batch;
    const int first_row = (grid.tiles - 1 - index / splits) * Row::tile_m0;
    const Sequence seq = sequence_of<Row>(args, sequence);
    if constexpr (partial) let_next_kernel_start();
    if (first_row >= seq.seqlen_q * static_cast<int>(grid.heads.divisor)) return;
    MmaAttention<Row, partial>(args, grid, seq, head_k, index % splits, first_row, shared_address(shared)).run();
}

template <class Row, bool partial>
inline catalog_status launch_attend_mma(const catalog_args& args, cudaStream_t stream) {
    using Shape = MmaShape<Row>;
    if (!has_queries(args)) return CATALOG_OK;
    const std::int64_t heads = heads_per_kv_head(args);
    const std::int64_t tiles = (args.seqlen_q * heads + Row::tile_m0 - 1) / Row::tile_m0;
    const std::int64_t splits = partial ? args.num_splits : 1;
    std::int64_t blocks;
    if (__builtin_mul_overflow(tiles * splits, args.batch * args.nhead_k, &blocks) || blocks > INT_MAX)
        return CATALOG_BAD_ARGUMENT;
    const auto kernel = attend_mma<Row, partial>;
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::shared_bytes) != cudaSuccess)
        return launched(), CATALOG_DEVICE_ERROR;
    const MmaGrid grid{static_cast<int>(tiles), Divisor(heads), Divisor(Row::paged_kv ? args.page_size : 1)};
    kernel<<<static_cast<unsigned>(blocks), Shape::threads, Shape::shared_bytes, stream>>>(args, grid);
    return launched();
}

}  // namespace catalog::cuda
