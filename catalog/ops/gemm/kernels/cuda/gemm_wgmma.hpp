// GEMM for Hopper, specialised for one row of the catalog: families universal and multi_d, pipeline sm90_wgmma.
//
// A block has one warp that loads through TMA, and warpgroups that compute, each of 64 or 128 rows of a tile. Blocks
// work on tile after tile, so that the loads of the next tile hide behind the products and the stores of this one. With
// several parts of the depth, the blocks of a cluster share a tile, a part for each, and add their sums through each
// other's shared memory. The structure, warps that load and persistent warpgroups that compute, is that of CUTLASS's
// kernels for Hopper.
//
// A translation unit defines a struct Row whose constexpr members are the row's traits, and exports it:
//
//     struct Row {
//         using dtype = catalog::cuda::bf16, out = dtype;                // of A and B; of C, D tensors and the bias
//         static constexpr bool a_along = true, b_along = true;        // contiguous along the depth
//         static constexpr int tile_m = 128, tile_n = 256, tile_k = 64;  // of C, and a stage of the depth
//         static constexpr int wave_m = 8, wave_n = 1;                   // warps that compute
//         static constexpr int warp_tile_m = 64;                         // less: C is computed as its transpose
//         static constexpr int warp_tile_n = 256;                        // columns of a wgmma, unless less
//         static constexpr int num_stages = 4;
//         static constexpr int num_d = 0;
//         static constexpr bool multiplies = false;                      // D tensors are factors
//     };
#pragma once

#include "gemm_copy.hpp"
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
        const int place = static_cast<int>(blockIdx.x), part = place % call.splits;
        const int steps = (call.k + Row::tile_k - 1) / Row::tile_k;
        index = place / call.splits;
        clusters = call.grid / call.splits;
        first_step = steps * part / call.splits;  // far from overflowing: there are at most 2^24 steps
        end_step = steps * (part + 1) / call.splits;
    }

    __device__ __forceinline__ bool exists() const { return index < call.tiles; }
    __device__ __forceinline__ void next() { index += clusters; }

    __device__ __forceinline__ GemmTile tile() const {
        const int of_product = call.tiles_m * call.tiles_n, batch = index / of_product;
        const int within = index - batch * of_product, of_band = call.band * call.tiles_n;
        const int first = within / of_band * call.band, height = min(call.band, call.tiles_m - first);
        const int in_band = within - first * call.tiles_n, column = in_band / height;
        return {batch, (first + in_band - column * height) * Row::tile_m, column * Row::tile_n};
    }

   private:
    const GemmCall& call;
    int index, clusters;
};

// Loads the stages of P and Q. One thread.
template <class Row>
class GemmProducer {
    using Shape = GemmShape<Row>;

   public:
    __device__ __forceinline__ GemmProducer(const GemmCall& call, std::uint32_t shared) : call(call), shared(shared) {}

    __device__ __forceinline__ void run() {
        if (call.k == 0) return;  // there are no maps
        tma_prefetch_map(&call.p.map);
        tma_prefetch_map(&call.q.map);
        Ring<Shape::stages> ring;
        for (GemmTiles<Row> tiles(call); tiles.exists(); tiles.next()) {
            const GemmTile tile = tiles.tile();
            const int p = Shape::swapped ? tile.n : tile.m, q = Shape::swapped ? tile.m : tile.n;
            for (int step = tiles.first_step; step < tiles.end_step; ++step) {
                const std::uint32_t full = Shape::full(shared, ring.stage);
                const std::uint32_t target = shared + ring.stage * Shape::stage_bytes;
                barrier_wait(Shape::empty(shared, ring.stage), ring.phase ^ 1);
                barrier_arrive_expect(full, Shape::stage_bytes);
                const int depth = step * Shape::tile_k;
                load<Shape::major_p, Shape::p_bytes, Shape::panel_p>(call.p, target, full, p, depth, tile.batch);
                load<Shape::major_q, Shape::q_bytes, Shape::panel_q>(call.q, target + Shape::p_bytes, full, q, depth,
                                                                     tile.batch);
                ring.next();
            }
        }
    }

