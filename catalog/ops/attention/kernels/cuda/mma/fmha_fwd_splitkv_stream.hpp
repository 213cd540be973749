// Forward attention with mma.sync or wgmma for few queries over many keys, in one launch: blocks take equal shares of all
// keys of all sequences, and items that several blocks share are combined by the last one. Keys may lie in pages.
//
// Each group of warps (see mma_tile.hpp) copies its keys of every tile into a ring of shared memory, across the items
// of its block: while one item ends and the next one begins, memory stays busy.
#pragma once

#include <atomic>
#include <chrono>
#include <climits>

#include "cuda/common/launch.hpp"
#include "stream_parts.hpp"

namespace catalog::cuda {

// The row of a kernel of this file.
template <class Traits>
struct StreamRow : Traits {};

template <class Traits>
inline constexpr bool by_warpgroup<StreamRow<Traits>> = Traits::wave_m0 % 4 == 0;

template <class Row>
struct StreamShape : MmaShape<Row> {
    using Base = MmaShape<Row>;
    static constexpr int group_bytes = Base::k_bytes + Base::v_bytes;  // of a tile
    static constexpr int stage_bytes = Base::waves_n * group_bytes;
    static constexpr int maxima = Base::q_bytes + Base::stages * stage_bytes;  // where they and the sums of rows begin
    static constexpr int found = maxima + (Base::waves_n > 1 ? Base::merge_rows * 2 * 4 : 0);
    static constexpr int first_item = found + 16;
    static constexpr int shared_bytes = first_item + (sizeof(StreamShare<Row>) + 15) / 16 * 16;

    // Groups leave their results where their keys were.
    static_assert(Base::waves_n == 1 || Row::tile_m0 * Row::hdim_v * 4 <= group_bytes);
    static_assert(shared_bytes * Base::blocks + 1024 * Base::blocks <= 228 * 1024);
};

template <class Row>
__device__ __forceinline__ void sync_group(const MmaThread<Row>& thread) {
    using Shape = MmaShape<Row>;
    if constexpr (Shape::waves_n == 1)
        __syncthreads();
    else if constexpr (Shape::waves_m == 1)
        __syncwarp();
    else
        named_barrier_sync(1 + thread.warp_n, 32 * Shape::waves_m);
}

// What a warp copies: its rows of K and V of all tiles of its block, one after the other.
template <class Row>
class StreamCopies {
    using Shape = StreamShape<Row>;

   public:
    __device__ __forceinline__ StreamCopies(const catalog_args& args, const StreamGrid<Row>& grid,
                                            const StreamItems<Row>& items)
        : args(args),
          grid(grid),
          items(items),
          k_copy(args.k, grid.mma.k_steps, args.hdim_q, items.seq, items.head_k),
          v_copy(args.v, grid.mma.v_steps, args.hdim_v, items.seq, items.head_k) {
        enter();
    }

    // The next tile, to where the group's keys of a stage lie. A group of copies even where there is no tile: waits
    // count groups.
    __device__ __forceinline__ void start(std::uint32_t target) {
        if (items.exist()) {
            const int zero = zero_of(key);
            if constexpr (Row::paged_kv) {
                k_copy.copy(target, places, zero);
                v_copy.copy(target + Shape::k_bytes, places, zero);
            } else {
                k_copy.copy(target, items.seen.end - key, zero);
                v_copy.copy(target + Shape::k_bytes, items.seen.end - key, zero);
            }
            advance();
        }
        copy_commit();
    }

   private:
    __device__ __forceinline__ void advance() {
        key += Row::tile_n0;
        if (--left > 0) return find_places();
        items.advance();
        if (!items.exist()) return;
        k_copy.restart(items.seq, items.head_k);
        v_copy.restart(items.seq, items.head_k);
        enter();
    }

    __device__ __forceinline__ void enter() {
        key = items.first_key() + MmaThread<Row>(0).warp_n * Shape::keys;
        left = items.count;
        k_copy.skip(key);
        v_copy.skip(key);
        find_places();
    }

    __device__ __forceinline__ void find_places() {
        if constexpr (Row::paged_kv)
            places.find(args, grid.mma.page_size, items.seq.index,
                        key + MmaThread<Row>(0).warp_m * Shape::copied, items.seen.end);
    }

