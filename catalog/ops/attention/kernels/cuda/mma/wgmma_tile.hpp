// What MmaTile does, for warpgroups: each has 64 rows of a tile of Q, and reads them, keys and values as panels.
#pragma once

#include "cuda/wgmma.hpp"
#include "mma_tile.hpp"

namespace catalog::cuda {

template <class Row>
class WgmmaTile {
    using T = typename Row::dtype;
    using Shape = MmaShape<Row>;
    static constexpr int keys = Shape::keys, q_panel = 64 * panel_row_bytes, kv_panel = keys * panel_row_bytes;

   public:
    // As in MmaTile.
    float s[1][keys / 8][4];
    float o[1][Row::hdim_v / 8][4];

    __device__ __forceinline__ explicit WgmmaTile(std::uint32_t q)
        : q(q + static_cast<int>(threadIdx.x) / 128 % (Shape::waves_m / 4) * (64 * Row::hdim_q * 2)) {
        static_assert(Shape::rows == 16 && Shape::waves_m % 4 == 0);
#pragma unroll
        for (int n = 0; n < Row::hdim_v / 8; ++n)
#pragma unroll
            for (int c = 0; c < 4; ++c) o[0][n][c] = 0.0f;
    }

    __device__ __forceinline__ void load_queries() {}

    __device__ __forceinline__ void multiply_q_k(std::uint32_t k, int) {
        auto& scores = reinterpret_cast<float(&)[keys / 2]>(s);
        const std::uint64_t rows = describe_panel<Major::k>(q), columns = describe_panel<Major::k>(k);
        forget(scores);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < Row::hdim_q / 16; ++i)
            wgmma<T>(scores, advance(rows, i / 4 * q_panel + i % 4 * 32), advance(columns, i / 4 * kv_panel + i % 4 * 32),
                     i > 0);
        wgmma_commit();
        wgmma_wait<0>();
        pin(scores);
    }

    // O += s * V
    __device__ __forceinline__ void multiply_p_v(std::uint32_t v, int) {
        auto& sums = reinterpret_cast<float(&)[Row::hdim_v / 2]>(o);
        const std::uint64_t values = describe_panel<Major::mn>(v, kv_panel);
        std::uint32_t weights[keys / 16][4];
#pragma unroll
        for (int step = 0; step < keys / 16; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* pair = s[0][2 * step + i / 2] + i % 2 * 2;
                weights[step][i] = pack<T>(pair[0], pair[1]);
            }
        pin(sums);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < keys / 16; ++step)
            wgmma<T, Major::mn>(sums, weights[step], advance(values, step * 16 * panel_row_bytes), true);
        wgmma_commit();
        wgmma_wait<0>();
        pin(sums);
    }

   private:
    const std::uint32_t q;
};

}  // namespace catalog::cuda
