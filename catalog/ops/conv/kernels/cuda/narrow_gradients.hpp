// Backward weight of narrow groups.
//
// A warp sums, for 8 output channels, products of the images with the output's gradient: matrix instructions of 8 input
// channels at two elements of the filter, by 8 output channels, with a depth of 16 positions. Blocks share the patches of
// 64 channels, load the next ones while they multiply, and leave their sums to narrow_add_parts().
//
// Usual filters have kernels of their own: a row of the patch's images is loaded into registers once, for all rows of the
// gradient that it meets.
#pragma once

#include "narrow_call.hpp"
#include "narrow_shape.hpp"
#include "narrow_sums.hpp"

namespace catalog::cuda {

inline constexpr int narrow_stages = 2;  // at most

// What a warp sums: two items at once, elements of the filter and 8 channels of the images each.
__host__ __device__ __forceinline__ int narrow_pairs(const NarrowCall& call) {
    return (call.height.taps * call.item_columns * narrow_eights(call.of_group) + 1) / 2;
}

// The patches of a block in shared memory, call.stages at a time: their images, then the gradients.
class NarrowRing {
   public:
    // By all threads.
    __device__ __forceinline__ NarrowRing(const NarrowCall& call, char* memory, std::uint64_t (&loaded)[narrow_stages],
                                          int block, int part)
        : call(call), memory(shared_address(memory)), loaded(shared_address(loaded)), block(block) {
        if (threadIdx.x == 32) tma_prefetch_map(&call.images_map);
        if (threadIdx.x == 64) tma_prefetch_map(&call.gradient_map);
        if (threadIdx.x == 0) {
            for (int i = 0; i < call.stages; ++i) barrier_init(this->loaded + 8 * i, 1);
            barrier_init_fence();
            for (int i = 0; i < call.stages; ++i) load(part + i * call.parts, i);
        }
        __syncthreads();
    }

    // Until the next patch is there. Returns the address of its images.
    __device__ __forceinline__ std::uint32_t wait() const {
        barrier_wait(loaded + 8 * stage, parity);
        return memory + stage * call.stage_bytes;
    }

    // By all threads: they have read patch `index`.
    __device__ __forceinline__ void release(int index) {
        __syncthreads();
        if (threadIdx.x == 0) load(index + call.stages * call.parts, stage);
        if (++stage == call.stages) stage = 0, parity ^= 1;
    }

   private:
    __device__ __forceinline__ void load(int index, int stage) const {
        if (index >= call.images_count * call.patches_down * call.patches_across) return;
        const NarrowPatch patch(call, index);
        const std::uint32_t target = memory + stage * call.stage_bytes, barrier = loaded + 8 * stage;
        const int positions = call.loaded_height * call.pitch + call.rows * call.segments * narrow_run;
        barrier_arrive_expect(barrier, positions * 128);
        narrow_load_images(target, barrier, call, patch, block * narrow_channels);
        tma_load(target + call.images_bytes, &call.gradient_map, barrier, block * narrow_channels, patch.column, patch.row,
                 patch.image);
    }

    const NarrowCall& call;
    const std::uint32_t memory, loaded;
    const int block;
    int stage = 0, parity = 0;
};

// A lane's positions among the `exist` of a run, as bits. Elsewhere elements become zero: images may be infinite where
// there is no position.
struct NarrowPositions {
    std::uint32_t low, high;  // of the first and the last eight positions

    __device__ __forceinline__ NarrowPositions(int exist, int lane)
        : low(bits_from(lane % 4 * 2, exist)), high(bits_from(lane % 4 * 2 + 8, exist)) {}

    __device__ __forceinline__ void keep(std::uint32_t (&a)[4]) const {
        a[0] &= low, a[1] &= low;
        a[2] &= high, a[3] &= high;
    }

