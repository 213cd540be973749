// The main stage of backward for elements of 32 bits, which tensor cores multiply in two parts: see tf32.hpp.
//
// While a tile of queries is worked on, the next one is copied. Weights and their gradients go through shared memory to
// the warps that multiply them with dO, Q and K.
#pragma once

#include "bwd_tile_mma.hpp"
#include "bwd_scores.hpp"
#include "cuda/common/matrix_rows.hpp"
#include "cuda/mma.hpp"

namespace catalog::cuda {

template <class Row>
class MmaBackward : BackwardScores<Row> {
    using Base = BackwardScores<Row>;
    using typename Base::Tile;
    using Base::args, Base::base, Base::lane, Base::m, Base::warp, Base::work;

   public:
    __device__ __forceinline__ MmaBackward(const catalog_args& args, std::uint32_t base)
        : MmaBackward(args, base, __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0)) {}

    __device__ __forceinline__ void run() {
        float dk[Tile::columns_k / 2], dv[Tile::columns_v / 2];
        Base::clear(dk);
        Base::clear(dv);
        if (work.begin() < work.end()) {
            const int first_token = work.first_k() + Base::first_key(), present = work.seqlen_k() - Base::first_key();
            copy<Tile::n, Row::hdim_q>(Tile::k_at, args.k, args.hdim_q, work.head_k(), first_token, present);
            copy<Tile::n, Row::hdim_v>(Tile::v_at, args.v, args.hdim_v, work.head_k(), first_token, present);
            visit_all(dk, dv);
        }
        store(dk, args.dk, args.hdim_q, Base::final_scale());
        store(dv, args.dv, args.hdim_v, Base::final_scale_v());
        if constexpr (Row::dropout)
            if (args.randval.data) Base::store_random_bytes(static_cast<int>(threadIdx.x), Tile::threads);
    }

   private:
    __device__ __forceinline__ MmaBackward(const catalog_args& args, std::uint32_t base, int number)
        : Base(args, base, 0, number % Tile::key_groups), number(number), share(number / Tile::key_groups) {}

    // Columns of eight that are multiplied alternately: none waits for the last one.
    static constexpr int together = 4;

    // Each warp finds the tiles for itself.
    __device__ __forceinline__ void visit_all(float (&dk)[Tile::columns_k / 2], float (&dv)[Tile::columns_v / 2]) {
        int tile = -1, of_head = 0, stage = 0;  // what is copied and not yet multiplied; stage: where the next one goes
        const auto multiply = [&] { visit(of_head, tile, stage ^ 1, dk, dv); };
        const auto await_copies = [&] {
            copy_wait<0>();
            __syncthreads();  // everybody is done with the tile before, too
        };
        for (int head = 0; head < work.heads(); ++head) {
            TileWalk<Row> walk(args, work, head);
            for (int next = walk.first(); next < work.end(); next = walk.after(next)) {
                if (tile >= 0) await_copies();
                load(head, next, stage);
                if constexpr (Row::block_mask)
                    if (threadIdx.x == 0) Visit{next, head, walk.halves()}.store(Tile::visit_at(base, stage));
                if (tile >= 0) multiply();
                tile = next;
                of_head = head;
                stage ^= 1;
            }
        }
        if (tile < 0) return;
        await_copies();
        multiply();
    }

    // `rows` rows of a head from a token on, of which `present` exist; others, and columns that do not, are zeros.
    template <int rows, int hdim>
    __device__ __forceinline__ void copy(int to, const catalog_tensor& tensor, std::int64_t hdim_stored, int head,
                                         int first_token, int present) const {
        constexpr int pieces = hdim / 4;
        static_assert(rows * pieces % Tile::threads == 0);
        const float* const from =
            static_cast<const float*>(tensor.data) + offset_of(tensor, work.batch(), head, first_token);
#pragma unroll
        for (int i = 0; i < rows * pieces; i += Tile::threads) {
            const int place = i + static_cast<int>(threadIdx.x), row = place / pieces, piece = place % pieces;
            copy_async(base + to + piece_offset<hdim * 4>(row, piece), from + row * tensor.stride_seqlen + 4 * piece,
                       row < present && 4 * piece < hdim_stored);
        }
    }

