// Sums of a warpgroup, rounded in registers and stored by TMA while the block goes on.
#pragma once

#include "gemm_shape.hpp"

namespace catalog::cuda {

// Pieces of 64 of p and up to 64 of q, swizzled in rows of C of 128 bytes, leave from two places in turn. `Out` has 16
// bits.
template <class Row, class Out>
class GemmPieces {
    using Shape = GemmShape<Row>;
    using Sums = typename Shape::Sums;

   public:
    __device__ __forceinline__ GemmPieces(std::uint32_t shared, int group)
        : out(shared + Shape::out + group * Shape::piece_bytes),
          group(group),
          thread(static_cast<int>(threadIdx.x) % 128) {}

    // `values(x, block, q)` is a function that gives element i of the eight sums from x on, which are of two of p in a
    // block of 64 and of 16 of q in the tile from `q` on. `put(piece, p, q)`, called by one thread, has TMA store a piece
    // whose first element is that of p and q in the tile. TMA may still read shared memory afterwards.
    template <class Values, class Put>
    __device__ __forceinline__ void store(const Sums& sums, Values&& values, Put&& put) {
#pragma unroll
        for (int block = 0; block < Shape::blocks_p; ++block) {
#pragma unroll
            for (int piece = 0; piece < Shape::pieces_q; ++piece) {
                const std::uint32_t target = out + half;
                half ^= Shape::half_piece_bytes;
                if (thread == 0) bulk_wait_read<1>();  // of this half
                sync();
                stage(target, sums, values, block, piece);
                fence_proxy_async();
                sync();
                if (thread == 0) {
                    put(target, (group * Shape::blocks_p + block) * 64, Shape::piece_q(piece));
                    bulk_commit();
                }
            }
        }
    }

    // The same by all threads: `put(block, piece, share, values)` writes eight elements of the row share * 16 + thread / 8
    // of a piece, in the columns from thread % 8 * 8 on, in the order of C.
    template <class Values, class Put>
    __device__ __forceinline__ void store_by_threads(const Sums& sums, Values&& values, Put&& put) {
#pragma unroll
        for (int block = 0; block < Shape::blocks_p; ++block) {
#pragma unroll
            for (int piece = 0; piece < Shape::pieces_q; ++piece) {
                const std::uint32_t target = out + half;
                half ^= Shape::half_piece_bytes;  // its last readers are past the sync of the piece between
                stage(target, sums, values, block, piece);
                sync();
#pragma unroll
                for (int share = 0; share < rows / 16; ++share) {
                    uint4 x;
                    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                                 : "r"(target + swizzled(share * 16 + thread / 8, thread % 8 * 16)));
                    put(block, piece, share, x);
                }
            }
        }
    }

   private:
    static constexpr int rows = Shape::piece_rows;

    // A piece's values, rounded, into shared memory.
    template <class Values>
    __device__ __forceinline__ void stage(std::uint32_t target, const Sums& sums, Values& values, int block,
                                          int piece) const {
        const int warp = thread / 32, in_matrix = thread % 8, below = thread / 8 % 2, right = thread / 16 % 2;
#pragma unroll
        for (int j = 0; j < rows / 16; ++j) {
            const int q = Shape::piece_q(piece) + 16 * j;
            const auto value = values(&sums[block][q / 2], block, q);
            const auto two = [&](int i) { return pack<Out>(value(i), value(i + 1)); };
            if constexpr (Shape::swapped)
                store_matrices_transposed(target + swizzled(16 * j + 8 * right + in_matrix, 32 * warp + 16 * below), two(0),
                                          two(2), two(4), two(6));
            else
                store_matrices(target + swizzled(16 * warp + 8 * below + in_matrix, 32 * j + 16 * right), two(0), two(2),
                               two(4), two(6));
        }
    }

    // Of this warpgroup.
    __device__ __forceinline__ void sync() { named_barrier_sync(1 + group, 128); }

    const std::uint32_t out;
    const int group, thread;
    std::uint32_t half = 0;  // where the next piece lies; goes on from tile to tile
};

}  // namespace catalog::cuda
