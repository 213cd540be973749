// A warpgroup of the forward kernel that computes: 64 queries of a tile against their keys, from the last to the first.
// Blocks of keys that only other warpgroups of the tile see cost it nothing but its turn.
//
// While the tensor cores multiply the weights of one block of keys with its values, the warpgroup turns the scores of
// the next block into weights. The warpgroups take turns at issuing products, so that one is in its softmax while the
// tensor cores work for another.
#pragma once

#include "fwd_wgmma_shared.hpp"
#include "fwd_wgmma_softmax.hpp"
#include "cuda/lanes.hpp"
#include "cuda/wgmma.hpp"

namespace catalog::cuda {

template <class Row>
class FwdConsumer {
    using T = typename Row::dtype;
    using O = typename Row::otype;
    using Shared = FwdShared<Row>;

    static constexpr int keys = Row::tile_n0;
    static constexpr int depth = 32 / sizeof(T);  // of one product

   public:
    // `group` is the warpgroup's number among those that compute.
    __device__ __forceinline__ FwdConsumer(const FwdCall& call, std::uint32_t shared, int group)
        : call(call),
          shared(shared),
          group(group),
          first_row(64 * group + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane() / 4) {}

    // `tile` is the first one.
    __device__ __forceinline__ void run(TileIndex tile) {
        if (group == Shared::groups - 1) let_go();
        for (int round = 0; round < call.rounds; ++round) {
            const auto find_next = [&] {
                tile = tile_of<Row>(call, shared, round + 1);
                tile.pin();
            };
            if (!tile.exists()) {
                find_next();
                continue;
            }
            const Work<Row> work(call, tile);
            Softmax<Row> softmax(call, work, work.first_query + first_row);
#pragma unroll
            for (float& x : o) x = 0.0f;
            if (work.has_queries() && work.has_keys())
                attend(work, softmax, find_next);
            else
                find_next();
            if (work.has_queries()) store(work, softmax);
            if constexpr (Row::dropout)
                if (call.randval) store_random_bytes(work);
        }
    }

   private:
    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }

    // One arrival a warp.
    __device__ __forceinline__ void release(std::uint32_t barrier) const {
        if (lane() == 0) barrier_arrive(barrier);
    }

    // The turn to issue products goes round the warpgroups.
    __device__ __forceinline__ void take_turn() const {
        if constexpr (Shared::takes_turns) named_barrier_sync(1 + group, 256);
    }
    __device__ __forceinline__ void let_go() const {
        if constexpr (Shared::takes_turns) named_barrier_arrive(group + 1 == Shared::groups ? 1 : 2 + group, 256);
    }

    // `meanwhile` is called once, beside the last product where there is one.
    template <class Function>
    __device__ __forceinline__ void attend(const Work<Row>& work, Softmax<Row>& softmax, const Function& meanwhile) {
        const int group_query = work.first_query + 64 * group;
        // Blocks that some of the warpgroup's rows see, and those that all of them see whole.
        KeyRange mine = work.blocks_of(group_query, 64);
        if constexpr (Row::block_mask)
            mine = {max(mine.begin, work.first_block), max(mine.end, work.first_block)};
        const KeyRange of_first = work.visible(group_query), of_last = work.visible(group_query + 63);
        const int whole_begin = (of_last.begin + keys - 1) / keys, whole_end = of_first.end / keys;

        barrier_wait(Shared::q_full(shared, group), q_phase);
        q_phase ^= 1;
        int block = work.end_block - 1;
        for (; block >= mine.end; --block) {
            pass(work, block);
            if constexpr (Work<Row>::has_gaps) work.cross_gap(block);
        }
        if (mine.begin < mine.end && (!Row::block_mask || block >= mine.begin)) {
            begin(softmax, block * keys, block + 1 < work.end_block, block == work.first_block,
                  block >= whole_begin && block < whole_end);
            if constexpr (Work<Row>::has_gaps) work.cross_gap(block);
            while (--block >= mine.begin) {
                const bool last = block == work.first_block;
                if (block >= whole_begin && block < whole_end)
                    step<false>(softmax, block * keys, last);
                else
                    step<true>(softmax, block * keys, last);
                if constexpr (Work<Row>::has_gaps) work.cross_gap(block);
            }
            barrier_wait(Shared::v_full(shared, v_ring.stage), v_ring.phase);
            multiply_p_v();
            meanwhile();
            wgmma_wait<0>();
            pin(o);
            release_v();
        } else {
            meanwhile();
        }
        for (; block >= work.first_block; --block) {
            pass(work, block);
            if constexpr (Row::block_mask) work.cross_gap(block);
        }
    }