    const catalog_args& args;
    const StreamGrid<Row>& grid;
    StreamItems<Row> items;
    typename Shape::KCopy k_copy;
    typename Shape::VCopy v_copy;
    Places<Row, Shape::copied> places;
    int key, left;  // of the next tile: the group's first key; tiles of the item
};

// Q of an item on its way to the beginning of shared memory. Loading and storing are apart, so that the results of the
// item before can be stored meanwhile.
template <class Row>
class StreamQueries {
    static constexpr int pieces = Row::hdim_q / 8, threads = MmaShape<Row>::threads;

   public:
    static constexpr int count = (Row::tile_m0 * pieces + threads - 1) / threads;  // of a thread

    __device__ __forceinline__ void load(const catalog_args& args, const MmaWork<Row, false>& work) {
        using T = typename Row::dtype;
        const int hdim = static_cast<int>(args.hdim_q);
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const int row = index(i) / pieces, column = index(i) % pieces * 8;
            piece[i] = make_uint4(0, 0, 0, 0);
            if (row < work.rows && column < hdim)
                piece[i] = __ldg(reinterpret_cast<const uint4*>(
                    work.template element_of<const T>(args.q, work.row_at(row)) + column));
        }
    }

    __device__ __forceinline__ void store(const catalog_args& args, std::uint32_t q) const {
        // See Scores.
        const std::uint32_t kept = args.scale == 0.0f ? 0 : 0xffffffffu, flipped = args.scale < 0.0f ? 0x80008000u : 0;
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const int row = index(i) / pieces;
            if (Row::tile_m0 * pieces % threads && row >= Row::tile_m0) break;
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(q + offset(row, index(i) % pieces)),
                         "r"((piece[i].x & kept) ^ flipped), "r"((piece[i].y & kept) ^ flipped),
                         "r"((piece[i].z & kept) ^ flipped), "r"((piece[i].w & kept) ^ flipped)
                         : "memory");
        }
    }

   private:
    static __device__ __forceinline__ int index(int i) { return i * threads + static_cast<int>(threadIdx.x); }

    static __device__ __forceinline__ std::uint32_t offset(int row, int piece) {
        if constexpr (by_warpgroup<Row>)
            return row / 64 * (64 * Row::hdim_q * 2) + piece_offset<Row::hdim_q * 2, 64>(row % 64, piece);
        return piece_offset<Row::hdim_q * 2>(row, piece);
    }

    uint4 piece[count];
};

template <class Row>
__global__ void __launch_bounds__(MmaShape<Row>::threads, MmaShape<Row>::blocks)
    attend_stream(const __grid_constant__ catalog_args args, const __grid_constant__ StreamGrid<Row> grid) {
    using Shape = StreamShape<Row>;
    extern __shared__ __align__(1024) unsigned char memory[];
    const std::uint32_t shared = shared_address(memory);
    const MmaThread<Row> thread(0);
    const std::uint32_t ring = shared + Shape::q_bytes + thread.warp_n * Shape::group_bytes;

    StreamItems<Row> items(args, grid);
    if (!items.exist()) return;
    StreamCopies<Row> copies(args, grid, items);
#pragma unroll
    for (int stage = 0; stage < Shape::stages; ++stage) copies.start(ring + stage * Shape::stage_bytes);
    StreamQueries<Row> queries;
    queries.load(args, items.work());
    StreamBlocks blocks = items.blocks();
    StreamShare<Row>& first = *reinterpret_cast<StreamShare<Row>*>(memory + Shape::first_item);
    if (threadIdx.x == 0) first = {items, blocks};
    int stage = 0;
    const auto start_next = [&] {
        copies.start(ring + stage * Shape::stage_bytes);
        stage = stage + 1 < Shape::stages ? stage + 1 : 0;
    };
    const auto sync = [&] {
        if constexpr (by_warpgroup<Row>) fence_proxy_async();  // what this thread has written, others' products read
        sync_group<Row>(thread);
    };
    for (;;) {
        queries.store(args, shared);
        const MmaWork<Row, false> work = items.work();
        MmaRows<Row, false> rows(args, work, shared, {0, work.seq.seqlen_k});
        if constexpr (by_warpgroup<Row>) fence_proxy_async();
        __syncthreads();
        rows.load_queries();
        const KeyRange all = rows.seen_by_all();
        int key = items.first_key();
        asm volatile("" : "+r"(key));  // so that it could be negative: see zero_of
        for (int left = items.count;;) {
            copy_wait<Shape::stages - 1>();
            sync();
            const std::uint32_t k = ring + stage * Shape::stage_bytes;
            rows.weigh_keys(k, key, all);
            rows.add_values(k + Shape::k_bytes, key);
            if (--left == 0) break;
            sync_group<Row>(thread);  // nobody reads this stage any more
            start_next();
            key += Row::tile_n0;
        }

        StreamItems<Row> next = items;
        next.advance();
        constexpr bool early = StreamQueries<Row>::count <= 8;  // while O is in registers too
        if (early && next.exist()) queries.load(args, next.work());
        constexpr int group = Shape::group_bytes / 4;
        const MergeRoom<Row> room{shared, reinterpret_cast<float*>(memory + Shape::q_bytes + stage * Shape::stage_bytes),
                                  group, reinterpret_cast<float*>(memory + Shape::maxima)};
        if constexpr (by_warpgroup<Row> && Shape::waves_n == 1) __syncthreads();  // nobody reads Q any more
        if (items.shared())
            rows.store(StreamPart<Row>(work, StreamParts<Row>(args, blocks)), room, zero_of(key));
        else
            rows.store(work, room, zero_of(key));
        if (!next.exist()) break;
        if (!early) queries.load(args, next.work());
        __syncthreads();
        start_next();
        items = next;
        blocks = items.blocks();
    }
    finish_parts(args, grid, first, {items, blocks}, reinterpret_cast<int*>(memory + Shape::found));
}

