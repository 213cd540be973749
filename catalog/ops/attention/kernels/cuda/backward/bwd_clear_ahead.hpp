// The main stage of backward: dQ's sums in float32 are cleared beside products.
//
// Memory takes 36 us to clear those of 16k tokens of 2,048 columns, in which nothing is multiplied. So each work clears sums
// some sections ahead: of the heads that have its heads' numbers there, as large a share of each as its keys are of all
// keys. A kernel before this stage clears the first sections.
//
// Blocks wait only for items that come before theirs, which are running or done: so all of them end. Most have cleared
// their share long before.
#pragma once

#include "bwd_work.hpp"
#include "cuda/hopper.hpp"

namespace catalog::cuda {

// Bytes of the sums of the first `count` sections.
inline std::int64_t bytes_of_sections(const catalog_args& args, const Sections& sections, int count) {
    const std::int64_t heads = std::min<std::int64_t>(std::int64_t{sections.section} * count, sections.heads);
    return heads * (args.nhead_q / args.nhead_k) * args.seqlen_q * args.hdim_q * 4;
}

// Whether it pays, all items exist, and the sums are dense.
template <class Row>
inline bool clears_ahead(const catalog_args& args, const Sections& sections) {
    constexpr int fewest_tiles = 4;
    const catalog_tensor& sums = args.dq_acc;
    const std::int64_t head = args.seqlen_q * args.hdim_q;
    const bool in_order = sums.stride_seqlen == args.hdim_q && (args.nhead_q == 1 || sums.stride_nhead == head) &&
                          (args.batch == 1 || sums.stride_batch == args.nhead_q * head);
    return BackwardTile<Row>::clears_ahead && in_order && !args.seqlens_q.data && !args.seqlens_k.data &&
           args.seqlen_q > 0 && args.hdim_q == Row::hdim_q && sections.tiles >= fewest_tiles &&
           sections.count > sections.ahead;
}

template <class Row>
struct ClearAhead {
    using Tile = BackwardTile<Row>;

    const catalog_args& args;
    const Sections& sections;
    const WorkInMemory work;

    // By the thread that adds dQ, before it does.
    __device__ __forceinline__ void wait() const {
        if (!is_on() || work.section() < sections.ahead) return;
        while (load_acquire(sections.cleared + work.section()) < sections.items_of_section) {
        }
        fence_proxy_async_global();
    }

    // By a warp, beside a visit of a head, which counts from the group's first: some rows of the share.
    __device__ __forceinline__ void clear(int of_group, int visit) const {
        if (!is_on() || far_head() >= sections.heads || visit * rows >= sections.share) return;
        const int row = work.first_key() / Tile::n * sections.share + visit * rows;
        const std::int64_t first_row = (far_head() * work.heads() + of_group) * args.seqlen_q + row;
        const int first = lane();
        const int rest = min(rows, static_cast<int>(args.seqlen_q) - row) * vectors - first;
        uint4* const sums = static_cast<uint4*>(args.dq_acc.data) + first_row * vectors + first;
#pragma unroll
        for (int i = 0; i < rows * vectors; i += 32)
            if (i < rest) sums[i] = uint4{};
    }

    // By that warp, after some visits of a head: the rest of the share.
    __device__ __forceinline__ void clear_rest(int of_group, int visits) const {
        if (!is_on()) return;
#pragma unroll 1
        for (int visit = visits; visit * rows < sections.share; ++visit) clear(of_group, visit);
    }

    // By that warp, after the last head.
    __device__ __forceinline__ void pass() const {
        if (!is_on() || work.section() + sections.ahead >= sections.count) return;
        __syncwarp();
        if (lane() == 0) add_release(sections.cleared + work.section() + sections.ahead, 1);
    }

    // By a warp, where there is nothing to multiply.
    __device__ __forceinline__ void clear_all() const {
        for (int head = 0; head < work.heads(); ++head) clear_rest(head, 0);
        pass();
    }

   private:
    static constexpr int rows = 8, vectors = Row::hdim_q / 4;

    __device__ __forceinline__ bool is_on() const { return Tile::clears_ahead && sections.cleared; }
    __device__ __forceinline__ int far_head() const {
        return work.index() * static_cast<int>(args.nhead_k) + work.head_k() + sections.ahead * sections.section;
    }

    static __device__ __forceinline__ int lane() { return computed_here(static_cast<int>(threadIdx.x)) % 32; }
};

}  // namespace catalog::cuda