   private:
    static __device__ __forceinline__ std::uint32_t bits_from(int at, int exist) {
        return (at < exist ? 0xffffu : 0u) | (at + 1 < exist ? 0xffff0000u : 0u);
    }
};

// The gradients of a patch, as matrix instructions read them: for each run, 8 channels of 16 positions.
template <int runs>
__device__ __forceinline__ void narrow_read_gradients(std::uint32_t (&b)[runs][2], const NarrowCall& call,
                                                      std::uint32_t gradient, int warp, int lane) {
#pragma unroll
    for (int run = 0; run < runs; run += 2) {
        const int existing = min(run + lane / 16, call.rows * call.segments - 1);
        std::uint32_t r[4];
        load_matrices_transposed(gradient + narrow_place(existing * narrow_run + lane % 16, warp), r);
        b[run][0] = r[0], b[run][1] = r[1], b[run + 1][0] = r[2], b[run + 1][1] = r[3];
    }
}

// ---- Usual filters of groups of at most 8 channels: sums stay in registers.

inline constexpr int narrow_gradients_threads = 256;

template <class T, class Shape>
__device__ __forceinline__ void narrow_add_patch(float (&sums)[Shape::down][Shape::steps][4], const NarrowCall& call,
                                                 const NarrowPatch& patch, std::uint32_t images, int warp, int lane) {
    const int rows = min(call.rows, call.height.count - patch.row);
    const NarrowPositions existing(call.width.count - patch.column, lane);
    std::uint32_t b[Shape::runs][2], address[Shape::steps];
    narrow_read_gradients(b, call, images + call.images_bytes, warp, lane);
    // Of two elements, matrices 0 and 2 are of the first.
    const int position = lane % 8 + 8 * (lane / 16);
#pragma unroll
    for (int j = 0; j < Shape::pairs; ++j)
        address[j] = images + narrow_place(position * Shape::step + lane / 8 % 2 + 2 * j, warp);
    if constexpr (Shape::steps > Shape::pairs)
        address[Shape::pairs] = images + narrow_place(lane % 16 * Shape::step + Shape::across - 1, warp);
#pragma unroll
    for (int y = 0; y < Shape::rows; ++y)
#pragma unroll
        for (int j = 0; j < Shape::steps; ++j) {
            const std::uint32_t from = address[j] + y * call.pitch * 128;
            std::uint32_t a[4] = {};
            if (j < Shape::pairs) {
                load_matrices_transposed(from, a);
            } else {
                std::uint32_t r[2];
                load_matrices_transposed(from, r);
                a[0] = r[0], a[2] = r[1];
            }
            existing.keep(a);
#pragma unroll
            for (int i = 0; i < Shape::down; ++i) {
                if (y < i || (y - i) % Shape::step != 0 || (y - i) / Shape::step >= Shape::runs) continue;
                const int run = (y - i) / Shape::step;
                if (run < rows) mma_16x8x16<T>(sums[i][j], a, b[run][0], b[run][1]);
            }
        }
}

// Blocks of a processor: a thread keeps four sums of each two elements.
template <class Shape>
inline constexpr int narrow_gradients_blocks = Shape::down * Shape::steps <= 15 ? 2 : 1;

// Grid: 64 channels, parts of the patches.
template <class Row, class Shape>
__global__ __launch_bounds__(narrow_gradients_threads, narrow_gradients_blocks<Shape>) void narrow_gradients(
    const __grid_constant__ NarrowCall call) {
    let_next_kernel_start();
    extern __shared__ __align__(1024) char memory[];
    __shared__ std::uint64_t loaded[narrow_stages];
    const int part = static_cast<int>(blockIdx.x) / call.blocks, block = static_cast<int>(blockIdx.x) - part * call.blocks;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int patches = call.images_count * call.patches_down * call.patches_across;
    NarrowRing ring(call, memory, loaded, block, part);
    float sums[Shape::down][Shape::steps][4] = {};
#pragma unroll 1
    for (int index = part; index < patches; index += call.parts) {
        const std::uint32_t images = ring.wait();
        narrow_add_patch<typename Row::dtype, Shape>(sums, call, NarrowPatch(call, index), images, warp, lane);
        ring.release(index);
    }
    constexpr int pairs = Shape::down * Shape::steps;
    auto* const out =
        reinterpret_cast<float4*>(call.sums) + (std::int64_t{static_cast<int>(blockIdx.x)} * 8 + warp) * pairs * 32;
#pragma unroll
    for (int pair = 0; pair < pairs; ++pair) {
        const float(&sum)[4] = sums[pair / Shape::steps][pair % Shape::steps];
        out[pair * 32 + lane] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
}

// ---- All others: sums are in shared memory.

inline constexpr int narrow_gradients_any_threads = 512, narrow_gradients_any_runs = 16;

struct NarrowItem {
    int place;  // in the patch's images, from a position on, times 4; which 8 channels of a group

    __device__ __forceinline__ int position() const { return place >> 2; }
    __device__ __forceinline__ int eight() const { return place & 3; }
};

// The table of all, made once by the whole block: it takes divisions.
__device__ __forceinline__ void narrow_items(NarrowItem* table, const NarrowCall& call) {
    const int eights = narrow_eights(call.of_group), items = call.height.taps * call.width.taps * eights;
#pragma unroll 1  // few threads have an item, so its code should be short
    for (int i = static_cast<int>(threadIdx.x); i < items; i += narrow_gradients_any_threads) {
        const int tap = i / eights, eight = i - tap * eights;
        const int row = tap / call.width.taps, column = tap - row * call.width.taps;
        table[i] = {narrow_tap(call, row, column) * 4 + eight};
    }
}

// Grid: 64 channels, parts of the patches.
template <class Row>
__global__ __launch_bounds__(narrow_gradients_any_threads, 1) void narrow_gradients_any(
    const __grid_constant__ NarrowCall call) {
    using T = typename Row::dtype;
    let_next_kernel_start();
    extern __shared__ __align__(1024) char memory[];
    __shared__ std::uint64_t loaded[narrow_stages];
    const int part = static_cast<int>(blockIdx.x) / call.blocks, block = static_cast<int>(blockIdx.x) - part * call.blocks;
    constexpr int shares = narrow_gradients_any_threads / 256;  // warps that share 8 channels: their pairs take turns
    const int warp = static_cast<int>(threadIdx.x) / 32 % 8, share = static_cast<int>(threadIdx.x) / 256;
    const int lane = static_cast<int>(threadIdx.x) % 32, matrix = lane / 8;
    const int eights = narrow_eights(call.of_group), first_eight = warp / eights * eights;
    const int items = call.height.taps * call.width.taps * eights, pairs = (items + 1) / 2;
    char* const behind = memory + call.stages * call.stage_bytes;
    auto* const sums = reinterpret_cast<float4*>(behind) + warp * pairs * 32;
    auto* const table = reinterpret_cast<NarrowItem*>(behind + 8 * pairs * 512);
    for (int pair = share; pair < pairs; pair += shares) sums[pair * 32 + lane] = make_float4(0, 0, 0, 0);
    narrow_items(table, call);

    const int patches = call.images_count * call.patches_down * call.patches_across;
    NarrowRing ring(call, memory, loaded, block, part);
    for (int index = part; index < patches; index += call.parts) {
        const std::uint32_t images = ring.wait();
        const NarrowPatch patch(call, index);
        // Runs that exist, and which positions of the last one, or of all where they are rows.
        const bool flat = call.rows == 1;
        const int left = call.width.count - patch.column;
        const int runs = flat ? min(call.segments, (left + narrow_run - 1) / narrow_run)
                              : min(call.rows, call.height.count - patch.row);
        const NarrowPositions existing(flat ? left - (runs - 1) * narrow_run : left, lane);
        std::uint32_t b[narrow_gradients_any_runs][2];
        narrow_read_gradients(b, call, images + call.images_bytes, warp, lane);
        for (int pair = share; pair < pairs; pair += shares) {
            const NarrowItem item = table[min(2 * pair + matrix % 2, items - 1)];
            const int position = item.position() + (lane % 8 + 8 * (matrix / 2)) * call.width.step;
            const std::uint32_t first = images + narrow_place(position, first_eight + item.eight());
            float sum[4] = {};
#pragma unroll
            for (int run = 0; run < narrow_gradients_any_runs; ++run) {
                if (run >= runs) break;
                std::uint32_t a[4];
                load_matrices_transposed(first + run * call.run_step * 128, a);
                if (!flat || run + 1 == runs) existing.keep(a);
                mma_16x8x16<T>(sum, a, b[run][0], b[run][1]);
            }
            float4& total = sums[pair * 32 + lane];
            total.x += sum[0], total.y += sum[1], total.z += sum[2], total.w += sum[3];
        }
        ring.release(index);
    }
    auto* const out =
        reinterpret_cast<float4*>(call.sums) + (std::int64_t{static_cast<int>(blockIdx.x)} * 8 + warp) * pairs * 32;
    for (int pair = share; pair < pairs; pair += shares) out[pair * 32 + lane] = sums[pair * 32 + lane];
}

// Where sums of a part are in the gradient of the weight.
template <class Row>
struct NarrowSums {
    using Call = NarrowCall;

    static __host__ __device__ __forceinline__ int count(const NarrowCall& call) {
        return call.blocks * 256 * narrow_pairs(call);
    }

    static __device__ __forceinline__ void store(const NarrowCall& call, int place, const float (&sum)[4]) {
        using T = typename Row::dtype;
        const int log_eights = __ffs(narrow_eights(call.of_group)) - 1;
        const int lane = place % 32, of_lane = place / 32, eight_out = of_lane / call.by_pairs;
        const int pair = of_lane - eight_out * narrow_pairs(call);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int item = 2 * pair + i / 2, in_eight = lane % 4 * 2 + i % 2, to = eight_out * 8 + in_eight;
            const int tap = item >> log_eights, row = tap / call.by_item_columns;
            const int column = tap - row * call.item_columns;
            if (row >= call.height.taps || column >= call.width.taps || to >= call.channels) continue;
            int from = (item - (tap << log_eights)) * 8 + lane / 4;
            if (call.of_group < 8) {
                if (((from ^ in_eight) & -call.of_group) != 0) continue;  // of another group
                from &= call.of_group - 1;
            }
            static_cast<T*>(call.result)[to * call.stride_weight + narrow_element(call, row, column) * call.of_group +
                                         from] = T(sum[i]);
        }
    }
};

}  // namespace catalog::cuda
