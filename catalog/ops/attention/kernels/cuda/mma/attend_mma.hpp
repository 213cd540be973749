// Forward attention with mma.sync: a block answers a tile of rows of one K/V head of one sequence.
//
// Every group of warps (see mma_tile.hpp) streams its keys through a ring of shared memory: while a tile is worked on,
// the copies of the next ones are under way. Each copy of K, and each of V, is a group of cp.async of its own, so that
// work on K starts before V is there. The groups know nothing of each other until their results are merged.
#pragma once

#include <climits>

#include "mma_rows.hpp"

namespace catalog::cuda {

// `partial`: O and LSE of one split go to the workspaces o_acc and lse_acc.
template <class Row, bool partial>
class MmaAttention {
    using T = QueryElement<Row>;
    using Shape = MmaShape<Row>;
    static constexpr int keys = Shape::keys, stages = Shape::stages, tile_m0 = Row::tile_m0, tile_n0 = Row::tile_n0;

   public:
    __device__ __forceinline__ MmaAttention(const catalog_args& args, const MmaWork<Row, partial>& work,
                                            std::uint32_t shared)
        : args(args),
          work(work),
          thread(0),
          shared(shared),
          k_copy(args.k, work.grid.k_steps, args.hdim_q, work.seq, work.head_k),
          v_copy(args.v, work.grid.v_steps, args.hdim_v, work.seq, work.head_k),
          rows(args, work, shared, work.keys(args)) {}

    // For what is returned see zero_of.
    __device__ __forceinline__ int run() {
        const KeyRange some = rows.seen_by_some(), all = rows.seen_by_all();
        const int first_key = some.begin / tile_n0 * tile_n0;
        ring = shared + Shape::q_bytes + thread.warp_n * Shape::group_bytes;
        // Of the mask of a split its first key is left out, so a split without keys must not have a tile. Where no
        // window reaches the split, that first key may come before the last sink.
        const bool sees_none = partial && some.begin >= some.end;
        const int window_end = sees_none ? first_key : some.end;
        if constexpr (Row::sink) {
            int key = work.keys(args).begin;
            end = min(min(sinks_of(args, work), some.end), sees_none ? INT_MAX : first_key);
            start_copies<true>(key, key);
            for (bool of_window = false;; of_window = true) {
                const int zero = attend_tiles(key, all);
                if (of_window) return zero;
                sync_group();  // nobody reads the last tile any more
                const int copied = ::max(key, (end + tile_n0 - 1) / tile_n0 * tile_n0);
                key = first_key + (Shape::element == 4 ? zero : 0);  // lest places of its keys be found earlier
                end = window_end;
                start_copies<false>(key, key - copied);
            }
        }
        end = window_end;
        start_copies<true>(first_key, first_key);
        return attend_tiles(first_key, all);
    }

    __device__ __forceinline__ void finish(const MmaWork<Row, partial>& work, int zero) {
        extern __shared__ __align__(1024) float merged[];
        constexpr int group = tile_m0 * Row::hdim_v;
        if constexpr (Row::dropout)
            if (args.randval.data) store_random_bytes(args, work, thread);
        rows.store(work, MergeRoom<Row>{shared, merged, group, merged + Shape::waves_n * group}, zero);
    }

   private:
    // The tiles from `key` to `end`, whose copies have been started. `all`: keys that every row sees.
    __device__ __forceinline__ int attend_tiles(int key, KeyRange all) {
        asm volatile("" : "+r"(key));  // so that it could be negative: see zero_of
        for (int slot = 0; key < end; key += tile_n0, slot = slot + 1 < stages ? slot + 1 : 0) {
            copy_wait<2 * stages - 2>();  // K of this tile
            sync_group();                 // nobody reads V of the last tile any more
            start_v(key + (stages - 1) * tile_n0, slot > 0 ? slot - 1 : stages - 1);
            find_places(key + stages * tile_n0);
            const bool attends = work.attends_to(args, key);
            if (attends) rows.weigh_keys(ring + slot * Shape::k_stage_bytes, key, all);
            copy_wait<2 * stages - 2>();  // V of this tile
            sync_group();                 // nobody reads K of this tile any more
            start_k(key + stages * tile_n0, slot);
            if (attends) rows.add_values(ring + stages * Shape::k_stage_bytes + slot * Shape::v_bytes, key);
        }
        copy_wait<0>();
        return zero_of(key);
    }

    // ---- Copies

    __device__ __forceinline__ void sync_group() const {
        if constexpr (Shape::waves_n == 1)
            __syncthreads();
        else if constexpr (Shape::waves_m == 1)
            __syncwarp();
        else
            named_barrier_sync(1 + thread.warp_n, 32 * Shape::waves_m);
    }