    // Q, dO, LSE and delta of a tile. `head` counts from the group's first.
    __device__ __forceinline__ void load(int head, int tile, int stage) const {
        const int first = tile * m, present = work.seqlen_q() - first, first_token = work.first_q() + first;
        const int head_q = work.head_k() * work.heads() + head;
        copy<m, Row::hdim_q>(Tile::q_at + stage * Tile::q_bytes, args.q, args.hdim_q, head_q, first_token, present);
        copy<m, Row::hdim_v>(Tile::grad_o_at + stage * Tile::grad_o_bytes, args.grad_o, args.hdim_v, head_q,
                             first_token, present);
        copy_commit();
        const int row = static_cast<int>(threadIdx.x) % m;
        const auto number_of_row = [&](const catalog_tensor& tensor) {
            return __ldg(static_cast<const float*>(tensor.data) +
                         offset_of(tensor, work.batch(), head_q, first_token + row));
        };
        if (threadIdx.x < m) {
            const float slope = shifts_lse<Row> ? slope_of(args, work.index(), head_q) : 0.0f;
            const float lse = row < present ? number_of_row(args.lse) : infinity();
            store_number(base + Tile::lse_at + stage * Tile::row_bytes + row * 4,
                         row < present ? lse_of_weights<Row>(lse, slope, first + row + work.diagonal()) : lse);
        } else if (threadIdx.x < 2 * m) {
            const float delta = row < present ? delta_of_weights<Row>(args, number_of_row(args.delta)) : 0.0f;
            store_number(base + Tile::delta_at + stage * Tile::row_bytes + row * 4, delta);
        }
    }

    __device__ __forceinline__ void visit(int head, int tile, int stage, float (&dk)[Tile::columns_k / 2],
                                          float (&dv)[Tile::columns_v / 2]) {
        constexpr int columns = Tile::columns;
        const int q = Tile::q_at + stage * Tile::q_bytes, grad_o = Tile::grad_o_at + stage * Tile::grad_o_bytes;
        const int first_column = share * columns;
        float s[columns / 2], dp[columns / 2];
        multiply_rows<Row::hdim_q>(Tile::k_at, q, s);
        multiply_rows<Row::hdim_v>(Tile::v_at, grad_o, dp);
        const std::uint32_t first = base + row_of_key() * Tile::weight_row + (first_column + 2 * (lane % 4)) * 4;
        const auto put_at = [&](int at) {
            return [=](int j, int half, float x, float y) {
                store_shared(first + at + half * 8 * Tile::weight_row + 32 * j, x, y);
            };
        };
        const auto put_weights = put_at(Tile::p_at);
        if constexpr (Row::logits) {
            Base::template weigh_capped<columns>(head, tile, first_column, stage, s, put_weights);
        } else {
            Base::template weigh<columns>(head, tile, first_column, stage, s);
#pragma unroll
            for (int i = 0; i < columns / 2; i += 2)
                put_weights(i / 4, i / 2 % 2, Base::kept_weight(s[i]), Base::kept_weight(s[i + 1]));
        }
        Base::template differentiate<columns>(head, tile, first_column, stage, s, dp, put_at(Tile::ds_at));
        __syncthreads();
        add_columns<Row::hdim_v>(Tile::p_at, grad_o, dv);
        add_columns<Row::hdim_q>(Tile::ds_at, q, dk);
        float dq[Tile::columns_q / 2];
        multiply_keys(dq);
        add_dq(head, tile, dq);
    }

    // The first of the lane's two rows of keys.
    __device__ __forceinline__ int row_of_key() const { return warp * 16 + lane / 4; }

