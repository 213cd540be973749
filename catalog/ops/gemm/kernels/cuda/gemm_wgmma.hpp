// GEMM for Hopper, specialised for one row of the catalog: families universal and multi_d, pipeline sm90_wgmma.
//
// A block has one warp that loads through TMA, and warpgroups that compute, each of 64 or 128 rows of a tile. Blocks
// work on tile after tile, so that the loads of the next tile hide behind the products and the stores of this one. Two
// blocks of a cluster may share the tile of B: each loads a part of it for both. Where there are fewer tiles than
// multiprocessors, the blocks of a cluster share a tile instead, each with a part of the depth, and add their sums
// through each other's shared memory. The structure, warps that load and persistent warpgroups that compute, is that of
// CUTLASS's kernels for Hopper.
//
// A translation unit defines a struct Row whose constexpr members are the row's traits, and exports it:
//
//     struct Row {
//         using dtype = catalog::cuda::bf16;
//         static constexpr bool a_along = true, b_along = true;        // contiguous along the depth
//         static constexpr int tile_m = 128, tile_n = 256, tile_k = 64;  // of C, and a stage of the depth
//         static constexpr int wave_m = 8, wave_n = 1;                   // warps that compute
//         static constexpr int warp_tile_m = 64;                         // less: C is computed as its transpose
//         static constexpr int num_stages = 4, cluster_m = 2;
//         static constexpr int num_d = 0;
//         static constexpr bool multiplies = false;                      // D tensors are factors
//     };
#pragma once

#include "gemm_epilogue.hpp"

#include "abi/export.hpp"

namespace catalog::cuda {

// The tiles of a block, one after the other, and its part of their depth.
template <class Row>
class GemmTiles {
    using Shape = GemmShape<Row>;

   public:
    int first_step, end_step;

    __device__ __forceinline__ explicit GemmTiles(const GemmCall& call) : call(call) {
        const int place = static_cast<int>(blockIdx.x), shared_by = call.splits > 1 ? call.splits : Shape::cluster;
        rank = place % shared_by;
        index = place / shared_by;
        clusters = call.grid / shared_by;
        const int steps = (call.k + Row::tile_k - 1) / Row::tile_k;
        const int part = call.splits > 1 ? rank : 0;
        first_step = steps * part / call.splits;  // far from overflowing: there are at most 2^24 steps
        end_step = steps * (part + 1) / call.splits;
    }

    __device__ __forceinline__ bool exists() const { return index < call.tiles; }
    __device__ __forceinline__ void next() { index += clusters; }

    __device__ __forceinline__ GemmTile tile() const {
        const int of_product = call.super_m * call.tiles_n, batch = index / of_product;
        const int within = index - batch * of_product, of_band = call.band * call.tiles_n;
        const int first = within / of_band * call.band, height = min(call.band, call.super_m - first);
        const int in_band = within - first * call.tiles_n, column = in_band / height;
        const int row = (first + in_band - column * height) * Shape::cluster + (Shape::cluster > 1 ? rank : 0);
        return {batch, row * Row::tile_m, column * Row::tile_n};
    }

   private:
    const GemmCall& call;
    int index, rank, clusters;
};

// Loads the stages of P and Q. One thread, or where rows are apart one of each warp of a warpgroup.
template <class Row>
class GemmProducer {
    using Shape = GemmShape<Row>;

   public:
    __device__ __forceinline__ GemmProducer(const GemmCall& call, std::uint32_t shared)
        : call(call), shared(shared), warp(static_cast<int>(threadIdx.x) / 32) {}