    // `key` here and below: the first of a tile, of all groups.
    __device__ __forceinline__ void find_places(int key) {
        if constexpr (Row::paged_kv)
            places.find(args, work.grid.page_size, work.seq.index,
                        key + thread.warp_n * keys + thread.warp_m * Shape::copied, end);
    }

    // To a slot of the ring: the next tile of K. A group even where there is no such tile: waits count groups.
    __device__ __forceinline__ void start_k(int key, int slot) {
        const std::uint32_t target = ring + slot * Shape::k_stage_bytes;
        if constexpr (has_key_factors<Row>)
            if (key < end) {
                const int first = thread.warp_m * Shape::copied;
                KeyFactors<Row>::copy(args, work, target, first, key + thread.warp_n * keys + first, end, places);
            }
        start(k_copy, target, key);
    }

    __device__ __forceinline__ void start_v(int key, int slot) {
        start(v_copy, ring + stages * Shape::k_stage_bytes + slot * Shape::v_bytes, key);
    }

    template <class Copy>
    __device__ __forceinline__ void start(Copy& copy, std::uint32_t target, int key) {
        if (key < end) {
            if (!work.attends_to(args, key))
                copy.skip(tile_n0);
            else if constexpr (Row::paged_kv)
                copy.copy(target, places, zero_of(key));
            else
                copy.copy(target, end - key - thread.warp_n * keys, zero_of(key));
        }
        copy_commit();
    }

    // Of the tiles from `first_key` on, which is `skipped` keys behind what was copied last; `first`: of Q too.
    template <bool first>
    __device__ __forceinline__ void start_copies(int first_key, int skipped) {
        k_copy.skip(first ? skipped + thread.warp_n * keys : skipped);
        v_copy.skip(first ? skipped + thread.warp_n * keys : skipped);
        find_places(first_key);
        if constexpr (first) {
            copy_queries();
            copy_commit();
        }
#pragma unroll
        for (int number = 0; number < stages; ++number) {
            const int key = first_key + number * tile_n0;
            if (number > 0) {
                start_v(key - tile_n0, number - 1);
                find_places(key);
            }
            start_k(key, number);
        }
        if constexpr (!first) return;
        copy_wait<2 * stages - 1>();
        __syncthreads();
        if (!(args.scale > 0.0f)) {
            rescale_queries<T>(args, shared, Shape::q_bytes, static_cast<int>(threadIdx.x), Shape::threads);
            __syncthreads();
        }
        rows.load_queries();
    }

    __device__ __forceinline__ void copy_queries() const {
        constexpr int in_piece = 16 / sizeof(T), pieces = Row::hdim_q / in_piece;
        const int hdim = static_cast<int>(args.hdim_q);
#pragma unroll
        for (int first = 0; first < tile_m0 * pieces; first += Shape::threads) {
            const int index = first + static_cast<int>(threadIdx.x), row = index / pieces, piece = index % pieces;
            if (tile_m0 * pieces % Shape::threads && row >= tile_m0) break;
            const bool exists = row < work.rows && (!Row::pad_d || piece * in_piece < hdim);
            const T* source = work.template element_of<const T>(args.q, work.row_at(row < work.rows ? row : 0));
            copy_async(shared + piece_offset<Shape::q_row_bytes>(row, piece), source + piece * in_piece, exists);
        }
    }

    const catalog_args& args;
    const MmaWork<Row, partial>& work;
    const MmaThread<Row> thread;
    const std::uint32_t shared;
    typename Shape::KCopy k_copy;
    typename Shape::VCopy v_copy;
    Places<Row, Shape::copied> places;
    MmaRows<Row, partial> rows;

    int end;             // no row sees keys from here on
    std::uint32_t ring;  // the group's stages of K, then those of V
};

template <class Row, bool partial>
__global__ void __launch_bounds__(MmaShape<Row>::threads, MmaShape<Row>::blocks)
    attend_mma(const __grid_constant__ catalog_args args, const __grid_constant__ MmaGrid<Row> grid) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const MmaWork<Row, partial> work(args, grid, 0);
    if constexpr (partial) let_next_kernel_start();
    if (work.rows == 0) return;
    MmaAttention<Row, partial> attention(args, work, shared_address(shared));
    const int zero = attention.run();
    // Where registers are scarce the main loop need not keep what the results' places follow from.
    if constexpr (MmaShape<Row>::waves_n > 1 && MmaShape<Row>::element < 4)
        attention.finish(work, zero);
    else
        attention.finish(MmaWork<Row, partial>(args, grid, zero), zero);
}

template <class Row, bool partial>
inline catalog_status launch_attend_mma(const catalog_args& args, cudaStream_t stream) {
    return launch_work<Row, partial, MmaShape<Row>>(args, attend_mma<Row, partial>, stream);
}

}  // namespace catalog::cuda