    // The warp's keys of one operand times its queries of the other: rows of shared memory along the head dim.
    template <int hdim>
    __device__ __forceinline__ void multiply_rows(int of_keys, int of_queries, float (&sums)[Tile::columns / 2]) const {
        constexpr int columns = Tile::columns, at_once = columns == 8 ? 2 : 1;  // steps whose queries are loaded together
        Base::clear(sums);
        auto* const c = reinterpret_cast<float(*)[4]>(sums);
        const MatrixRows<hdim * 4> keys(base + of_keys, 16 * warp + lane % 16, lane / 16);
        const MatrixRows<hdim * 4> queries(base + of_queries, share * columns + lane % 8 + (at_once == 1 ? lane / 16 * 8 : 0),
                                           at_once == 1 ? lane / 8 % 2 : lane / 8);
#pragma unroll 4
        for (int step = 0; step < hdim / 8; step += at_once) {
            std::uint32_t bits[4];
            if constexpr (at_once == 2) {
                load_matrices(queries.at(0, step), bits);
                const TwoTf32<2> b[2] = {TwoTf32<2>({bits[0], bits[1]}), TwoTf32<2>({bits[2], bits[3]})};
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    load_matrices(keys.at(0, step + i), bits);
                    add_products<1>(c, TwoTf32<4>(bits), {b[i]});
                }
            } else {
                load_matrices(keys.at(0, step), bits);
                const TwoTf32<4> a(bits);
#pragma unroll
                for (int j = 0; j < columns / 8; j += 2) {
                    load_matrices(queries.at(8 * j, step), bits);
                    add_products<2>(c + j, a, {TwoTf32<2>({bits[0], bits[1]}), TwoTf32<2>({bits[2], bits[3]})});
                }
            }
        }
    }

    // Adds rows of weights, of the warp's keys, times columns of dO or Q. Of every eight queries a lane has two neighbours,
    // where mma.sync expects queries that are four apart.
    template <int hdim, int count>
    __device__ __forceinline__ void add_columns(int weights, int rows, float (&sums)[count]) const {
        const ValueRows<hdim> queries(base + rows, lane);
        const std::uint32_t of_lane = base + weights + row_of_key() * Tile::weight_row + lane % 4 * 8;
#pragma unroll 1
        for (int first = 0; first < m; first += 8) {
            const std::uint32_t address = of_lane + first * 4;
            const float2 x = load_pair(address), y = load_pair(address + 8 * Tile::weight_row);
            add_row_products(two_parts(x.x, y.x, x.y, y.y), queries, first, share * (2 * count / 8), sums);
        }
    }

    // dQ of the warp's queries: keys of every eight are in the same order.
    __device__ __forceinline__ void multiply_keys(float (&dq)[Tile::columns_q / 2]) const {
        Base::clear(dq);
        const ValueRows<Row::hdim_q> keys(base + Tile::k_at, lane);
        const int query = number % Tile::query_groups * 16 + lane / 4;
        const std::uint32_t of_lane = base + Tile::ds_at + lane % 4 * 2 * Tile::weight_row + query * 4;
#pragma unroll 1
        for (int first = 0; first < Tile::n; first += 8) {
            const std::uint32_t x = of_lane + first * Tile::weight_row, y = x + Tile::weight_row;
            add_row_products(two_parts(load_number(x), load_number(x + 32), load_number(y), load_number(y + 32)), keys,
                             first, number / Tile::query_groups * (Tile::columns_q / 8), dq);
        }
    }

    // Eight rows from `first` on, in columns from 8 `column` on.
    template <class Rows, int count>
    static __device__ __forceinline__ void add_row_products(const TwoTf32<4>& a, const Rows& rows, int first, int column,
                                                            float (&sums)[count]) {
        auto* const c = reinterpret_cast<float(*)[4]>(sums);
#pragma unroll
        for (int j = 0; j < count / 4; j += together) {
            TwoTf32<2> b[together];
#pragma unroll
            for (int i = 0; i < together; ++i) b[i] = rows.load(first, column + j + i);
            add_products<together>(c + j, a, b);
        }
    }

    static __device__ __forceinline__ TwoTf32<4> two_parts(float x0, float x1, float x2, float x3) {
        return TwoTf32<4>({__float_as_uint(x0), __float_as_uint(x1), __float_as_uint(x2), __float_as_uint(x3)});
    }

    // In the block's turn, where results must be the same bits every time.
    __device__ __forceinline__ void add_dq(int head, int tile, const float (&dq)[Tile::columns_q / 2]) {
        const Turns<Row> turns{args, work, head};
        if constexpr (Row::deterministic) {
            if (threadIdx.x == 0) {
                for (; counted_head < head; ++counted_head)
                    work.template next_head<Row>(args);
                turns.wait(tile);
            }
            __syncthreads();
        }
        const float scale = Base::final_scale();
        const int query = tile * m + number % Tile::query_groups * 16 + lane / 4;
        const int first_column = number / Tile::query_groups * Tile::columns_q + 2 * (lane % 4);
        float* const row = static_cast<float*>(args.dq_acc.data) + first_column +
                           offset_of(args.dq_acc, work.batch(), work.head_k() * work.heads() + head, work.first_q() + query);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (query + 8 * half >= work.seqlen_q()) continue;
            float* const to = row + 8 * half * args.dq_acc.stride_seqlen;
#pragma unroll
            for (int i = 0; i < Tile::columns_q / 2; i += 4)
                if (first_column + 2 * i < args.hdim_q)
                    add_two(to + 2 * i, dq[i + 2 * half] * scale, dq[i + 2 * half + 1] * scale);
        }
        if constexpr (Row::deterministic) {
            __syncthreads();
            if (threadIdx.x == 0) turns.pass(tile);
        }
    }

    template <int count>
    __device__ __forceinline__ void store(const float (&sums)[count], const catalog_tensor& tensor, std::int64_t hdim,
                                          float scale) const {
        const int first_column = share * 2 * count + 2 * (lane % 4);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int key = Base::first_key() + row_of_key() + 8 * half;
            if (key >= work.seqlen_k()) continue;
            float* const row = static_cast<float*>(tensor.data) + first_column +
                               offset_of(tensor, work.batch(), work.head_k(), work.first_k() + key);
#pragma unroll
            for (int i = 0; i < count; i += 4)
                if (first_column + 2 * i < hdim)
                    *reinterpret_cast<float2*>(row + 2 * i) =
                        make_float2(sums[i + 2 * half] * scale, sums[i + 2 * half + 1] * scale);
        }
    }

    static __device__ __forceinline__ float load_number(std::uint32_t address) {
        float x;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
        return x;
    }

    static __device__ __forceinline__ void add_two(float* to, float x, float y) {
        asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
    }

    const int number, share;  // the warp's, among those of the block, and among those with its keys
    int counted_head = 0;     // the head whose counters are in memory
};

}  // namespace catalog::cuda
