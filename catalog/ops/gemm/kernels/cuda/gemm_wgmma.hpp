// GEMM for Hopper, specialised for one row of the catalog: pipeline sm90_wgmma; families universal, multi_d and grouped,
// and those with scales.
//
// A block has one warp that loads through TMA, and warpgroups that compute, each of 64 or 128 rows of a tile. Blocks
// work on tile after tile, so that the loads of the next tile hide behind the products and the stores of this one. With
// several parts of the depth, the blocks of a cluster share a tile, a part for each, and add their sums through each
// other's shared memory. Or the blocks of a cluster have tiles one below the other and load what they share of Q once.
// The structure, warps that load and persistent warpgroups that compute, is that of CUTLASS's kernels for Hopper.
//
// A translation unit defines a struct Row whose constexpr members are the row's traits, and exports it:
//
//     struct Row {
//         using dtype = catalog::cuda::bf16, out = dtype;                // of A and B; of C, D tensors and the bias
//         static constexpr bool a_along = true, b_along = true;          // contiguous along the depth
//         static constexpr bool given_a_along = true, given_b_along = true;  // the same of the tensors of a call
//         static constexpr int tile_m = 128, tile_n = 256, tile_k = 64;  // of C, and a stage of the depth
//         static constexpr int wave_m = 8, wave_n = 1;  // warps that compute; wave_n > 1: C's transpose
//         static constexpr int warp_tile_m = 64, warp_tile_n = 256;  // a wgmma, or its transpose
//         static constexpr int num_stages = 4;
//         static constexpr int cluster_m = 1;  // blocks that share the loads of B
//         static constexpr int num_d = 0;
//         static constexpr bool multiplies = false;                      // D tensors are factors
//         static constexpr auto scales = catalog::cuda::Scales::no;      // of A and B
//         static constexpr bool grouped = false;                         // groups of rows, or of the depth
//         static constexpr bool along_depth = false;
//     };
#pragma once

#include "gemm_consumer.hpp"
#include "gemm_copy.hpp"

#include "abi/export.hpp"
#include "cuda/cluster.hpp"
#include "cuda/kernel_launch.hpp"

namespace catalog::cuda {

// Loads the stages of P and Q. One thread.
template <class Row>
class GemmProducer {
    using Shape = GemmShape<Row>;

   public:
    // The first tile is found at once: the compiler would do it where it is needed. That of groups is in memory.
    __device__ __forceinline__ GemmProducer(const GemmCall& call, std::uint32_t shared)
        : call(call), shared(shared), tiles(call) {
        asm volatile("" ::"r"(tiles.tile().m), "r"(tiles.tile().n), "r"(tiles.tile().batch));
    }

    // Maps come from memory, as parameters do: the first ones are asked for before any parameter is read.
    static __device__ __forceinline__ void prefetch(const GemmCall& call) {
        tma_prefetch_map(&call.p_map);
        tma_prefetch_map(&call.q_map);
        if (call.mapped) tma_prefetch_map(&call.c_map);
    }

    __device__ __forceinline__ void run() {
        if (call.k == 0) return;
        Ring<Shape::stages> ring;
        for (; tiles.exists(); tiles.next()) {
            const GemmTile tile = tiles.tile();
            const int p = Shape::swapped ? tile.n : tile.m, q = Shape::swapped ? tile.m : tile.n;
            const RaggedRows rows_p = rows_of_group(call.p_row, tile.first_k, tile.end_k);
            const RaggedRows rows_q = rows_of_group(call.q_row, tile.first_k, tile.end_k);
            for (int step = tiles.first_step(); step < tiles.end_step(); ++step) {
                const std::uint32_t full = Shape::full(shared, ring.stage);
                const std::uint32_t target = shared + ring.stage * Shape::stage_bytes;
                barrier_wait(Shape::empty(shared, ring.stage), ring.phase ^ 1);
                barrier_arrive_expect(full, call.stage_bytes);
                const int depth = step * Shape::tile_k;
                const std::uint32_t target_q = target + Shape::p_bytes;
                if constexpr (Row::along_depth) {
                    load_rows<Shape::p_bytes, Shape::panel_p>(call.p_map, target, full, p, depth, rows_p);
                    load_rows<Shape::q_bytes, Shape::panel_q>(call.q_map, target_q, full, q, depth, rows_q);
                } else {
                    load<Shape::major_p, Shape::p_bytes, Shape::panel_p>(call.p, call.p_map, target, full, p, depth,
                                                                         tile.batch);
                    load<Shape::major_q, Shape::q_bytes, Shape::panel_q, Shape::sharers>(
                        call.q, call.q_map, target_q, full, q, depth, tile.batch);
                }
                ring.next();
            }
        }
        if constexpr (Shape::sharers > 1) await_sharers(ring);
    }

