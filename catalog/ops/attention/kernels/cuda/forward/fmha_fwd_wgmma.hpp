// Forward attention for Hopper, specialised for one row of the catalog: families fwd, fwd_pagedkv and batch_prefill,
// pipeline sm90_wgmma.
//
// A block has one warpgroup that loads, a single thread of it through TMA, and one for every 64 of its tile_m0 queries
// that compute. Where elements have 8 bits, the other warps of the first one transpose values. A block works on tile
// after tile, so that the loads of the next tile hide behind the products of this one. The structure, warpgroups that
// load and warpgroups that compute, is that of FlashAttention-3.
//
// On an H200 the tensor cores are busy for 84 % of the time (bf16, hdim 128, 8192 keys), at a clock that the power
// limit holds at 1.66 GHz. Slower were: the first product of the next tile together with the last one of this; two
// tiles of Q in shared memory; two blocks of scores in registers (tile_n0 = 96); the wait for P V behind all of the
// softmax; polynomials for a third to a sixth of the exponentials, at hdim 64 too, where their unit is busy for 65 % of
// the time.
//
// A translation unit defines a struct Row whose constexpr members are the row's traits, and exports it:
//
//     struct Row {
//         using dtype = catalog::cuda::bf16;
//         static constexpr auto mode = catalog::cuda::Mode::batch;
//         static constexpr int hdim_q = 128, hdim_v = 128;     // multiples of 64
//         static constexpr int tile_m0 = 128, tile_n0 = 128;   // queries and keys of one tile
//         static constexpr int num_stages = 2;                 // blocks of K, and of V, in shared memory
//         ...                                                  // every other trait of the signature
//     };
//     CATALOG_EXPORT(catalog::cuda::launch_fmha_fwd_wgmma<Row>, "{\"family\": \"fwd\"}", false, false, false, false)
#pragma once

#include "fwd_wgmma_consumer.hpp"
#include "fwd_wgmma_loads.hpp"
#include "fwd_wgmma_transposer.hpp"
#include "cuda/common/launch.hpp"

namespace catalog::cuda {

// Loads what the consumers of a block read, in the order in which they do. By one thread, or more: see loaders.
template <class Row>
class FwdProducer {
    using Shared = FwdShared<Row>;

   public:
    __device__ __forceinline__ FwdProducer(const FwdCall& call, std::uint32_t shared, const TileIndex& tile)
        : call(call), shared(shared), tile(tile) {}

    // Maps come from memory, as parameters do: they are asked for before any parameter is read.
    static __device__ __forceinline__ void prefetch(const FwdCall& call) {
        tma_prefetch_map(&call.q_map);
        tma_prefetch_map(&call.k_map);
        tma_prefetch_map(&call.v_map);
    }

    __device__ __forceinline__ void run() {
        if constexpr (!Row::paged_kv)
            for_each_tile([this](const Work<Row>& work) { load_tile(work); });
        else if (threadIdx.x >= 64 && !PagedBlocks<Row>::has_helpers(call))
            return;
        else if (threadIdx.x / 32 % 2 == 0)
            for_each_tile([this](const Work<Row>& work) { load_pages<true>(work); });
        else
            for_each_tile([this](const Work<Row>& work) { load_pages<false>(work); });
    }

   private:
    template <class Function>
    __device__ __forceinline__ void for_each_tile(const Function& load) {
        for (int round = 0; round < call.rounds; ++round) {
            if (has_bytes<Row> || round > 0) tile = tile_of<Row>(call, shared, round);
            if (!tile.exists()) continue;
            const Work<Row> work(call, tile);
            if (work.has_queries() && work.has_keys()) load(work);
        }
    }

    // Even warps load parts of keys; odd ones parts of values, and the first of them Q, which is needed as early.
    template <bool keys>
    __device__ __forceinline__ void load_pages(const Work<Row>& work) {
        if (!keys && leads()) load_q(queries_of(work), work.first_query);
        KvBlocks<Row> blocks(call, work, call.of_kv_head.quotient(work.head));
        for (int block = work.end_block - 1; block >= work.first_block; --block) {
            const auto place = blocks.find(block);
            if constexpr (keys)
                load_k(blocks, place);
            else
                load_v(blocks, place);
            if constexpr (Work<Row>::has_gaps) work.cross_gap(block);
        }
    }

    __device__ __forceinline__ void load_tile(const Work<Row>& work) {
        if constexpr (Row::block_mask) load_q(queries_of(work), work.first_query);  // first, as registers are scarce
        KvBlocks<Row> blocks(call, work, call.of_kv_head.quotient(work.head));
        int block = work.end_block - 1;
        auto place = blocks.find(block);
        load_k(blocks, place);
        if constexpr (!Row::block_mask) load_q(queries_of(work), work.first_query);
        if constexpr (Work<Row>::has_gaps) work.cross_gap(block);
        while (--block >= work.first_block) {
            const auto next = blocks.find(block);
            load_k(blocks, next);
            load_v(blocks, place);
            place = next;
            if constexpr (Work<Row>::has_gaps) work.cross_gap(block);
        }
        load_v(blocks, place);
    }

    __device__ __forceinline__ RaggedRows queries_of(const Work<Row>& work) const {
        return rows_of(call.q, Work<Row>::group ? 0 : work.batch, work.head, work.first_q, work.seqlen_q);
    }

    __device__ __forceinline__ void load_q(const RaggedRows& rows, int first_query) {
        if (!acts<Row>()) return;
        for (int group = 0; group < Shared::groups; ++group) {
            const std::uint32_t full = Shared::q_full(shared, group);
            barrier_wait(Shared::q_empty(shared, group), q_phase ^ 1);
            barrier_arrive_expect(full, Shared::q_group_bytes);
            load_panels<Row, Row::hdim_q, 64>(call.q_map, shared + Shared::q + group * Shared::q_group_bytes, full, rows,
                                              first_query + 64 * group);
        }
        q_phase ^= 1;
    }