    __device__ __forceinline__ void run() {
        if (call.k == 0) return;  // there are no maps
        tma_prefetch_map(&call.p.maps[0]);
        tma_prefetch_map(&call.q.maps[0]);
        Ring<Shape::stages> ring;
        for (GemmTiles<Row> tiles(call); tiles.exists(); tiles.next()) {
            const GemmTile tile = tiles.tile();
            const int p = Shape::swapped ? tile.n : tile.m, q = Shape::swapped ? tile.m : tile.n;
            for (int step = tiles.first_step; step < tiles.end_step; ++step) {
                const std::uint32_t full = Shape::full(shared, ring.stage);
                const std::uint32_t target = shared + ring.stage * Shape::stage_bytes;
                barrier_wait(Shape::empty(shared, ring.stage), ring.phase ^ 1);
                if (warp == 0) barrier_arrive_expect(full, Shape::stage_bytes);
                load<Shape::major_p, Shape::tile_p, Shape::panel_p, 1>(call.p, target, full, p, step, tile.batch);
                load<Shape::major_q, Shape::tile_q, Shape::panel_q, Shape::cluster>(call.q, target + Shape::p_bytes,
                                                                                    full, q, step, tile.batch);
                ring.next();
            }
        }
    }

   private:
    // This block's share of an operand's part of a stage: of its rows, which `sharing` blocks load for each other.
    template <Major major, int extent, int panel_bytes, int sharing>
    __device__ __forceinline__ void load(const Operand& operand, std::uint32_t target, std::uint32_t full, int first,
                                         int step, int batch) {
        constexpr bool along = major == Major::k;
        constexpr int panels = along ? Shape::tile_k / 64 : (extent + 63) / 64;
        constexpr int rows = (along ? extent : Shape::tile_k) / sharing;
        const int depth = step * Shape::tile_k;
        const int column = along ? depth : first, row = (along ? first : depth) + share<sharing>() * rows;
        const int z = operand.batched ? batch : 0;
        target += share<sharing>() * rows * panel_row_bytes;
        if (operand.residues == 1) {
            if (warp == 0) {
#pragma unroll
                for (int panel = 0; panel < panels; ++panel)
                    copy<sharing>(target + panel * panel_bytes, &operand.maps[0], full,
                                  column + 64 * panel + operand.shift, row, z);
            }
            return;
        }
        // A box has the rows of a piece of 64 along the depth that are in one map, otherwise a row.
        constexpr int piece = along ? (rows < 64 ? rows : 64) : 1;
        const int residues = operand.residues, together = along ? piece / residues : 1;
        const int boxes = rows / residues / together, y = row / residues;
#pragma unroll
        for (int residue = 0; residue < most_residues; ++residue) {  // the addresses of maps are constants
            if (residue >= residues) break;
            const int x = column + (operand.shift + residue * operand.step) % 8;
#pragma unroll 1
            for (int i = warp; i < boxes * panels; i += 4) {
                const int panel = i % panels, box = i / panels;
                const int begin = along ? box * piece + residue * together : box * residues + residue;
                copy<sharing>(target + panel * panel_bytes + begin * panel_row_bytes, &operand.maps[residue], full,
                              x + 64 * panel, y + box * together, z);
            }
        }
    }

    template <int sharing>
    static __device__ __forceinline__ int share() {
        if constexpr (sharing == 1) return 0;
        return static_cast<int>(cluster_rank());
    }

    template <int sharing>
    static __device__ __forceinline__ void copy(std::uint32_t target, const CUtensorMap* map, std::uint32_t full,
                                                int column, int row, int batch) {
        if constexpr (sharing == 1)
            tma_load(target, map, full, column, row, batch);
        else
            tma_load_multicast(target, map, full, (1 << sharing) - 1, column, row, batch);
    }

    const GemmCall& call;
    const std::uint32_t shared;
    const int warp;
};

// One warpgroup: sums its rows of P times Q.
template <class Row>
class GemmConsumer {
    using Shape = GemmShape<Row>;
    using T = typename Row::dtype;

   public:
    __device__ __forceinline__ GemmConsumer(const GemmCall& call, std::uint32_t shared, int group)
        : call(call), shared(shared), group(group), lane(static_cast<int>(threadIdx.x) % 32) {}