   private:
    // An operand's part of a stage: as many bytes as the barrier expects, wherever the tensor ends.
    template <Major major, int bytes, int panel_bytes>
    static __device__ __forceinline__ void load(const Operand& operand, std::uint32_t target, std::uint32_t full,
                                                int first, int depth, int batch) {
        constexpr bool along = major == Major::k;
        constexpr int columns = in_panel_row<typename Row::dtype>;
        static_assert(bytes % panel_bytes == 0);
#pragma unroll
        for (int panel = 0; panel < bytes / panel_bytes; ++panel)
            tma_load(target + panel * panel_bytes, &operand.map, full, (along ? depth : first) + columns * panel,
                     along ? first : depth, operand.batched ? batch : 0);
    }

    const GemmCall& call;
    const std::uint32_t shared;
};

// One warpgroup: sums its rows of P times Q.
template <class Row>
class GemmConsumer {
    using Shape = GemmShape<Row>;
    using T = typename Row::dtype;
    using Sums = typename Shape::Sums;

   public:
    __device__ __forceinline__ GemmConsumer(const GemmCall& call, std::uint32_t shared, int group)
        : call(call), shared(shared), group(group), lane(static_cast<int>(threadIdx.x) % 32) {}

    __device__ __forceinline__ void run() {
        Sums sums;
        GemmEpilogue<Row> epilogue(call, shared, group);
        for (GemmTiles<Row> tiles(call); tiles.exists(); tiles.next()) {
            if constexpr (Shape::promotes)
                multiply_promoted(tiles.end_step - tiles.first_step, sums);
            else
                multiply(tiles.end_step - tiles.first_step, sums);
            if constexpr (!Shape::swapped && sizeof(typename Row::out) == 2)
                if (call.plain && call.splits == 1) {
                    epilogue.store_plain(tiles.tile(), sums);
                    continue;
                }
            epilogue.store(tiles.tile(), sums);
        }
        if (threadIdx.x % 128 == 0) bulk_wait_read<0>();
    }

