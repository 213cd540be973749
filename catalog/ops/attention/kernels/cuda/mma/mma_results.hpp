// What becomes of the registers of fmha forward's main loop with mma.sync: groups of warps merge their results, rows
// are normalised and stored.
#pragma once

#include "cuda/common/dropout.hpp"
#include "cuda/common/results.hpp"
#include "mma_tile.hpp"
#include "mma_work.hpp"

namespace catalog::cuda {

// Shared memory in which groups of warps leave their results for each other: rows of O, `group` numbers from one group's
// to the next one's, and the maxima of all rows of all groups, which their sums follow.
template <class Row>
struct MergeRoom {
    std::uint32_t staged;  // rows of O in its type, where there is one group
    float* o;
    int group;
    float* maxima;

    // Rows are permuted in steps of 32 bytes, so that the same column of eight rows lies in different banks.
    __device__ __forceinline__ float* at(int of_group, int row, int column) const {
        return o + of_group * group + row * Row::hdim_v + (((column / 8) ^ (row & 7)) * 8 + column % 8);
    }
};

// `Target` is an MmaWork, or says in the same way where results go.
template <class Row, class Target>
class MmaResults {
    using T = typename Row::otype;
    using Shape = MmaShape<Row>;
    static constexpr int atoms = Shape::atoms, tile_m0 = Row::tile_m0, hdim_v = Row::hdim_v;
    static constexpr int in_piece = 16 / sizeof(T);  // elements of O in 16 bytes
    static constexpr bool staged = Shape::stages_o && !Target::of_part;

   public:
    using Accumulator = float[atoms][hdim_v / 8][4];
    using PerRow = float[atoms][2];

    // `max` in units of log2; `sum`: the lane's part of the rows' sums. For `zero` see zero_of, here and below.
    __device__ __forceinline__ MmaResults(const catalog_args& args, const Target& work, const MergeRoom<Row>& room,
                                          const Accumulator& o, const PerRow& max, const PerRow& sum, int zero)
        : args(args),
          work(work),
          window(window_of<Row::mask>(args, work.seq.seqlen_q, work.seq.seqlen_k, {})),
          thread(zero),
          hdim(static_cast<int>(args.hdim_v)),
          room(room),
          o(o),
          max(max) {
#pragma unroll
        for (int m = 0; m < atoms; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float total = sum[m][half];
                total += __shfl_xor_sync(0xffffffff, total, 1);
                this->sum[m][half] = total + __shfl_xor_sync(0xffffffff, total, 2);
            }
    }

    __device__ __forceinline__ void finish() const {
        if constexpr (Shape::waves_n > 1)
            merge();
        else
            store();
    }

   private:
    __device__ __forceinline__ RowEnd end_of(const QueryRow& at, float largest, float total) const {
        RowEnd end = end_of_row<Row>(args, largest, total, work.seq.index, work.head_of(at), window.center(at.query),
                                     work.split == 0);
        if constexpr (Row::qscale == Qscale::pertensor)
            end.normalize *= *static_cast<const float*>(args.v_descale.data);
        if constexpr (Row::dropout) end.normalize *= dropout_of(args).scale;
        return end;
    }

    __device__ __forceinline__ void store_lse(int row, float lse) const {
        if (float* const target = work.lse_of(args, row)) *target = lse;
    }

    // Where no other group has part in the rows. Results of less than 32 bits take the way through the warp's rows of Q.
    // Where rows of Q are shorter, those of other warps give way too, so all wait until nobody reads Q.
    __device__ __forceinline__ void store() const {
        const std::uint32_t first_row = room.staged + thread.warp_m * Shape::rows * Shape::staged_row_bytes;
        if constexpr (Shape::staged_row_bytes > Shape::q_row_bytes && !Target::of_part)
            __syncthreads();
        else
            __syncwarp();
#pragma unroll
        for (int m = 0; m < atoms; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = thread.row(m, half);
                const int stored = row < work.rows ? row : 0;
                const RowEnd row_end = end_of(work.row_at(stored), max[m][half], sum[m][half]);
                if (row < work.rows && thread.lane % 4 == 0) store_lse(row, row_end.lse);
                float* target = nullptr;
                if constexpr (Target::of_part)
                    target = work.part_of(args, stored);
                else if constexpr (!staged)
                    target = work.o_of(args, stored);
#pragma unroll
                for (int n = 0; n < hdim_v / 8; ++n) {
                    const float first = o[m][n][2 * half] * row_end.normalize;
                    const float second = o[m][n][2 * half + 1] * row_end.normalize;
                    if constexpr (!staged) {
                        const int column = 8 * n + thread.lane % 4 * 2;
                        if (row < work.rows && column < hdim)
                            *reinterpret_cast<float2*>(target + column) = make_float2(first, second);
                    } else {
                        const int column = 8 * n % in_piece + thread.lane % 4 * 2;  // of its piece
                        const std::uint32_t offset =
                            piece_offset<Shape::o_row_bytes>(16 * m + 8 * half + thread.lane / 4, 8 * n / in_piece);
                        stage_two<T>(first_row + offset + column * sizeof(T), first, second);
                    }
                }
            }
        if constexpr (staged) store_staged(first_row);
    }

