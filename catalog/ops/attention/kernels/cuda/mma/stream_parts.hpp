// Items that several blocks have part in: each leaves an O and an LSE in the workspace, and the last one combines them.
//
// Nothing needs to be zero before a launch: a block marks its part with the launch's number, and then looks whether all
// parts of the item are marked. Of blocks that finish at the same time several may see that, and write the same. Who
// combines takes the marks away, so that the launch can be replayed.
#pragma once

#include "stream_work.hpp"

namespace catalog::cuda {

// No GPU of this architecture has more multiprocessors.
inline constexpr int most_processors = 144;

// A block has at most two parts: the end of an item that an earlier block began, and the beginning of the last one.
template <class Row>
inline constexpr int most_parts = 2 * most_processors * MmaShape<Row>::blocks;

template <class Row>
inline constexpr std::int64_t part_numbers = Row::tile_m0 * Row::hdim_v;

// Of an item, for one of its blocks.
template <class Row>
class StreamParts {
    using T = typename Row::otype;

   public:
    // `blocks` are those of the item.
    __device__ __forceinline__ StreamParts(const catalog_args& args, const StreamBlocks& blocks)
        : args(args), first(blocks.first), count(blocks.count) {}

    // The O of a part's first row.
    __device__ __forceinline__ float* o_of(int part) const {
        return static_cast<float*>(args.o_acc.data) + place_of(part) * part_numbers<Row>;
    }

    __device__ __forceinline__ float* lse_of(int part) const {
        return reinterpret_cast<float*>(marks() + most_parts<Row>) + place_of(part) * Row::tile_m0;
    }

    __device__ __forceinline__ int own() const { return static_cast<int>(blockIdx.x) - first; }

    // Marks the part of this block, which its threads have stored; by one thread, after a barrier.
    __device__ __forceinline__ void mark(std::uint64_t launch) const { store_mark(marks() + place_of(own()), launch); }

    // Whether all parts are marked; by a warp.
    __device__ __forceinline__ bool complete(std::uint64_t launch) const {
        bool all = true;
        for (int part = static_cast<int>(threadIdx.x) % 32; part < count; part += 32)
            all &= part == own() || load_mark(marks() + place_of(part)) == launch;
        return __all_sync(0xffffffff, all);
    }

    __device__ __forceinline__ void combine(const MmaWork<Row, false>& work) const {
        const int pieces = static_cast<int>(args.hdim_v) / 4;
        for (int index = static_cast<int>(threadIdx.x); index < work.rows * pieces; index += blockDim.x)
            combine_piece(work, index / pieces, index % pieces * 4);
        for (int part = static_cast<int>(threadIdx.x); part < count; part += blockDim.x)
            store_mark(marks() + place_of(part), 0);
    }

   private:
    static constexpr int together = 18;  // parts that a thread loads at a time

    __device__ __forceinline__ std::uint64_t* marks() const { return static_cast<std::uint64_t*>(args.lse_acc.data); }
    __device__ __forceinline__ int place_of(int part) const { return 2 * (first + part) + (part == 0); }

    static __device__ __forceinline__ void store_mark(std::uint64_t* mark, std::uint64_t value) {
        asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(mark), "l"(value) : "memory");
    }