   private:
    // Until the other blocks, too, have arrived for the last time at the barriers of this one, which ends after that.
    __device__ __forceinline__ void await_sharers(Ring<Shape::stages> ring) const {
        for (int i = 0; i < Shape::stages; ++i, ring.next())
            barrier_wait(Shape::empty(shared, ring.stage), ring.phase ^ 1);
    }

    // An operand's part of a stage. Of an operand that blocks share, each loads its rows of every panel.
    template <Major major, int bytes, int panel_bytes, int sharers = 1>
    static __device__ __forceinline__ void load(const Operand& operand, const CUtensorMap& map, std::uint32_t target,
                                                std::uint32_t full, int first, int depth, int batch) {
        constexpr bool along = major == Major::k;
        constexpr int columns = in_panel_row<typename Row::dtype>;
        static_assert(bytes % panel_bytes == 0);
        const int row = static_cast<int>(blockIdx.x) % sharers * (panel_bytes / sharers / panel_row_bytes);
        const int x1 = (along ? first : depth) + row, x2 = operand.batched ? batch : 0;
#pragma unroll
        for (int panel = 0; panel < bytes / panel_bytes; ++panel) {
            const std::uint32_t to = target + panel * panel_bytes + row * panel_row_bytes;
            const int x0 = (along ? depth : first) + columns * panel;
            if (!along && panel >= operand.panels) break;
            if constexpr (sharers > 1)
                tma_load_multicast(to, &map, full, (1 << sharers) - 1, x0, x1, x2);
            else
                tma_load(to, &map, full, x0, x1, x2);
        }
    }

    // The same, of a group of the depth: zeros follow it.
    template <int bytes, int panel_bytes>
    static __device__ __forceinline__ void load_rows(const CUtensorMap& map, std::uint32_t target, std::uint32_t full,
                                                     int first, int depth, const RaggedRows& rows) {
        constexpr int columns = in_panel_row<typename Row::dtype>;
#pragma unroll
        for (int panel = 0; panel < bytes / panel_bytes; ++panel)
            tma_load(target + panel * panel_bytes, &map, full, first + columns * panel, rows.first_row + depth, rows.low,
                     rows.high, RaggedRows::wrap);
    }

    const GemmCall& call;
    const std::uint32_t shared;
    GemmTiles<Row> tiles;
};

template <class Row>
__global__ __launch_bounds__(GemmShape<Row>::threads, 1) void gemm_wgmma(const __grid_constant__ GemmCall call) {
    using Shape = GemmShape<Row>;
    constexpr RegisterBudget budget = register_budget(Shape::groups, 1, Shape::in_blocks ? 24 : 56);
    extern __shared__ char memory[];
    const std::uint32_t shared = (shared_address(memory) + Shape::alignment - 1) & ~(Shape::alignment - 1u);
    // Code that a block has not run yet comes from memory, as its parameters do. So each warp goes to its own code before
    // it waits for the barriers, unless other blocks use them, and the warp that loads leaves them to another.
    const int warp = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x) / 32, 0), warpgroup = warp / 4;
    if (warp == 1) {
        if (threadIdx.x == 32) Shape::init(shared);
        __syncwarp();
        if constexpr (Shape::sharers == 1) Shape::announce_init();
    }
    if constexpr (Shape::sharers > 1) cluster_pass();  // init() released the barriers to the cluster
    let_next_kernel_start();
    if (warpgroup > 0) {
        if constexpr (budget.consumer > 0) claim_registers<budget.consumer>();
        wait_for_last_kernel();
        if constexpr (Shape::sharers == 1) Shape::await_init();
        GemmConsumer<Row>(call, shared, warpgroup - 1).run();
        if (call.log_parts > 0) cluster_pass();  // others may still use this block's shared memory
    } else {
        if constexpr (budget.producer > 0) release_registers<budget.producer>();
        if (warp > 0) return;
        if (threadIdx.x == 0) GemmProducer<Row>::prefetch(call);
        if constexpr (Row::grouped) wait_for_last_kernel();
        GemmProducer<Row> producer(call, shared);
        if constexpr (!Row::grouped) wait_for_last_kernel();
        if constexpr (Shape::sharers == 1) Shape::await_init_to_load();
        if (threadIdx.x == 0) producer.run();
    }
}