    __device__ __forceinline__ void load_k(const KvBlocks<Row>& blocks, const typename KvBlocks<Row>::Place& place) {
        if (!Row::paged_kv && !acts<Row>()) return;
        const std::uint32_t full = Shared::k_full(shared, k_ring.stage);
        await(Shared::k_empty(shared, k_ring.stage), k_ring.phase, full, Shared::k_bytes);
        blocks.load_keys(shared + Shared::k + k_ring.stage * Shared::k_bytes, full, place);
        k_ring.next();
    }

    __device__ __forceinline__ void load_v(const KvBlocks<Row>& blocks, const typename KvBlocks<Row>::Place& place) {
        if (!Row::paged_kv && !acts<Row>()) return;
        const std::uint32_t full = Shared::loaded_v_full(shared, v_ring.stage);
        await(Shared::loaded_v_empty(shared, v_ring.stage), v_ring.phase, full, Shared::v_bytes);
        blocks.load_values(shared + Shared::loaded_v + v_ring.stage * Shared::v_bytes, full, place);
        v_ring.next();
    }

    // Until nobody reads any more where `bytes` are to be loaded.
    static __device__ __forceinline__ void await(std::uint32_t empty, std::uint32_t phase, std::uint32_t full, int bytes) {
        if (acts<Row>()) {
            barrier_wait(empty, phase ^ 1);
            if (leads()) barrier_arrive_expect(full, bytes);  // those of its helper as well
        }
        if constexpr (Row::paged_kv) __syncwarp();
    }

    // Whether this is the first of the warps that load the same.
    static __device__ __forceinline__ bool leads() { return !Row::paged_kv || threadIdx.x < 64; }

    const FwdCall& call;
    const std::uint32_t shared;
    TileIndex tile;
    Ring<Row::num_stages> k_ring, v_ring;
    std::uint32_t q_phase = 0;
};

template <class Row>
inline constexpr int fwd_blocks = Row::block_per_cu > 1 ? Row::block_per_cu : 1;

template <class Row>
__global__ __launch_bounds__(FwdShared<Row>::threads, fwd_blocks<Row>) void fmha_fwd_wgmma(
    const __grid_constant__ FwdCall call) {
    using Shared = FwdShared<Row>;
    constexpr int of_warps = !has_bytes<Row> && (Shared::groups > 2 || fwd_blocks<Row> > 2) ? 32 : 40;
    constexpr int of_producer = has_bytes<Row> || loaders<Row> > 1 ? of_warps : 24;
    constexpr RegisterBudget budget = register_budget(Shared::groups, fwd_blocks<Row>, of_producer);
    extern __shared__ char memory[];
    const std::uint32_t shared = (shared_address(memory) + Shared::alignment - 1) & ~(Shared::alignment - 1u);
    // Code that a block has not run yet comes from memory, as parameters and maps do: all of them are asked for at once,
    // and the code that loads stands first.
    if (threadIdx.x == 0) FwdProducer<Row>::prefetch(call);
    if (threadIdx.x == 32) Shared::init(shared);
    // Rows of 8 bits have no registers to keep the tile until all warps have come.
    const bool looks = Work<Row>::group && call.skewed, waits = has_bytes<Row> || looks;
    TileIndex tile;
    if (!waits) tile = TileIndex(call, 0, Work<Row>::masked);
    tile.pin();
    if constexpr (Work<Row>::group)
        if (looks && threadIdx.x / 32 == 2) {
            const TileIndex found = find_packed_tile<Row>(call);
            if (threadIdx.x % 32 == 0) *Shared::found_tile(shared) = found;
        }
    __syncthreads();
    if (waits) tile = tile_of<Row>(call, shared, 0);

    // The same for all lanes, and known to be.
    const int warpgroup = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x) / 128, 0);
    if (warpgroup > 0) {
        if constexpr (budget.consumer > 0) claim_registers<budget.consumer>();
        FwdConsumer<Row>(call, shared, warpgroup - 1).run(tile);
    } else {
        if constexpr (budget.producer > 0) release_registers<budget.producer>();
        if (threadIdx.x < loaders<Row>) FwdProducer<Row>(call, shared, tile).run();
        if constexpr (has_bytes<Row>)
            if (threadIdx.x >= 32) FwdTransposer<Row>(call, shared).run();
    }
}

template <class Row>
inline std::int32_t launch_fmha_fwd_wgmma(const catalog_args* args, cudaStream_t stream) noexcept {
    using Shared = FwdShared<Row>;
    constexpr int bytes = Shared::bytes + Shared::alignment;
    FwdCall call;
    if (const catalog_status status = prepare_fwd<Row>(args, call); status != CATALOG_OK) return status;
    if (call.tiles == 0) return CATALOG_OK;

    int device, processors;
    const bool ready = cudaGetDevice(&device) == cudaSuccess &&
                       cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) == cudaSuccess &&
                       cudaFuncSetAttribute(fmha_fwd_wgmma<Row>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) ==
                           cudaSuccess;
    if (ready) {
        plan_rounds<Row>(*args, processors * fwd_blocks<Row>, call);
        fmha_fwd_wgmma<Row><<<call.grid, Shared::threads, bytes, stream>>>(call);
    }
    const catalog_status status = launched();
    return ready ? status : CATALOG_DEVICE_ERROR;
}

template <class Row>
inline constexpr Block block_of{FwdShared<Row>::threads, FwdShared<Row>::bytes + FwdShared<Row>::alignment};

}  // namespace catalog::cuda
