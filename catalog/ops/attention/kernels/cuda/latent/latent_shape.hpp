// How a block of multi-head latent attention is divided: one warpgroup weighs the keys of a tile, and two sum up values, each
// half of the columns of O. All have the same 64 rows of Q.
#pragma once

#include "cuda/mma/mma_work.hpp"
#include "cuda/ring.hpp"
#include "cuda/wgmma.hpp"

namespace catalog::cuda {

// The row of a kernel of this folder.
template <class Traits>
struct LatentRow : Traits {};

template <class Traits>
inline constexpr bool neighbours_share_keys<LatentRow<Traits>> = true;

// Shared memory: Q, two stages of keys or values, and the weights of a tile, all in panels (see wgmma.hpp); then a number
// for each row that goes from those who weigh to those who sum up, and barriers.
template <class Row>
struct LatentShape {
    static constexpr int hdim_q = Row::hdim_q, hdim_v = Row::hdim_v, rows = Row::tile_m0, keys = Row::tile_n0;
    static constexpr int summing = Row::wave_n1, threads = 128 * (1 + summing), columns = hdim_v / summing;
    static constexpr int panels = hdim_q / panel_columns, value_panels = hdim_v / panel_columns;
    static constexpr int panels_of_group = value_panels / summing;

    static constexpr int q_panel = rows * panel_row_bytes, kv_panel = keys * panel_row_bytes;
    static constexpr int q_bytes = panels * q_panel, stage_bytes = panels * kv_panel;
    static constexpr int stages = q_bytes, weights = stages + 2 * stage_bytes, notes = weights + rows * panel_row_bytes;
    static constexpr int barriers = notes + rows * 4, shared_bytes = barriers + (2 * summing + 2) * 8;

    // Barriers: what a warpgroup copies of a stage is there; the weights of a tile are; its values are summed up.
    static __device__ __forceinline__ std::uint32_t full(std::uint32_t shared, int stage, int group) {
        return shared + barriers + (stage * summing + group) * 8;
    }
    static __device__ __forceinline__ std::uint32_t weighed(std::uint32_t shared) { return full(shared, 2, 0); }
    static __device__ __forceinline__ std::uint32_t summed(std::uint32_t shared) { return full(shared, 2, 1); }

    static_assert(rows == 64 && Row::wave_m0 == 4 && Row::wave_n0 == 1 && keys == panel_columns && hdim_v < hdim_q);
    static_assert(hdim_q % panel_columns == 0 && columns % panel_columns == 0 && columns <= 256);
    static_assert(shared_bytes <= 227 * 1024);

    // What the host computes of the copies.
    struct Steps {
        static KvSteps steps_of(const catalog_args&, const catalog_tensor& tensor) {
            return {tensor.stride_seqlen * 2, 0, 0};
        }
    };
    using KCopy = Steps;
    using VCopy = Steps;
};

// The thread's two rows of the accumulators of a warpgroup; see wgmma.hpp.
__device__ __forceinline__ int row_of_thread(int half) {
    return static_cast<int>(threadIdx.x) / 32 % 4 * 16 + 8 * half + static_cast<int>(threadIdx.x) % 32 / 4;
}

}  // namespace catalog::cuda