    __device__ __forceinline__ void run() {
        float sums[Shape::blocks_p][Shape::tile_q / 2];
        GemmEpilogue<Row> epilogue(call, shared, group);
        for (GemmTiles<Row> tiles(call); tiles.exists(); tiles.next()) {
            multiply(tiles.end_step - tiles.first_step, sums);
            if constexpr (!Shape::swapped)
                if (call.plain && call.splits == 1) {
                    epilogue.store_plain(tiles.tile(), sums);
                    continue;
                }
            epilogue.store(tiles.tile(), sums);
        }
        if (threadIdx.x % 128 == 0) bulk_wait_read<0>();
    }

   private:
    __device__ __forceinline__ void multiply(int steps, float (&sums)[Shape::blocks_p][Shape::tile_q / 2]) {
        if (steps == 0) {
#pragma unroll
            for (auto& block : sums)
                for (float& sum : block) sum = 0;
        }
        int last = 0;
        for (int step = 0; step < steps; ++step) {
            barrier_wait(Shape::full(shared, ring.stage), ring.phase);
            multiply_stage(shared + ring.stage * Shape::stage_bytes, step > 0, sums);
            if (step > 0) {
                wgmma_wait<1>();
                release(last);
            }
            last = ring.stage;
            ring.next();
        }
        wgmma_wait<0>();
#pragma unroll
        for (auto& block : sums) pin(block);
        if (steps > 0) release(last);
    }

    __device__ __forceinline__ void multiply_stage(std::uint32_t stage, bool accumulate,
                                                   float (&sums)[Shape::blocks_p][Shape::tile_q / 2]) {
        constexpr bool along_p = Shape::major_p == Major::k, along_q = Shape::major_q == Major::k;
        constexpr int block_bytes = along_p ? 64 * panel_row_bytes : Shape::panel_p;
        const std::uint64_t p =
            describe_panel<Shape::major_p>(stage + group * Shape::blocks_p * block_bytes, Shape::panel_p);
        const std::uint64_t q = describe_panel<Shape::major_q>(stage + Shape::p_bytes, Shape::panel_q);
        wgmma_fence();
#pragma unroll
        for (int slice = 0; slice < Shape::tile_k / 16; ++slice) {
            const std::uint32_t at_p = along_p ? slice / 4 * Shape::panel_p + slice % 4 * 32 : slice * 2048;
            const std::uint32_t at_q = along_q ? slice / 4 * Shape::panel_q + slice % 4 * 32 : slice * 2048;
#pragma unroll
            for (int block = 0; block < Shape::blocks_p; ++block)
                wgmma<T, Shape::major_q, Shape::major_p>(sums[block], advance(p, at_p + block * block_bytes),
                                                         advance(q, at_q), accumulate || slice > 0);
        }
        wgmma_commit();
    }

    // The stage may be overwritten, by all blocks that share in loading it.
    __device__ __forceinline__ void release(int stage) const {
        const std::uint32_t empty = Shape::empty(shared, stage);
        if constexpr (Shape::cluster == 1) {
            if (lane == 0) barrier_arrive(empty);
        } else {
            if (lane < Shape::cluster) barrier_arrive_remote(shared_address_of(empty, lane));
        }
    }

