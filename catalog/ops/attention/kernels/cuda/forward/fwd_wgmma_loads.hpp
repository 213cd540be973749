// Blocks of K and V on their way into shared memory: from dense or packed tensors, or from the pages of a cache.
#pragma once

#include "fwd_wgmma_shared.hpp"

namespace catalog::cuda {

// Calls load(target, column) for each panel of `count` rows; `target` is that of the first one.
template <class Row, int hdim, int count, class Load>
__device__ __forceinline__ void for_panels(std::uint32_t target, const Load& load) {
    constexpr int columns = loaded_columns<Row, hdim>, row_bytes = loaded_row_bytes<Row, hdim>;
#pragma unroll
    for (int panel = 0; panel < hdim / columns; ++panel) load(target + panel * count * row_bytes, panel * columns);
}

// To `target`, the first panel of `count` rows; those of `rows` from `first` on, as many as the map's boxes have.
template <class Row, int hdim, int count>
__device__ __forceinline__ void load_panels(const CUtensorMap& map, std::uint32_t target, std::uint32_t full,
                                            const RaggedRows& rows, int first) {
    for_panels<Row, hdim, count>(target, [&](std::uint32_t panel, int column) {
        tma_load(panel, &map, full, column, rows.first_row + first, rows.low, rows.high, RaggedRows::wrap);
    });
}

// A block is a box of the sequence's rows.
template <class Row>
class DenseBlocks {
   public:
    using Place = int;  // the block's number

    __device__ __forceinline__ DenseBlocks(const FwdCall& call, const Work<Row>& work, int head)
        : call(call),
          keys(rows_of(call.k, Work<Row>::group ? 0 : work.batch, head, work.first_k, work.seqlen_k)),
          values(rows_of(call.v, Work<Row>::group ? 0 : work.batch, head, work.first_k, work.seqlen_k)) {}

    __device__ __forceinline__ Place find(int block) const { return block; }

    __device__ __forceinline__ void load_keys(std::uint32_t target, std::uint32_t full, Place block) const {
        load_panels<Row, Row::hdim_q, Row::tile_n0>(call.k_map, target, full, keys, block * Row::tile_n0);
    }

    __device__ __forceinline__ void load_values(std::uint32_t target, std::uint32_t full, Place block) const {
        load_panels<Row, Row::hdim_v, Row::tile_n0>(call.v_map, target, full, values, block * Row::tile_n0);
    }

   private:
    const FwdCall& call;
    const RaggedRows keys, values;
};

// A block consists of parts that lie within a page; each is loaded by a lane. Issue slots that its warp takes are lost to the
// warps that compute: so no address is computed for a whole part, others are sums in units of 16 bytes, and a second warp,
// which shares them with other warps, takes half of many parts.
template <class Row>
class PagedBlocks {
   public:
    // Of the lane's part, which becomes zeros if it has no rows.
    struct Place {
        int page, slot, rows;
    };

    __device__ __forceinline__ PagedBlocks(const FwdCall& call, const Work<Row>& work, int head)
        : call(call), pages(call.pages, work.batch), seqlen_k(work.seqlen_k), head(head),
          first(part_of_lane(call) * call.pages.part_rows), has_part(first < Row::tile_n0) {}

    static __device__ __forceinline__ bool has_helpers(const FwdCall& call) {
        constexpr int fewest_parts = 8;
        return call.pages.part_rows * fewest_parts <= Row::tile_n0;
    }

    // The page of the block before is looked up as well, because that block is next.
    __device__ __forceinline__ Place find(int block) {
        const Found found = block == ahead_block ? ahead : look_up(block);
        ahead_block = block - 1;
        ahead = look_up(ahead_block);
        const bool exists = 0 <= found.page && found.page < call.pages.num_pages;
        const int left = seqlen_k - (block * Row::tile_n0 + first);
        return {exists ? found.page : 0, found.slot, exists ? min(call.pages.part_rows, left) : 0};
    }

    __device__ __forceinline__ void load_keys(std::uint32_t target, std::uint32_t full, const Place& place) const {
        load<Row::hdim_q>(call.k_map, call.pages.k_map, call.pages.of_keys, target, full, place);
    }

    __device__ __forceinline__ void load_values(std::uint32_t target, std::uint32_t full, const Place& place) const {
        load<Row::hdim_v>(call.v_map, call.pages.v_map, call.pages.of_values, target, full, place);
    }

   private:
    struct Found {
        int page, slot;  // no page: -1
    };

    static __device__ __forceinline__ int part_of_lane(const FwdCall& call) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        return has_helpers(call) ? 2 * lane + static_cast<int>(threadIdx.x) / 64 : lane;
    }

    __device__ __forceinline__ Found look_up(int block) const {
        const int key = max(block * Row::tile_n0 + first, 0), index = call.pages.divide.quotient(key);
        const int page = has_part && block >= 0 && key < seqlen_k ? pages[index] : -1;
        return {page, key - index * static_cast<int>(call.pages.divide.divisor)};
    }

    template <int hdim>
    __device__ __forceinline__ void load(const CUtensorMap& ragged, const CUtensorMap& whole, const PageSteps& steps,
                                         std::uint32_t target, std::uint32_t full, const Place& place) const {
        if (!has_part) return;
        target += first * loaded_row_bytes<Row, hdim>;
        if (place.rows == call.pages.whole_rows)
            for_panels<Row, hdim, Row::tile_n0>(target, [&](std::uint32_t panel, int column) {
                tma_load(panel, &whole, full, column, place.slot, head, place.page);
            });
        else
            load_panels<Row, hdim, Row::tile_n0>(
                ragged, target, full, rows_in_page(steps, place.page, head, place.slot, place.rows), 0);
    }

    const FwdCall& call;
    const PageTable<Row> pages;
    const int seqlen_k, head, first;  // the part's first row in a block
    const bool has_part;
    int ahead_block = -1;
    Found ahead{-1, 0};
};

template <class Row>
using KvBlocks = std::conditional_t<Row::paged_kv, PagedBlocks<Row>, DenseBlocks<Row>>;

}  // namespace catalog::cuda