    __device__ __forceinline__ void store_staged(std::uint32_t first_row) const {
        constexpr int pieces = hdim_v / in_piece;
        __syncwarp();
#pragma unroll
        for (int first = 0; first < Shape::rows * pieces; first += 32) {
            const int index = first + thread.lane, row = index / pieces, piece = index % pieces;
            const int in_tile = thread.warp_m * Shape::rows + row;
            uint4 data;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(data.x), "=r"(data.y), "=r"(data.z), "=r"(data.w)
                         : "r"(first_row + piece_offset<Shape::o_row_bytes>(row, piece))
                         : "memory");
            if (in_tile < work.rows && piece * in_piece < hdim)
                *reinterpret_cast<uint4*>(work.o_of(args, in_tile) + piece * in_piece) = data;
        }
    }

    // Every group has weighed its keys by itself.
    __device__ __forceinline__ void merge() const {
        float* const sums = room.maxima + Shape::merge_rows;
        __syncthreads();
#pragma unroll
        for (int m = 0; m < atoms; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = thread.row(m, half);
                if (thread.lane % 4 == 0) {
                    room.maxima[thread.warp_n * tile_m0 + row] = max[m][half];
                    sums[thread.warp_n * tile_m0 + row] = sum[m][half];
                }
#pragma unroll
                for (int n = 0; n < hdim_v / 8; ++n)
                    *reinterpret_cast<float2*>(room.at(thread.warp_n, row, 8 * n + thread.lane % 4 * 2)) =
                        make_float2(o[m][n][2 * half], o[m][n][2 * half + 1]);
            }
        __syncthreads();
        for (int index = threadIdx.x; index < work.rows * (hdim_v / 4); index += Shape::threads)
            merge_piece(index / (hdim_v / 4), index % (hdim_v / 4) * 4, sums);
    }

    // Four columns of a row.
    __device__ __forceinline__ void merge_piece(int row, int column, const float* sums) const {
        float largest = minus_infinity(), total = 0.0f;
#pragma unroll
        for (int group = 0; group < Shape::waves_n; ++group) 
            largest = fmaxf(largest, room.maxima[group * tile_m0 + row]);
        const float reference = largest == minus_infinity() ? 0.0f : largest;
        float4 o = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int group = 0; group < Shape::waves_n; ++group) {
            const int place = group * tile_m0 + row;
            const float weight = exp2_approximate(room.maxima[place] - reference);
            const float4 part = *reinterpret_cast<const float4*>(room.at(group, row, column));
            total = fmaf(sums[place], weight, total);
            o = make_float4(fmaf(part.x, weight, o.x), fmaf(part.y, weight, o.y), fmaf(part.z, weight, o.z),
                            fmaf(part.w, weight, o.w));
        }
        const RowEnd row_end = end_of(work.row_at(row), largest, total);
        if (column == 0) store_lse(row, row_end.lse);
        if (column >= hdim) return;
        const float scale = row_end.normalize;
        const float4 scaled = make_float4(o.x * scale, o.y * scale, o.z * scale, o.w * scale);
        if constexpr (Target::of_part)
            store_four(work.part_of(args, row) + column, scaled);
        else
            store_four(work.o_of(args, row) + column, scaled);
    }

    const catalog_args& args;
    const Target& work;
    const Window<Row::mask> window;
    const MmaThread<Row> thread;
    const int hdim;
    const MergeRoom<Row>& room;
    const Accumulator& o;
    const PerRow& max;
    PerRow sum;
};

}  // namespace catalog::cuda