    const GemmCall& call;
    const std::uint32_t shared;
    const int group, lane;
    Ring<Shape::stages> ring;
};

template <class Row>
__global__ __launch_bounds__(GemmShape<Row>::threads, 1) void gemm_wgmma(const __grid_constant__ GemmCall call) {
    using Shape = GemmShape<Row>;
    constexpr RegisterBudget budget = register_budget(Shape::groups, 1, 56);
    extern __shared__ char memory[];
    const std::uint32_t shared = (shared_address(memory) + Shape::alignment - 1) & ~(Shape::alignment - 1u);
    const bool clustered = Shape::cluster > 1 || call.splits > 1;
    if (threadIdx.x == 0) Shape::init(shared);
    if (Shape::cluster > 1)
        cluster_sync();
    else
        __syncthreads();

    const int warpgroup = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x) / 128, 0);
    if (warpgroup == 0) {
        if constexpr (budget.producer > 0) release_registers<budget.producer>();
        if (threadIdx.x == 0 || (call.apart && threadIdx.x % 32 == 0)) GemmProducer<Row>(call, shared).run();
        if (call.splits > 1) cluster_sync();
    } else {
        if constexpr (budget.consumer > 0) claim_registers<budget.consumer>();
        GemmConsumer<Row>(call, shared, warpgroup - 1).run();
    }
    if (clustered) cluster_sync();  // others may still use this block's shared memory
}

// The multiprocessors of the current device, and how many clusters run there at a time.
template <class Row>
inline bool residency(cudaLaunchConfig_t& config, int& processors, int& clusters) {
    int device;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
        return false;
    clusters = processors;
    if constexpr (GemmShape<Row>::cluster > 1) {
        config.gridDim = processors / GemmShape<Row>::cluster * GemmShape<Row>::cluster;
        return cudaOccupancyMaxActiveClusters(&clusters, gemm_wgmma<Row>, &config) == cudaSuccess && clusters > 0;
    }
    return true;
}

template <class Row>
inline catalog_status launch_products(const catalog_args& args, cudaStream_t stream) {
    using Shape = GemmShape<Row>;
    constexpr int bytes = Shape::bytes + Shape::alignment;
    if (cudaFuncSetAttribute(gemm_wgmma<Row>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) != cudaSuccess)
        return launched(), CATALOG_DEVICE_ERROR;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {Shape::cluster, 1, 1};
    cudaLaunchConfig_t config{};
    config.blockDim = Shape::threads;
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = Shape::cluster > 1;
    int processors, clusters;
    if (!residency<Row>(config, processors, clusters)) return launched(), CATALOG_DEVICE_ERROR;
    GemmCall call;
    if (!describe_call<Row>(args, call) || !plan_tiles<Row>(args, processors, clusters, call))
        return CATALOG_BAD_ARGUMENT;
    if (call.splits > 1) {
        attribute.val.clusterDim.x = call.splits;
        config.numAttrs = 1;
    }
    config.gridDim = call.grid;
    const bool ran = cudaLaunchKernelEx(&config, gemm_wgmma<Row>, call) == cudaSuccess;
    const catalog_status status = launched();
    return ran ? status : CATALOG_DEVICE_ERROR;
}

// A batch whose matrices are not at multiples of 16 bytes from each other is launched product by product.
template <class Row>
inline std::int32_t launch_gemm_wgmma(const catalog_args* given, cudaStream_t stream) noexcept {
    using T = typename Row::dtype;
    if (const catalog_status status = check_abi(given); status != CATALOG_OK) return status;
    if (!valid_sizes(*given)) return CATALOG_BAD_ARGUMENT;
    if (given->batch == 0 || given->m == 0 || given->n == 0) return CATALOG_OK;
    if (!valid_tensors(*given, Row::num_d)) return CATALOG_BAD_ARGUMENT;
    if (given->k == 0 || batch_aligned(*given)) return launch_products<Row>(*given, stream);
    for (std::int64_t i = 0; i < given->batch; ++i) {
        catalog_args one = *given;
        one.batch = 1;
        for (catalog_tensor* tensor : {&one.a, &one.b, &one.c, &one.d0, &one.d1})
            if (tensor->data) tensor->data = static_cast<T*>(tensor->data) + i * tensor->stride_batch;
        if (const catalog_status status = launch_products<Row>(one, stream); status != CATALOG_OK) return status;
    }
    return CATALOG_OK;
}

template <class Row>
inline constexpr Block block_of{GemmShape<Row>::threads, GemmShape<Row>::bytes + GemmShape<Row>::alignment};

}  // namespace catalog::cuda