    // A block that only other warpgroups see. It is waited for: what is released before it is there would count for the
    // block that it replaces.
    __device__ __forceinline__ void pass(const Work<Row>& work, int block) {
        barrier_wait(Shared::k_full(shared, k_ring.stage), k_ring.phase);
        if (block + 1 < work.end_block) {
            take_turn();
            let_go();
        }
        release_k(block == work.first_block);
        barrier_wait(Shared::v_full(shared, v_ring.stage), v_ring.phase);
        release_v();
    }

    // Weights of the block at `key`, the warpgroup's first. Nobody takes turns at the first block of a tile.
    __device__ __forceinline__ void begin(Softmax<Row>& softmax, int key, bool in_turn, bool last, bool whole) {
        softmax.read_factors(key);
        barrier_wait(Shared::k_full(shared, k_ring.stage), k_ring.phase);
        if (in_turn) take_turn();
        multiply_q_k();
        if (in_turn) let_go();
        wgmma_wait<0>();
        pin(s);
        release_k(last);
        float factor[2];
        if (whole)
            softmax.template finish_scores<false>(s, key);
        else
            softmax.template finish_scores<true>(s, key);
        softmax.weigh(s, factor);
        if constexpr (Row::dropout) softmax.drop(s, key);
        pack_weights();
    }

    // Weights of the block at `key`, while those of the block before meet their values.
    template <bool masked>
    __device__ __forceinline__ void step(Softmax<Row>& softmax, int key, bool last) {
        softmax.read_factors(key);
        barrier_wait(Shared::k_full(shared, k_ring.stage), k_ring.phase);
        take_turn();
        multiply_q_k();
        barrier_wait(Shared::v_full(shared, v_ring.stage), v_ring.phase);
        multiply_p_v();
        let_go();
        wgmma_wait<1>();
        pin(s);
        release_k(last);
        float factor[2];
        softmax.template finish_scores<masked>(s, key);
        const bool changed = softmax.weigh(s, factor);
        if constexpr (Row::dropout) softmax.drop(s, key);
        wgmma_wait<0>();
        pin(o);
        release_v();
        if (changed) {
#pragma unroll
            for (int i = 0; i < Row::hdim_v / 2; ++i) o[i] *= factor[i / 2 % 2];
        }
        pack_weights();
    }

