// Q of a block's rows on its way to shared memory, through registers: loading and storing are apart, so that other results
// can be stored meanwhile.
#pragma once

#include "mma_work.hpp"

namespace catalog::cuda {

// `in_panels`: in panels of 64 rows, as wgmma reads them.
template <class Row, int threads, bool in_panels>
class StagedQueries {
    static constexpr int pieces = Row::hdim_q / 8;

   public:
    static constexpr int count = (Row::tile_m0 * pieces + threads - 1) / threads;  // of a thread

    template <class Work>
    __device__ __forceinline__ void load(const catalog_args& args, const Work& work) {
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
        if constexpr (in_panels)
            return row / 64 * (64 * Row::hdim_q * 2) + piece_offset<Row::hdim_q, 64>(row % 64, piece);
        return piece_offset<Row::hdim_q>(row, piece);
    }

    uint4 piece[count];
};

}  // namespace catalog::cuda
