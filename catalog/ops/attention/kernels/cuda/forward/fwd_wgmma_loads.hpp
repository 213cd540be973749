// Blocks of K and V on their way into shared memory: from dense or packed tensors, or from the pages of a cache.
#pragma once

#include "fwd_wgmma_shared.hpp"

namespace catalog::cuda {

// To `target`, the first panel of `count` rows; those of `rows` from `first` on, as many as the map's boxes have.
template <class Row, int hdim, int count>
__device__ __forceinline__ void load_panels(const CUtensorMap& map, std::uint32_t target, std::uint32_t full,
                                            const RaggedRows& rows, int first) {
    constexpr int columns = loaded_columns<Row, hdim>, row_bytes = loaded_row_bytes<Row, hdim>;
#pragma unroll
    for (int panel = 0; panel < hdim / columns; ++panel)
        tma_load(target + panel * count * row_bytes, &map, full, panel * columns, rows.first_row + first, rows.low,
                 rows.high, RaggedRows::wrap);
}

// A block is a box of the sequence's rows.
template <class Row>
class DenseBlocks {
   public:
    using Place = int;  // the block's number
    static constexpr bool by_all = false;  // whether every thread of those that load has a part

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

// A block consists of parts that lie within a page; each is loaded by a thread of its own. The parts are dealt out to the
// warps, because a warp starts the loads of its lanes one after the other. Issue slots that these warps take are lost to
// the warps that compute: so addresses are sums in units of 16 bytes, and warps without a part do nothing.
template <class Row>
class PagedBlocks {
   public:
    static constexpr bool by_all = true;

    // Of the thread's part, which becomes zeros if it has no rows.
    struct Place {
        int page, slot, rows;
    };

    __device__ __forceinline__ PagedBlocks(const FwdCall& call, const Work<Row>& work, int head)
        : call(call), pages(call.pages, work.batch), seqlen_k(work.seqlen_k), head(head) {}

    // The page of the block before is looked up as well, because that block is next.
    __device__ __forceinline__ Place find(int block) {
        const int first = first_key(block), index = call.pages.divide.quotient(max(first, 0));
        const int page = block == ahead.block ? ahead.page : look_up(block);
        ahead = {block - 1, look_up(block - 1)};
        const bool exists = 0 <= page && page < call.pages.num_pages;
        return {exists ? page : 0, first - index * static_cast<int>(call.pages.divide.divisor),
                exists ? min(call.pages.part_rows, seqlen_k - first) : 0};
    }

    __device__ __forceinline__ void load_keys(std::uint32_t target, std::uint32_t full, const Place& place) const {
        load<Row::hdim_q>(call.k_map, call.pages.of_keys, target, full, place);
    }

    __device__ __forceinline__ void load_values(std::uint32_t target, std::uint32_t full, const Place& place) const {
        load<Row::hdim_v>(call.v_map, call.pages.of_values, target, full, place);
    }

    // Whether a warp has parts.
    static __device__ __forceinline__ bool has_warp(const FwdCall& call, int warp) {
        return warp * call.pages.part_rows < Row::tile_n0;
    }

   private:
    static __device__ __forceinline__ int part() {
        return static_cast<int>(threadIdx.x) % 32 * 4 + static_cast<int>(threadIdx.x) / 32;
    }
    __device__ __forceinline__ int first_key(int block) const {
        return block * Row::tile_n0 + part() * call.pages.part_rows;
    }
    __device__ __forceinline__ bool has_part() const { return part() * call.pages.part_rows < Row::tile_n0; }

    __device__ __forceinline__ int look_up(int block) const {
        const int key = first_key(block);
        return has_part() && block >= 0 && key < seqlen_k ? pages[call.pages.divide.quotient(key)] : -1;
    }

    template <int hdim>
    __device__ __forceinline__ void load(const CUtensorMap& map, const PageSteps& steps, std::uint32_t target,
                                         std::uint32_t full, const Place& place) const {
        if (!has_part()) return;
        const RaggedRows rows = rows_in_page(steps, place.page, head, place.slot, place.rows);
        const int offset = part() * call.pages.part_rows * loaded_row_bytes<Row, hdim>;
        load_panels<Row, hdim, Row::tile_n0>(map, target + offset, full, rows, 0);
    }

    const FwdCall& call;
    const PageTable<Row> pages;
    const int seqlen_k, head;
    struct {
        int block, page;
    } ahead{-1, -1};
};

template <class Row>
using KvBlocks = std::conditional_t<Row::paged_kv, PagedBlocks<Row>, DenseBlocks<Row>>;

}  // namespace catalog::cuda
