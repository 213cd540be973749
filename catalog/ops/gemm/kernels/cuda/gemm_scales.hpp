// Scales of A and B: factors of the sums of a row and a column, or of those of each 128 of the depth.
#pragma once

#include "cuda/gemm_shape.hpp"
#include "gemm_tiles.hpp"

namespace catalog::cuda {

inline constexpr int scaled_columns = 128, scaled_depth = 128;  // of B, that share a scale of blocks

// Volatile, so that it is issued where it is written: long before the value is needed. Zero if it does not exist.
__device__ __forceinline__ float load_scale(const float* from, bool exists) {
    float scale;
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.f32 %0, 0f00000000;\n@p ld.global.nc.f32 %0, [%1];\n}"
        : "=f"(scale)
        : "l"(from), "r"(static_cast<int>(exists)));
    return scale;
}

__device__ __forceinline__ const float* scales_of_a(const GemmCall& call, const GemmTile& tile) {
    return static_cast<const float*>(call.scale_a.data) + tile.batch * call.scale_a.batch;
}

__device__ __forceinline__ const float* scales_of_b(const GemmCall& call, const GemmTile& tile) {
    return static_cast<const float*>(call.scale_b.data) + tile.batch * call.scale_b.batch;
}

// Scales of blocks that a thread needs for a stage: factors of its rows and columns of each unit.
template <class Row>
struct StageScales {
    using Shape = GemmShape<Row>;
    static constexpr int depths = Shape::depths;
    static constexpr int rows = Shape::swapped ? Shape::tile_q / 4 : 2 * Shape::blocks_p;
    static constexpr int columns = Shape::swapped ? Shape::blocks_p : Shape::units_q;
    float of_rows[depths][rows], of_columns[depths][columns];

    // That of an element of a unit.
    __device__ __forceinline__ float of(int depth, int unit, int element) const {
        const int block = unit / Shape::units_q;
        if constexpr (Shape::swapped)
            return of_rows[depth][element / 4 * 2 + element % 2] * of_columns[depth][block];
        else
            return of_rows[depth][2 * block + element / 2 % 2] * of_columns[depth][unit % Shape::units_q];
    }
};

// Scales of blocks of a tile.
template <class Row>
class BlockScales {
    using Shape = GemmShape<Row>;
    using Stage = StageScales<Row>;
    static_assert(Shape::swapped || scaled_columns % Shape::unit_q == 0);

   public:
    __device__ __forceinline__ BlockScales(const GemmCall& call, const GemmTile& tile, int group)
        : call(call), b(scales_of_b(call, tile)), n(tile.n) {
        const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) % 128 / 32;
        const int p = group * Shape::blocks_p * 64;
        const int row = tile.m + (Shape::swapped ? lane % 4 * 2 : p + warp * 16 + lane / 4);
        if constexpr (Shape::swapped) n += p;
        a = scales_of_a(call, tile) + row * call.scale_a.row;
        left = tile.end_m - row;
    }

    // Loads are issued; what lies outside of the tensors is zero.
    __device__ __forceinline__ Stage stage(int step) const {
        Stage scales;
#pragma unroll
        for (int i = 0; i < Stage::depths; ++i) {
            const int depth = step * Stage::depths + i;
            const bool exists = depth * scaled_depth < call.k;
#pragma unroll
            for (int j = 0; j < Stage::rows; ++j) {
                const int row = Shape::swapped ? j / 2 * 8 + j % 2 : j / 2 * 64 + j % 2 * 8;
                scales.of_rows[i][j] = load_scale(a + row * call.scale_a.row + depth, exists && row < left);
            }
#pragma unroll
            for (int j = 0; j < Stage::columns; ++j) {
                const int column = n + j * (Shape::swapped ? 64 : Shape::unit_q);
                scales.of_columns[i][j] =
                    load_scale(b + column / scaled_columns * call.scale_b.row + depth, exists && column < call.n);
            }
        }
        return scales;
    }

   private:
    const GemmCall& call;
    const float *a, *b;
    int n, left;  // rows from the thread's first one on
};

// Without scales of blocks there is nothing to load.
struct NoScales {
    struct Stage {};

    __device__ __forceinline__ NoScales(const GemmCall&, const GemmTile&, int) {}
    __device__ __forceinline__ Stage stage(int) const { return {}; }
};

}  // namespace catalog::cuda