    __device__ __forceinline__ void multiply_q_k() {
        constexpr int row_bytes = loaded_row_bytes<Row, Row::hdim_q>, in_panel = row_bytes / 32;
        const std::uint32_t first_q = shared + Shared::q + group * Shared::q_group_bytes;
        const std::uint32_t first_k = shared + Shared::k + k_ring.stage * Shared::k_bytes;
        const std::uint64_t q = describe_panel<Major::k, row_bytes>(first_q);
        const std::uint64_t k = describe_panel<Major::k, row_bytes>(first_k);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < Row::hdim_q / depth; ++i) {
            const int panel = i / in_panel * row_bytes, column = i % in_panel * 32;
            wgmma<T>(s, advance(q, 64 * panel + column), advance(k, keys * panel + column), i > 0);
        }
        wgmma_commit();
    }

    __device__ __forceinline__ void multiply_p_v() {
        const std::uint32_t first = shared + Shared::v + v_ring.stage * Shared::v_bytes;
        wgmma_fence();
        if constexpr (has_bytes<Row>) {
            const std::uint64_t v = describe_panel<Major::k, 32>(first);
#pragma unroll
            for (int i = 0; i < keys / depth; ++i) wgmma<T>(o, p[i], advance(v, i * Row::hdim_v * 32), true);
        } else {
            const std::uint64_t v = describe_panel<Major::mn>(first, keys * panel_row_bytes);
#pragma unroll
            for (int i = 0; i < keys / depth; ++i)
                wgmma<T, Major::mn>(o, p[i], advance(v, i * depth * panel_row_bytes), true);
        }
        wgmma_commit();
    }

    __device__ __forceinline__ void release_k(bool with_q) {
        release(Shared::k_empty(shared, k_ring.stage));
        k_ring.next();
        if (with_q) release(Shared::q_empty(shared, group));
    }

    __device__ __forceinline__ void release_v() {
        release(Shared::v_empty(shared, v_ring.stage));
        v_ring.next();
    }

    __device__ __forceinline__ void pack_weights() {
#pragma unroll
        for (int i = 0; i < keys / depth; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if constexpr (has_bytes<Row>) {
                    const int first = 16 * i + j / 2 * 8 + j % 2 * 2;
                    p[i][j] = pack_bytes<T>(s[first], s[first + 1], s[first + 4], s[first + 5]);
                } else {
                    p[i][j] = pack<T>(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
                }
            }
#pragma unroll
        for (int i = 0; i < keys / depth; ++i) pin(p[i]);
        pin(o);
    }

    __device__ __forceinline__ void store(const Work<Row>& work, const Softmax<Row>& softmax) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const auto total = softmax.finish(work, r);
            const int query = work.first_query + first_row + 8 * r;
            const bool exists = query < work.seqlen_q;
            const std::int64_t token = work.first_q + query;
            if constexpr (Row::lse) {
                const std::int64_t batch = Work<Row>::group ? 0 : work.batch;
                const std::int64_t offset =
                    batch * call.lse.batch + work.head * call.lse.nhead + token * call.lse.seqlen;
                if (exists && lane() % 4 == 0)
                    *reinterpret_cast<float*>(reinterpret_cast<char*>(call.lse_data) + offset) = total.lse;
            }
            store_row(work, r, token, exists, total.normalize);
        }
    }

    // Of all keys, seen or not; each warp for its 16 queries.
    __device__ __forceinline__ void store_random_bytes(const Work<Row>& work) const {
        const ByteStrides& strides = call.randval_strides;
        const int first = work.first_query + first_row - lane() / 4, end = min(first + 16, work.seqlen_q);
        for (int query = first; query < end; ++query) {
            const std::int64_t batch = Work<Row>::group ? 0 : work.batch;
            std::uint8_t* const row = call.randval + batch * strides.batch + work.head * strides.nhead +
                                      (work.first_q + query) * strides.seqlen;
            for (int key = lane() * philox_keys; key < work.seqlen_k; key += 32 * philox_keys)
                call.dropout.store(row, work.batch * call.nhead_q + work.head, query, key, work.seqlen_k);
        }
    }

    // Four lanes share a row, each with two columns of every eight. Where values were transposed it has four of every 16,
    // the even ones first. Lanes trade, so that each stores 16 bytes at once.
    __device__ __forceinline__ void store_row(const Work<Row>& work, int r, std::int64_t token, bool exists,
                                              float normalize) {
        const std::int64_t batch = Work<Row>::group ? 0 : work.batch;
        char* const row = static_cast<char*>(call.o_data) + batch * call.o.batch + work.head * call.o.nhead +
                          token * call.o.seqlen;
        const bool odd = lane() & 1, high = (lane() & 2) != 0;
        constexpr int at_once = 16 / sizeof(O);
#pragma unroll
        for (int columns = 0; columns < Row::hdim_v; columns += 4 * at_once) {
            std::uint32_t w[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) w[j] = word_of(columns / 2 + 2 * r, j, normalize);
            int column = columns;
            if constexpr (has_bytes<Row> && sizeof(O) == 2) {
                trade(w[0], w[2], odd, 1);
                trade(w[1], w[3], odd, 1);
                column += 16 * odd + 8 * high;
            } else {
                if constexpr (sizeof(O) < 4) {
                    trade(w[0], w[1], odd, 1);
                    trade(w[2], w[3], odd, 1);
                    trade(w[0], w[2], high, 2);
                    trade(w[1], w[3], high, 2);
                }
                column += at_once * (lane() % 4);
            }
            if (exists && column < call.hdim_v)
                *reinterpret_cast<uint4*>(row + column * sizeof(O)) = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }

    // One of four words of the lane's columns of a row, whose elements in O begin with `first`, in the order of the columns.
    __device__ __forceinline__ std::uint32_t word_of(int first, int number, float normalize) const {
        const auto value = [&](int i) { return o[first + i] * normalize; };
        if constexpr (!has_bytes<Row>)
            return pack<O>(value(4 * number), value(4 * number + 1));
        else if constexpr (sizeof(O) == 4)
            return __float_as_uint(value(number / 2 + number % 2 * 4));
        else if constexpr (sizeof(O) == 2)
            return pack<O>(value(number / 2 * 8 + number % 2), value(number / 2 * 8 + number % 2 + 4));
        else
            return pack_bytes<O>(value(8 * number), value(8 * number + 4), value(8 * number + 1), value(8 * number + 5));
    }

    const FwdCall& call;
    const std::uint32_t shared;
    const int group, first_row;
    Ring<Row::num_stages> k_ring, v_ring;
    std::uint32_t q_phase = 0;
    float s[keys / 2], o[Row::hdim_v / 2];
    std::uint32_t p[keys / depth][4];
};

}  // namespace catalog::cuda