// Neither 0 nor what memory is likely to hold; other threads may ask at the same time.
inline std::uint64_t next_launch() {
    constexpr std::uint64_t step = 0x9e3779b97f4a7c15;
    static std::atomic<std::uint64_t> number{step * std::chrono::steady_clock::now().time_since_epoch().count()};
    return number.fetch_add(step) | 1;
}

template <class Traits>
inline std::int32_t workspace_size_fmha_fwd_splitkv_stream(const catalog_args* args, Uses, catalog_workspace* size) {
    using Row = StreamRow<Traits>;
    if (const catalog_status status = check_abi(args); status != CATALOG_OK) return status;
    if (!size || !valid_sizes(*args)) return CATALOG_BAD_ARGUMENT;
    *size = {1, most_parts<Row> * part_numbers<Row> * 4, most_parts<Row> * (Row::tile_m0 * 4 + 8), 0, 0};
    return CATALOG_OK;
}

template <class Traits>
inline std::int32_t launch_fmha_fwd_splitkv_stream(const catalog_args* given, cudaStream_t stream) noexcept {
    using Row = StreamRow<Traits>;
    using Shape = StreamShape<Row>;
    if (const catalog_status status = check_call<Row>(given); status != CATALOG_OK) return status;
    const catalog_args& args = *given;
    if (!has_queries(args)) return CATALOG_OK;
    const auto aligned = [](const catalog_tensor& tensor) {
        return tensor.data && reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0;
    };
    if (args.num_splits != 1 || !args.o.data || !aligned_queries<Row, typename Row::otype>(args, args.o) ||
        !aligned(args.o_acc) || !aligned(args.lse_acc))
        return CATALOG_BAD_ARGUMENT;

    const std::int64_t heads = heads_per_kv_head(args), row_tiles = divide_up(args.seqlen_q * heads, Row::tile_m0);
    const std::int64_t key_tiles = std::max<std::int64_t>(1, divide_up(args.seqlen_k, Row::tile_n0));
    std::int64_t tiles;
    if (__builtin_mul_overflow(row_tiles * key_tiles, args.batch * args.nhead_k, &tiles) || tiles > INT_MAX)
        return CATALOG_BAD_ARGUMENT;
    int device, processors;
    const auto kernel = attend_stream<Row>;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::shared_bytes) != cudaSuccess)
        return launched(), CATALOG_DEVICE_ERROR;
    const std::int64_t blocks = std::min<std::int64_t>(tiles, std::min(processors, most_processors) * Shape::blocks);
    const bool uniform = Row::mode == Mode::batch && !Row::paged_kv && !args.seqlens_q.data && !args.seqlens_k.data;
    const StreamGrid<Row> grid{{static_cast<int>(row_tiles), Divisor(heads), Divisor(Row::paged_kv ? args.page_size : 1),
                                Scores<Row>(args), Shape::KCopy::steps_of(args, args.k),
                                Shape::VCopy::steps_of(args, args.v)},
                               Divisor(blocks), uniform, next_launch()};
    kernel<<<static_cast<unsigned>(blocks), Shape::threads, Shape::shared_bytes, stream>>>(args, grid);
    return launched();
}

template <class Traits>
inline constexpr Block block_of{StreamShape<StreamRow<Traits>>::threads, StreamShape<StreamRow<Traits>>::shared_bytes};

}  // namespace catalog::cuda