    static __device__ __forceinline__ std::uint64_t load_mark(const std::uint64_t* mark) {
        std::uint64_t value;
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(mark) : "memory");
        return value;
    }

    // Four columns of a row. Parts are added in their order, so that equal calls give equal bits.
    __device__ __forceinline__ void combine_piece(const MmaWork<Row, false>& work, int row, int column) const {
        float largest = minus_infinity(), sum = 0.0f;
        float4 o = make_float4(0, 0, 0, 0);
        for (int start = 0; start < count; start += together) {
            float lse[together];
            float4 part[together];
            float most = largest;
#pragma unroll
            for (int i = 0; i < together; ++i) {
                const bool exists = start + i < count;
                lse[i] = exists ? __ldcg(lse_of(start + i) + row) : minus_infinity();
                part[i] = exists ? __ldcg(reinterpret_cast<const float4*>(o_of(start + i) + row * Row::hdim_v + column))
                                 : make_float4(0, 0, 0, 0);
            }
#pragma unroll
            for (int i = 0; i < together; ++i) most = fmaxf(most, lse[i]);
            const float reference = most == minus_infinity() ? 0.0f : most;
            const float rescale = expf(largest - reference);
            largest = most;
            sum *= rescale;
            o = make_float4(o.x * rescale, o.y * rescale, o.z * rescale, o.w * rescale);
#pragma unroll
            for (int i = 0; i < together; ++i) {
                const float weight = expf(lse[i] - reference);
                sum += weight;
                o = make_float4(fmaf(part[i].x, weight, o.x), fmaf(part[i].y, weight, o.y),
                                fmaf(part[i].z, weight, o.z), fmaf(part[i].w, weight, o.w));
            }
        }
        const float normalize = sum == 0.0f ? 0.0f : 1.0f / sum;
        *reinterpret_cast<uint2*>(work.o_of(args, row) + column) =
            make_uint2(pack<T>(o.x * normalize, o.y * normalize), pack<T>(o.z * normalize, o.w * normalize));
        if (column > 0) return;
        if (float* const target = work.lse_of(args, row))
            *target = (largest == minus_infinity() ? 0.0f : largest) + logf(sum);
    }

    const catalog_args& args;
    const int first, count;  // of the item's blocks
};

// Where the results of one part go; see MmaWork.
template <class Row>
struct StreamPart {
    static constexpr bool of_part = true;
    const MmaWork<Row, false>& work;
    const Sequence& seq;
    const int rows, split;
    float *o, *lse;

    __device__ __forceinline__ StreamPart(const MmaWork<Row, false>& work, const StreamParts<Row>& parts)
        : work(work),
          seq(work.seq),
          rows(work.rows),
          split(parts.own()),
          o(parts.o_of(split)),
          lse(parts.lse_of(split)) {}

    __device__ __forceinline__ QueryRow row_at(int row) const { return work.row_at(row); }
    __device__ __forceinline__ int head_of(const QueryRow& at) const { return work.head_of(at); }
    __device__ __forceinline__ float* part_of(const catalog_args&, int row) const { return o + row * Row::hdim_v; }
    __device__ __forceinline__ float* lse_of(const catalog_args&, int row) const { return lse + row; }
};

// What the end of a block needs of an item. A block keeps its first one in shared memory.
template <class Row>
struct StreamShare {
    Sequence seq;
    int head_k, row_tile, position;
    bool shared;
    StreamBlocks blocks;

    __device__ __forceinline__ StreamShare(const StreamItems<Row>& items, const StreamBlocks& blocks)
        : seq(items.seq),
          head_k(items.head_k),
          row_tile(items.row_tile),
          position(items.first_tile()),
          shared(items.shared()),
          blocks(blocks) {}

    __device__ __forceinline__ MmaWork<Row, false> work(const StreamGrid<Row>& grid) const {
        return {grid.mma, seq, head_k, row_tile};
    }
};

// At the end of a block: of the items that it shares with others, its first and its last one, those are combined whose
// last part this is.
template <class Row>
__device__ __forceinline__ void finish_parts(const catalog_args& args, const StreamGrid<Row>& grid,
                                             const StreamShare<Row>& first, const StreamShare<Row>& last,
                                             volatile int* complete) {
    const bool has_first = first.shared, has_last = last.shared && !(has_first && last.position == first.position);
    if (!has_first && !has_last) return;
    const StreamParts<Row> of_first(args, first.blocks), of_last(args, last.blocks);
    __syncthreads();
    if (threadIdx.x < 32) {
        if (threadIdx.x == 0) {
            __threadfence();
            if (has_first) of_first.mark(grid.launch);
            if (has_last) of_last.mark(grid.launch);
        }
        // Of two blocks that mark their parts of an item, one sees the mark of the other.
        asm volatile("fence.sc.gpu;" ::: "memory");
        __syncwarp();
        const bool all_of_first = has_first && of_first.complete(grid.launch);
        const bool all_of_last = has_last && of_last.complete(grid.launch);
        if (threadIdx.x == 0) *complete = all_of_first + 2 * all_of_last;
        __threadfence();
    }
    __syncthreads();
    const int found = *complete;
    if (found & 1) of_first.combine(first.work(grid));
    if (found & 2) of_last.combine(last.work(grid));
}

}  // namespace catalog::cuda