   private:
    static __device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
        for (auto& unit : sums)
            for (auto& sum : unit) sum = 0;
    }

    __device__ __forceinline__ void multiply(int steps, Sums& sums) {
        if (steps == 0) clear(sums);
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
        for (auto& unit : sums) pin(unit);
        if (steps > 0) release(last);
    }

    __device__ __forceinline__ void multiply_stage(std::uint32_t stage, bool accumulate, Sums& sums) {
        const auto [p, q] = operands(stage);
        wgmma_fence();
#pragma unroll
        for (int slice = 0; slice < Shape::tile_k / Shape::slice; ++slice)
#pragma unroll
            for (int unit = 0; unit < Shape::units; ++unit)
                multiply_slice(p, q, slice, unit, accumulate || slice > 0, sums[unit]);
        wgmma_commit();
    }

    // Products of each 128 of the depth are summed apart. While one warpgroup adds them, another one multiplies.
    __device__ __forceinline__ void multiply_promoted(int steps, Sums& sums) {
        constexpr int depths = Shape::tile_k / Shape::promoted_depth, slices = Shape::promoted_depth / Shape::slice;
        clear(sums);
        typename Shape::Unit part;
        for (int step = 0; step < steps; ++step) {
            barrier_wait(Shape::full(shared, ring.stage), ring.phase);
            const auto [p, q] = operands(shared + ring.stage * Shape::stage_bytes);
#pragma unroll
            for (int depth = 0; depth < depths; ++depth)
#pragma unroll
                for (int unit = 0; unit < Shape::units; ++unit) {
                    wgmma_fence();
#pragma unroll
                    for (int slice = 0; slice < slices; ++slice)
                        multiply_slice(p, q, depth * slices + slice, unit, slice > 0, part);
                    wgmma_commit();
                    wgmma_wait<0>();
                    pin(part);
                    if (depth == depths - 1 && unit == Shape::units - 1) release(ring.stage);
#pragma unroll
                    for (int i = 0; i < Shape::unit_q / 2; ++i) sums[unit][i] += part[i];
                }
            ring.next();
        }
    }

    // Those of a stage: this warpgroup's part of P, and Q.
    struct Operands {
        std::uint64_t p, q;
    };

    static constexpr bool along_p = Shape::major_p == Major::k, along_q = Shape::major_q == Major::k;
    static constexpr int block_bytes = along_p ? 64 * panel_row_bytes : Shape::panel_p;

    __device__ __forceinline__ Operands operands(std::uint32_t stage) const {
        return {describe_panel<Shape::major_p>(stage + group * Shape::blocks_p * block_bytes, Shape::panel_p),
                describe_panel<Shape::major_q>(stage + Shape::p_bytes, Shape::panel_q)};
    }

    // One wgmma.
    static __device__ __forceinline__ void multiply_slice(std::uint64_t p, std::uint64_t q, int slice, int unit,
                                                          bool accumulate, typename Shape::Unit& sums) {
        constexpr int unit_bytes = along_q ? Shape::unit_q * panel_row_bytes : Shape::unit_q / 64 * Shape::panel_q;
        const std::uint32_t at_p = along_p ? slice / 4 * Shape::panel_p + slice % 4 * 32 : slice * 2048;
        const std::uint32_t at_q = along_q ? slice / 4 * Shape::panel_q + slice % 4 * 32 : slice * 2048;
        wgmma<T, Shape::major_q, Shape::major_p>(sums, advance(p, at_p + unit / Shape::units_q * block_bytes),
                                                 advance(q, at_q + unit % Shape::units_q * unit_bytes), accumulate);
    }

    // The stage may be overwritten.
    __device__ __forceinline__ void release(int stage) const {
        if (lane == 0) barrier_arrive(Shape::empty(shared, stage));
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
    if (threadIdx.x == 0) Shape::init(shared);
    __syncthreads();

    const int warpgroup = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x) / 128, 0);
    if (warpgroup == 0) {
        if constexpr (budget.producer > 0) release_registers<budget.producer>();
        if (threadIdx.x == 0) GemmProducer<Row>(call, shared).run();
        if (call.splits > 1) cluster_sync();
    } else {
        if constexpr (budget.consumer > 0) claim_registers<budget.consumer>();
        GemmConsumer<Row>(call, shared, warpgroup - 1).run();
    }
    if (call.splits > 1) cluster_sync();  // others may still use this block's shared memory
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
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(call.splits), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = call.grid;
    config.blockDim = Shape::threads;
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = call.splits > 1;
    const bool ran = cudaLaunchKernelEx(&config, gemm_wgmma<Row>, call) == cudaSuccess;
    const catalog_status status = launched();
    return ran ? status : CATALOG_DEVICE_ERROR;
}

template <class Row>
inline std::int32_t launch_gemm_wgmma(const catalog_args* given, cudaStream_t stream) noexcept {
    using T = typename Row::dtype;
    if (const catalog_status status = check_abi(given); status != CATALOG_OK) return status;
    catalog_args args = *given;
    if (!valid_sizes(args) || splits_of<Row>(args) != std::max<std::int64_t>(args.num_splits, 1))
        return CATALOG_BAD_ARGUMENT;
    if (args.batch == 0 || args.m == 0 || args.n == 0) return CATALOG_OK;
    if (!valid_tensors(args, Row::num_d)) return CATALOG_BAD_ARGUMENT;
    if (args.k == 0) return launch_readable<Row>(args, stream);
    ReadableCopies<T> copies(stream);
    using Shape = GemmShape<Row>;
    const std::int64_t m = args.m, n = args.n, k = args.k;
    copies.add(args.a, args.batch, Row::a_along ? m : k, Row::a_along ? k : m, Row::a_along != Shape::a_along);
    copies.add(args.b, args.batch, Row::b_along ? n : k, Row::b_along ? k : n, Row::b_along != Shape::b_along);
    copies.run();
    if (copies.status != CATALOG_OK) return copies.status;
    return launch_readable<Row>(args, stream);
}

template <class Row>
inline constexpr Block block_of{GemmShape<Row>::threads, GemmShape<Row>::bytes + GemmShape<Row>::alignment};

}  // namespace catalog::cuda
