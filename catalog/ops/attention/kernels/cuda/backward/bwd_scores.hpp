// The main stage of backward: weights and their gradients in registers, of any warp. Scores are transposed, keys by
// queries: a warp has 16 keys, and a lane of these two, 8 apart, with two of every eight queries.
//
// With P = exp(S - LSE), dV = P^T dO, dP = dO V^T, dS = P * (dP - delta), dK = scale dS^T Q and dQ = scale dS K.
//
// With dropout P is Z * P in dV, and dP is Z * (dO V^T), where Z are the factors of the forward. No weight is negative:
// the sign of one that is dropped is flipped.
//
// Under a soft cap, S = c tanh(x / c), dS is multiplied by the cap's slope, 1 - tanh^2: P^T times the slope takes the
// registers of S^T.
#pragma once

#include "bwd_walk.hpp"
#include "cuda/common/dropout.hpp"

namespace catalog::cuda {

template <class Row>
class BackwardScores {
   public:
    // `warp` is its number among those of the warpgroup, which has 64 keys unless all have the same.
    __device__ __forceinline__ BackwardScores(const catalog_args& args, std::uint32_t base, int warpgroup, int warp)
        : args(args),
          base(base),
          work{base + Tile::work_at},
          warpgroup(warpgroup),
          warp(warp),
          lane(threadIdx.x % 32) {}

   protected:
    using Tile = BackwardTile<Row>;
    using T = typename Row::dtype;
    static constexpr int m = Tile::m;

    template <int count>
    static __device__ __forceinline__ void clear(float (&registers)[count]) {
#pragma unroll
        for (int i = 0; i < count; ++i) registers[i] = 0;
    }

    __device__ __forceinline__ Visit visit_of(int stage) const { return Visit::load(Tile::visit_at(base, stage)); }

    __device__ __forceinline__ int first_key() const { return work.first_key(); }

    // The first key of this thread's rows, counted from the first of the block.
    __device__ __forceinline__ int first_row() const {
        return (Tile::divides_hdim ? 0 : warpgroup * 64) + warp * 16 + lane / 4;
    }

    // Where a thread's elements of S^T are in a tensor of queries by keys, four of every eight queries: element i is of
    // query i % 2 and key i / 2 * 8, both counted from `first`.
    template <class Element>
    struct Pairs {
        Element* first;
        std::int64_t stride;
        int queries, keys;  // that there are from `first` on

        __device__ __forceinline__ Pairs(const BackwardScores& group, const catalog_tensor& tensor, int head,
                                         int first_query)
            : stride(tensor.stride_seqlen) {
            const int query = first_query + 2 * (group.lane % 4), key = group.first_key() + group.first_row();
            queries = group.work.seqlen_q() - query;
            keys = group.work.seqlen_k() - key;
            first = static_cast<Element*>(tensor.data) +
                    offset_of(tensor, group.work.batch(), group.work.head_k() * group.work.heads() + head,
                              group.work.first_q() + query) +
                    key;
        }

        __device__ __forceinline__ bool has(int i) const { return i % 2 < queries && i / 2 * 8 < keys; }
        __device__ __forceinline__ Element* at(int i) const { return first + i % 2 * stride + i / 2 * 8; }

        __device__ __forceinline__ void advance() {
            first += 8 * stride;
            queries -= 8;
            asm volatile("" : "+l"(first), "+r"(queries));  // or there would be registers for each step
        }
    };

    // P^T from S^T, for the columns of a tile from `first_column` on. `head` counts from the group's first.
    template <int columns>
    __device__ __forceinline__ void weigh(int head, int tile, int first_column, int stage,
                                          float (&s)[columns / 2]) const {
        const int first_query = tile * m + first_column;
        const float scale = args.scale * log2_e;
        const int column = 2 * (lane % 4);
        const std::uint32_t lse = base + Tile::lse_at + stage * Tile::row_bytes + (first_column + column) * 4;
        [[maybe_unused]] float slope = 0, distance = 0;
        if constexpr (Row::bias == Bias::alibi) {
            slope = slope_of(args, work.index(), work.head_k() * work.heads() + head) * log2_e;
            distance = static_cast<float>(first_distance(first_query));
        }
        [[maybe_unused]] Pairs<const T> biases(*this, args.bias, head, first_query);
#pragma unroll
        for (int j = 0; j < columns / 8; ++j) {
            const float2 of_rows = load_pair(lse + 32 * j);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float x = fmaf(s[4 * j + i], scale, i % 2 ? -of_rows.y : -of_rows.x);
                if constexpr (Row::bias == Bias::alibi) {
                    const float d = distance + static_cast<float>(i / 2 * 8 - (8 * j + i % 2));
                    x = fmaf(Row::mask == Mask::causal ? d : -fabsf(d), slope, x);
                }
                if constexpr (Row::bias == Bias::bias)
                    if (biases.has(i)) x = fmaf(static_cast<float>(*biases.at(i)), log2_e, x);
                s[4 * j + i] = exp2_approximate(x);
            }
            if constexpr (Row::bias == Bias::bias) biases.advance();
        }
        if (!all_visible(tile * m, stage)) hide<columns>(first_query, stage, s);
        if constexpr (Row::dropout) drop<columns>(head, first_query, s);
    }

