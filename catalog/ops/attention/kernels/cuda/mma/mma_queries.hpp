// The queries of one warp as mma.sync takes them.
#pragma once

#include "mma_shape.hpp"

namespace catalog::cuda {

// Rows of Q, held in registers or read from shared memory again and again, in steps of 32 bytes of a key. Where keys have
// elements of 8 bits, a lane's columns of K are not those that mma.sync takes them for, and columns of Q are permuted in
// the same way.
template <class Row>
class MmaQueries {
    using Shape = MmaShape<Row>;
    static constexpr int atoms = Shape::atoms, keys = Shape::keys, bytes = has_bytes<Row>;
    static constexpr int steps = Row::hdim_q * Shape::element / 32;
    // Loads of numbers of 32 bits should not all be moved to the front: there are no registers for them.
    static constexpr int unrolled = Shape::element == 4 ? 2 : steps;
    using QueryRows = MatrixRows<Shape::q_row_bytes>;

   public:
    using Step = std::uint32_t[1 + bytes][atoms][4];
    using Products = float[atoms][keys / 8][4];

    // `q`: the first row of the block's tile in shared memory.
    __device__ __forceinline__ explicit MmaQueries(std::uint32_t q) : q(q) {}

    // Q has arrived.
    __device__ __forceinline__ void load() {
        if constexpr (narrowed) find_lifts();
        if constexpr (Shape::q_in_registers) {
            const QueryRows rows = rows_of(0);
#pragma unroll
            for (int step = 0; step < steps; ++step) load_step(rows, step, held[step]);
        }
    }

    // Calls body(step, queries) for every step. For `zero` see zero_of.
    template <class Body>
    __device__ __forceinline__ void for_steps(int zero, Body body) const {
        const QueryRows rows = rows_of(zero);
#pragma unroll(unrolled)
        for (int step = 0; step < steps; ++step) {
            if constexpr (Shape::q_in_registers) {
                body(step, held[step]);
            } else {
                Step queries;
                load_step(rows, step, queries);
                body(step, queries);
            }
        }
    }

    // What rows were multiplied with is taken out of their products.
    __device__ __forceinline__ void restore(Products& products) const {
        if constexpr (narrowed)
            if (lifts)
#pragma unroll
                for (int m = 0; m < atoms; ++m)
#pragma unroll
                    for (int n = 0; n < keys / 8; ++n)
#pragma unroll
                        for (int c = 0; c < 4; ++c) products[m][n][c] *= power_of_two(-exponent[m][c / 2]);
    }

   private:
    // Whether Q is bf16 that becomes fp16, because K does. Every bf16 fits the precision of fp16, but not its range: the
    // largest element of a row should be between 1 and 2^15. Then what falls below fp16's smallest normal number is off
    // by 2^-25, less than the sum in float32 is. Rows of other sizes are multiplied by a power of two.
    static constexpr bool narrowed = bytes && std::is_same_v<QueryElement<Row>, bf16>;

    static __device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((127 + exponent) << 23); }

    __device__ __forceinline__ QueryRows rows_of(int zero) const {
        const MmaThread<Row> thread(zero);
        return {q, thread.warp_m * Shape::rows + thread.lane % 16, thread.lane / 16};
    }

    // Elements 4 (lane % 4) to 4 (lane % 4) + 3 of 16 columns of a row of the lane.
    __device__ __forceinline__ uint2 load_four(int m, int half, int columns) const {
        const MmaThread<Row> thread(0);
        const int lane = thread.lane % 4;
        uint2 four;
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                     : "=r"(four.x), "=r"(four.y)
                     : "r"(q + piece_offset<Shape::q_row_bytes>(thread.row(m, half), 2 * columns + lane / 2) + lane % 2 * 8)
                     : "memory");
        return four;
    }

    __device__ __forceinline__ void find_lifts() {
        constexpr int bias = 127, lowest = 0, highest = 14, most = 100;
        lifts = false;
#pragma unroll
        for (int m = 0; m < atoms; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                std::uint32_t largest = 0;
#pragma unroll
                for (int columns = 0; columns < Row::hdim_q / 16; ++columns) {
                    const uint2 four = load_four(m, half, columns);
                    largest = __vmaxu2(largest, __vmaxu2(four.x & 0x7fff7fffu, four.y & 0x7fff7fffu));
                }
                largest = __vmaxu2(largest, __shfl_xor_sync(0xffffffff, largest, 1));
                largest = __vmaxu2(largest, __shfl_xor_sync(0xffffffff, largest, 2));
                const int size = static_cast<int>(max(largest >> 16, largest & 0xffff) >> 7) - bias;
                // 128 is that of infinities and NaNs, which stay what they are.
                const bool fits = (lowest <= size && size <= highest) || size == 128;
                exponent[m][half] = fits ? 0 : min(highest - size, most);
                lifts |= !fits;
            }
        lifts = __any_sync(0xffffffff, lifts);
    }

    // Two elements of a row, as fp16.
    __device__ __forceinline__ std::uint32_t narrow(std::uint32_t pair, int m, int half) const {
        if constexpr (narrowed) {
            const float lift = power_of_two(exponent[m][half]);
            return pack<fp16>(__int_as_float(pair << 16) * lift, __int_as_float(pair & 0xffff0000u) * lift);
        }
        return pair;
    }

    __device__ __forceinline__ void load_step(const QueryRows& rows, int step, Step& queries) const {
#pragma unroll
        for (int m = 0; m < atoms; ++m) {
            if constexpr (bytes && !has_query_bytes<Row>) {
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const uint2 four = load_four(m, half, 2 * step + i);
                        queries[i][m][half] = narrow(four.x, m, half);
                        queries[i][m][2 + half] = narrow(four.y, m, half);
                    }
            } else if constexpr (!bytes) {
                load_matrices(rows.at(16 * m, step), queries[0][m]);
            } else {
                std::uint32_t of_rows[4];  // rows 0 to 7 and 8 to 15, of 16 columns and of the next 16
                load_matrices(rows.at(16 * m, step), of_rows);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    queries[i / 2][m][i % 2] = widen<typename Row::dtype>(of_rows[i]);
                    queries[i / 2][m][2 + i % 2] = widen<typename Row::dtype>(of_rows[i] >> 16);
                }
            }
        }
    }

    const std::uint32_t q;
    int exponent[narrowed ? atoms : 1][2];  // of the powers of two that rows are multiplied with
    bool lifts;                             // whether any row of the warp is
    Step held[Shape::q_in_registers ? steps : 1];
};

}  // namespace catalog::cuda