template <class Row>
inline catalog_status launch_readable(const catalog_args& args, cudaStream_t stream) {
    using Shape = GemmShape<Row>;
    constexpr int bytes = Shape::bytes + Shape::alignment;
    int device, processors;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
        cudaFuncSetAttribute(gemm_wgmma<Row>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) != cudaSuccess)
        return launched(), CATALOG_DEVICE_ERROR;
    GemmCall call;
    if (!describe_call<Row>(args, call) || !plan_tiles<Row>(args, processors, call)) return CATALOG_BAD_ARGUMENT;
    const int blocks = 1 << call.log_blocks;
    KernelLaunch launch(static_cast<unsigned>(call.clusters * blocks), Shape::threads, bytes, stream, Start::early);
    return launch.in_clusters(blocks).run(gemm_wgmma<Row>, call);
}

// Operands of 8 bits and groups of the depth are read in one layout: others are transposed.
template <class Row>
inline catalog_status launch_copied(catalog_args args, cudaStream_t stream) {
    using Shape = GemmShape<Row>;
    if (args.k == 0) return launch_readable<Row>(args, stream);
    const std::int64_t m = args.m, n = args.n, k = args.k;
    const std::int64_t products_a = Row::grouped ? 1 : args.batch, products_b = Row::along_depth ? 1 : args.batch;
    const bool a_along = Row::given_a_along, b_along = Row::given_b_along;
    ReadableCopies<typename Row::dtype> copies(stream);
    copies.add(args.a, products_a, a_along ? m : k, a_along ? k : m, a_along != Shape::a_along);
    copies.add(args.b, products_b, b_along ? n : k, b_along ? k : n, b_along != Shape::b_along);
    copies.run();
    if (copies.status != CATALOG_OK) return copies.status;
    return launch_readable<Row>(args, stream);
}

// A row as it computes groups of the depth: both operands have the depth as rows, which end where a group ends.
template <class Row>
struct AlongDepth : Row {
    static constexpr bool a_along = false, b_along = false, along_depth = true;
    static constexpr int num_stages = stages_of_groups<Row>;
};

template <class Row>
inline std::int32_t launch_gemm_wgmma(const catalog_args* given, cudaStream_t stream) noexcept {
    if (const catalog_status status = check_abi(given); status != CATALOG_OK) return status;
    const catalog_args& args = *given;
    if (!valid_sizes(args) || splits_of<Row>(args) != std::max<std::int64_t>(args.num_splits, 1))
        return CATALOG_BAD_ARGUMENT;
    if (args.batch == 0 || args.m == 0 || args.n == 0) return CATALOG_OK;
    if (!valid_tensors<Row>(args)) return CATALOG_BAD_ARGUMENT;
    if constexpr (Row::grouped && sizeof(typename Row::dtype) == 2)
        if (args.group_axis == CATALOG_GROUPS_OF_K) return launch_copied<AlongDepth<Row>>(args, stream);
    if (Row::grouped && args.group_axis != CATALOG_GROUPS_OF_M) return CATALOG_BAD_ARGUMENT;
    return launch_copied<Row>(args, stream);
}

template <class Row>
inline constexpr Block block_of{GemmShape<Row>::threads, GemmShape<Row>::bytes + GemmShape<Row>::alignment};

}  // namespace catalog::cuda