    // The number of a head of the group, among those of all sequences.
    __device__ __forceinline__ int number_of(int head) const {
        return work.index() * static_cast<int>(args.nhead_q) + work.head_k() * work.heads() + head;
    }

    // A warp's keys are those of one call of Philox, and every lane draws for some of the queries.
    template <int columns>
    __device__ __forceinline__ void drop(int head, int first_query, float (&p)[columns / 2]) const {
        static_assert(columns <= 128);
        const Dropout dropout = dropout_of(args);
        const int key = first_key() + first_row() - lane / 4, number = number_of(head);
        std::uint32_t kept[2] = {};  // of 32 queries in each half
#pragma unroll
        for (int i = 0; i < columns; i += 32)
            kept[i / 64] |= dropout.kept(number, first_query + i + lane, key) << i / 32 % 2 * 16;
#pragma unroll
        for (int column = 0; column < 32; column += 8)
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int pair = 0; pair < (columns + 63) / 64; ++pair) {
                    const std::uint32_t mine =
                        __shfl_sync(~0u, kept[pair], column + 2 * (lane % 4) + i) >> lane / 4;
#pragma unroll
                    for (int of_pair = 0; of_pair < 2; ++of_pair) {
                        const int j = (64 * pair + 32 * of_pair + column) / 8;
                        if (8 * j >= columns) continue;
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            float& weight = p[4 * j + 2 * half + i];
                            weight = mine >> 16 * of_pair + 8 * half & 1 ? weight : -weight;
                        }
                    }
                }
    }

    // Of all queries, seen or not, and the keys of the block; by `threads` threads, of which this is number `thread`.
    __device__ __forceinline__ void store_random_bytes(int thread, int threads) const {
        const Dropout dropout = dropout_of(args);
        constexpr int chunks = Tile::n / philox_keys;
        const int queries = work.seqlen_q(), key = first_key() + thread % chunks * philox_keys;
        for (int head = 0; head < work.heads(); ++head)
            for (int query = thread / chunks; query < queries; query += threads / chunks)
                dropout.store(static_cast<std::uint8_t*>(args.randval.data) +
                                  offset_of(args.randval, work.batch(), work.head_k() * work.heads() + head,
                                            work.first_q() + query),
                              number_of(head), query, key, work.seqlen_k());
    }

    // Key - query - diagonal of this thread's first element.
    __device__ __forceinline__ int first_distance(int first_query) const {
        const int key = first_key() + first_row();
        return key - work.diagonal() - first_query - 2 * (lane % 4);
    }

    // Whether the block mask shows this thread's keys to the queries of a stage.
    __device__ __forceinline__ bool is_named(int stage) const {
        const int half = Tile::n > 64 ? warpgroup : 0;
        return visit_of(stage).halves >> half & 1;
    }

    // Whether every query of a tile sees every key of the block; queries behind the last one do not count.
    __device__ __forceinline__ bool all_visible(int first_query, int stage) const {
        bool all = first_key() + Tile::n <= work.seqlen_k();
        if constexpr (Row::block_mask) all &= is_named(stage);
        if constexpr (Row::mask != Mask::none)
            all &= first_key() + Tile::n - 1 - first_query - work.diagonal() <= work.right();
        if constexpr (Row::mask == Mask::generic)
            all &= first_key() - (first_query + m - 1) - work.diagonal() >= -work.left();
        return all;
    }

    // Which queries, counted from the first of a thread's columns, see one of its keys.
    struct Seeing {
        int least, most;

        __device__ __forceinline__ bool has(int column) const {
            return column >= least && (Row::mask != Mask::generic || column <= most);
        }
    };

    // Of the keys of the first or second half of a thread's rows.
    template <int columns>
    __device__ __forceinline__ Seeing seeing(int first_query, int half, int stage) const {
        const int key = first_key() + first_row() + 8 * half;
        const int distance = first_distance(first_query) + 8 * half;
        if constexpr (Row::block_mask)
            if (!is_named(stage)) return {columns, columns};
        return {key < work.seqlen_k() ? distance - work.right() : columns, distance + work.left()};
    }

    template <int columns>
    __device__ __forceinline__ void hide(int first_query, int stage, float (&p)[columns / 2]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Seeing queries = seeing<columns>(first_query, half, stage);
#pragma unroll
            for (int j = 0; j < columns / 8; ++j)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    if (!queries.has(8 * j + i)) p[4 * j + 2 * half + i] = 0;
        }
    }

    // Under a soft cap: `put(j, half, x, y)` is called with the weights of two queries from 8 j on and a key. S^T becomes
    // the factor of dP - delta.
    template <int columns, class Put>
    __device__ __forceinline__ void weigh_capped(int head, int tile, int first_column, int stage, float (&s)[columns / 2],
                                                 const Put& put) const {
        const int first_query = tile * m + first_column;
        const float cap = args.logits_soft_cap * log2_e, scale = __fdividef(args.scale, args.logits_soft_cap);
        const std::uint32_t lse =
            base + Tile::lse_at + stage * Tile::row_bytes + (first_column + 2 * (lane % 4)) * 4;
        const bool all = all_visible(tile * m, stage);
        const Seeing queries[2] = {seeing<columns>(first_query, 0, stage), seeing<columns>(first_query, 1, stage)};
#pragma unroll
        for (int j = 0; j < columns / 8; ++j) {
            const float2 of_rows = load_pair(lse + 32 * j);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float p[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& score = s[4 * j + 2 * half + i];
                    const float tanh = tanh_exact(score * scale);
                    p[i] = exp2_approximate(fmaf(tanh, cap, i ? -of_rows.y : -of_rows.x));
                    if (!all && !queries[half].has(8 * j + i)) p[i] = 0;
                    score = p[i] * fmaf(-tanh, tanh, 1.0f);
                }
                put(j, half, p[0], p[1]);
            }
        }
    }

    // dS^T from P^T and dP^T: `put` as above.
    template <int columns, class Put>
    __device__ __forceinline__ void differentiate(int head, int tile, int first_column, int stage,
                                                  const float (&p)[columns / 2], const float (&dp)[columns / 2],
                                                  const Put& put) const {
        const std::uint32_t delta =
            base + Tile::delta_at + stage * Tile::row_bytes + first_column * 4 + lane % 4 * 8;
        const float kept_scale = Row::dropout ? dropout_of(args).scale : 1.0f;
        const float scale = Tile::scales_ds ? args.scale * kept_scale : kept_scale;
        [[maybe_unused]] Pairs<T> dbias(*this, args.dbias, head, tile * m + first_column);
        if (Row::dbias && slice_of<Row>() > 0) dbias.queries = 0;  // the first slice's block stores it
#pragma unroll
        for (int j = 0; j < columns / 8; ++j) {
            const float2 of_rows = load_pair(delta + 32 * j);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = 4 * j + 2 * half;
                const float x = weight_of(p[i]) * fmaf(dp[i], scale_of(p[i], scale), -of_rows.x);
                const float y = weight_of(p[i + 1]) * fmaf(dp[i + 1], scale_of(p[i + 1], scale), -of_rows.y);
                put(j, half, x, y);
                if constexpr (Row::dbias) store_two(dbias, 2 * half, x, y);
            }
            if constexpr (Row::dbias) dbias.advance();
        }
    }

    static __device__ __forceinline__ float weight_of(float p) { return Row::dropout ? fabsf(p) : p; }
    static __device__ __forceinline__ float kept_weight(float p) { return Row::dropout ? fmaxf(p, 0.0f) : p; }
    static __device__ __forceinline__ float scale_of(float p, float scale) {
        return Row::dropout && p < 0.0f ? 0.0f : scale;
    }

    // What sums of dK or dQ, and of dV, still lack.
    __device__ __forceinline__ float final_scale() const { return Tile::scales_ds ? 1.0f : args.scale; }
    __device__ __forceinline__ float final_scale_v() const { return Row::dropout ? dropout_of(args).scale : 1.0f; }

    const catalog_args& args;
    const std::uint32_t base;
    WorkInMemory work;
    const int warpgroup, warp, lane;

   private:
    static __device__ __forceinline__ void store_two(const Pairs<T>& to, int first, float x, float y) {
        if constexpr (sizeof(T) == 4) {
            if (to.has(first)) *to.at(first) = x;
            if (to.has(first + 1)) *to.at(first + 1) = y;
        } else {
            const std::uint32_t both = pack<T>(x, y);
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (to.has(first + i))
                    *reinterpret_cast<std::uint16_t*>(to.at(first + i)) = static_cast<std::uint16_t>(both >> 16 * i);
        }
    }
};

}  // namespace catalog::cuda
