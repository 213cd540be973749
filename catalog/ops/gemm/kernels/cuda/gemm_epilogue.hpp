// From sums to elements of C: C = f(alpha A B + beta C + bias), combined with the D tensors.
//
// A plain product is rounded in registers and stored by TMA while the block goes on. All others pass through shared
// memory as sums of 32 bits, a piece of 64 columns at a time, so that rows of C, D and the bias are read and written in
// vectors and the sums of all blocks that share a tile meet there.
#pragma once

#include <type_traits>

#include "cuda/cluster.hpp"
#include "cuda/gemm_pieces.hpp"
#include "gemm_scales.hpp"
#include "gemm_tiles.hpp"

namespace catalog::cuda {

template <int width>
__device__ __forceinline__ void activate(float (&x)[width], std::int32_t activation) {
    const auto each = [&](auto&& function) {
#pragma unroll
        for (float& value : x) value = function(value);
    };
    switch (activation) {
        case CATALOG_RELU: return each([](float x) { return x < 0.0f ? 0.0f : x; });  // NaN stays NaN
        case CATALOG_GELU: return each([](float x) { return 0.5f * x * (1.0f + erff(x * 0x1.6a09e6p-1f)); });
        case CATALOG_SILU: return each([](float x) { return __fdividef(x, 1.0f + __expf(-x)); });
        default: return;
    }
}

// Integers stay exact: problems of int8 have no other activation.
template <int width>
__device__ __forceinline__ void activate(std::int32_t (&x)[width], std::int32_t activation) {
    if (activation != CATALOG_RELU) return;
#pragma unroll
    for (std::int32_t& value : x) value = max(value, 0);
}

__device__ __forceinline__ float value_of(bf16 x) { return static_cast<float>(x); }
__device__ __forceinline__ float value_of(fp16 x) { return static_cast<float>(x); }
__device__ __forceinline__ float value_of(float x) { return x; }
__device__ __forceinline__ std::int32_t value_of(std::int32_t x) { return x; }

// Sums in shared memory are 32 bits of either type. They leave accumulators as they are: as bits, they would be copied.
__device__ __forceinline__ void store_shared(std::uint32_t address, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

__device__ __forceinline__ void store_shared(std::uint32_t address, std::int32_t x) {
    asm volatile("st.shared.s32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

__device__ __forceinline__ void store_shared(std::uint32_t address, std::int32_t x, std::int32_t y) {
    asm volatile("st.shared.v2.s32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y) : "memory");
}

template <class Sum>
__device__ __forceinline__ Sum sum_of(std::uint32_t bits) {
    if constexpr (std::is_same_v<Sum, float>)
        return __uint_as_float(bits);
    else
        return static_cast<Sum>(bits);
}

// `width` elements of a row: 1, or 8 in one or two accesses.
template <class T, int width>
struct Elements {
    static constexpr int vectors = sizeof(T) * width / 16;
    alignas(vectors > 0 ? 16 : sizeof(T)) T of[width];

    static __device__ __forceinline__ Elements load(const T* from) {
        Elements elements;
        if constexpr (vectors == 0)
            elements.of[0] = *from;
        else
#pragma unroll
            for (int i = 0; i < vectors; ++i)
                reinterpret_cast<uint4*>(elements.of)[i] = reinterpret_cast<const uint4*>(from)[i];
        return elements;
    }

    __device__ __forceinline__ void store(T* to) const {
        if constexpr (vectors == 0)
            *to = of[0];
        else
#pragma unroll
            for (int i = 0; i < vectors; ++i)
                reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(of)[i];
    }
};

// What sums become: integers only where C has them.
template <class Row>
using Value = std::conditional_t<std::is_same_v<typename Row::out, std::int32_t>, std::int32_t, float>;

// Elements of C in one row, from `row` and `column` on. `plain` is call.plain as a constant: code that is skipped would be
// fetched from memory all the same.
template <class Row, bool plain, class Sum, int width>
__device__ __forceinline__ void finish(const GemmCall& call, const GemmTile& tile, int row, int column,
                                       const Sum (&sums)[width]) {
    using Out = typename Row::out;
    constexpr bool real = std::is_same_v<Value<Row>, float>;
    const auto place = [&](const OutTensor& tensor) {
        return static_cast<Out*>(tensor.data) + tile.batch * tensor.batch + row * tensor.row + column;
    };
    Value<Row> x[width];
#pragma unroll
    for (int i = 0; i < width; ++i) x[i] = static_cast<Value<Row>>(sums[i]);
    if constexpr (Row::scales == Scales::row) {
        const float of_row = __ldg(scales_of_a(call, tile) + row);
        const float* const of_columns = scales_of_b(call, tile) + column;
#pragma unroll
        for (int i = 0; i < width; ++i) x[i] *= of_row * __ldg(of_columns + i);
    }
    const auto each = [&](const Out* from, auto&& change) {
        const auto values = Elements<Out, width>::load(from);
#pragma unroll
        for (int i = 0; i < width; ++i) change(x[i], value_of(values.of[i]));
    };
    Out* const c = place(call.c);
    if constexpr (real) {
#pragma unroll
        for (int i = 0; i < width; ++i) x[i] *= call.alpha;
    }
    if constexpr (!plain) {
        using V = Value<Row>;
        if (call.beta != 0) each(c, [&](V& sum, V old) { sum += real ? static_cast<V>(call.beta * old) : old; });
        if (call.bias) each(static_cast<const Out*>(call.bias) + column, [](V& sum, V bias) { sum += bias; });
        activate(x, call.activation);
        const auto combine = [](V& sum, V d) { sum = Row::multiplies ? sum * d : sum + d; };
        if constexpr (Row::num_d > 0) each(place(call.d[0]), combine);
        if constexpr (Row::num_d > 1) each(place(call.d[1]), combine);
    }
    if constexpr (width == 8 && sizeof(Out) == 2) {
        *reinterpret_cast<uint4*>(c) =
            make_uint4(pack<Out>(x[0], x[1]), pack<Out>(x[2], x[3]), pack<Out>(x[4], x[5]), pack<Out>(x[6], x[7]));
    } else {
        Elements<Out, width> values;
#pragma unroll
        for (int i = 0; i < width; ++i) values.of[i] = Out(x[i]);
        values.store(c);
    }
}

template <class Row>
class GemmEpilogue {
    using Shape = GemmShape<Row>;
    using Out = typename Row::out;
    using Sum = typename Shape::Sum;
    using Sums = typename Shape::Sums;

   public:
    __device__ __forceinline__ GemmEpilogue(const GemmCall& call, std::uint32_t shared, int group)
        : call(call),
          shared(shared),
          group(group),
          thread(static_cast<int>(threadIdx.x) % 128),
          pieces(shared, group) {}

    // Asks for the parameters of store(), long before they are needed.
    __device__ __forceinline__ void fetch() const { asm volatile("" ::"l"(call.c.data), "l"(call.c.row)); }

    // TMA may still read shared memory afterwards.
    __device__ __forceinline__ void store_pieces(const GemmTile& tile, const Sums& sums) {
        const auto values = [&](const Sum* x, int block, int q) {
            Factors of;
            find_factors(tile, block, q, of);
            return [=, alpha = call.alpha](int i) {
                const float sum = static_cast<float>(x[i]);
                if constexpr (Row::scales == Scales::row)
                    return of.rows[i / 2 % 2] * of.columns[i / 4 * 2 + i % 2] * sum;
                else
                    return alpha * sum;
            };
        };
        pieces.store(sums, values, [&](std::uint32_t piece, int p, int q) {
            const int m = tile.m + (Shape::swapped ? q : p), n = tile.n + (Shape::swapped ? p : q);
            if (m < tile.end_m) store_rows(tile, piece, n, m);
        });
    }

    // Where the blocks of a cluster share the tile, each finishes a part of its rows.
    __device__ __forceinline__ void store(const GemmTile& tile, const Sums& sums) {
        const bool split = Shape::can_split && call.log_parts > 0;
        const int rank = split ? static_cast<int>(cluster_rank()) : 0;
        std::uint32_t out = shared + (split ? group * Shape::pieces : 0) * Shape::piece_bytes;
        if (split) {
            named_barrier_sync(8, 128 * Shape::groups);  // the stages are no longer read
            for (int piece = 0; piece < Shape::pieces; ++piece)
                write_piece(out + piece * Shape::piece_bytes, sums, piece);
            cluster_sync();
        } else {
            out += Shape::out + group * Shape::piece_bytes;
        }
#pragma unroll 1
        for (int piece = 0; piece < Shape::pieces; ++piece) {
            if (!split) {
                sync();  // the piece before was read
                write_piece(out, sums, piece);
                sync();
            }
            finish_piece(tile, piece, out + (split ? piece * Shape::piece_bytes : 0), rank);
        }
    }

   private:
    __device__ __forceinline__ void store_rows(const GemmTile& tile, std::uint32_t source, int n, int m) const {
        if constexpr (Row::grouped && !Row::along_depth) {
            const RaggedRows rows = rows_of_group(call.c_row, tile.first_m, tile.end_m);
            tma_store(&call.c_map, source, n, rows.first_row + m - tile.first_m, rows.low, rows.high, RaggedRows::wrap);
        } else {
            tma_store(&call.c_map, source, n, m, tile.batch);
        }
    }

    // Alpha times the scales of a thread's two rows of a block, and scales of its four columns of 16.
    struct Factors {
        float rows[2], columns[4];
    };
    __device__ __forceinline__ void find_factors(const GemmTile& tile, int block, int first, Factors& of) const {
        if constexpr (Row::scales == Scales::row) {
            const int row = tile.m + (group * Shape::blocks_p + block) * 64 + thread / 32 * 16 + thread % 32 / 4;
            const int column = tile.n + first + thread % 4 * 2;
#pragma unroll
            for (int i = 0; i < 2; ++i)
                of.rows[i] = call.alpha * __ldg(scales_of_a(call, tile) + min(row + 8 * i, tile.end_m - 1));
#pragma unroll
            for (int i = 0; i < 4; ++i)
                of.columns[i] = __ldg(scales_of_b(call, tile) + min(column + i / 2 * 8 + i % 2, call.n - 1));
        }
    }

    // The sums of a piece.
    static __device__ __forceinline__ const Sum* sums_of(const Sums& sums, int piece) {
        return &sums[piece / Shape::pieces_q][Shape::piece_q(piece) / 2];
    }

    // Of this warpgroup.
    __device__ __forceinline__ void sync() { named_barrier_sync(1 + group, 128); }

    // Where an element of a piece lies: rows of 64 floats, of which groups of 8 are permuted.
    static __device__ __forceinline__ std::uint32_t place(int row, int column) {
        return 4 * (row * 64 + (column ^ (((row ^ row >> 2) & 3) << 3)));
    }

    template <int width>
    static __device__ __forceinline__ void read(Sum (&x)[width], std::uint32_t address) {
        std::uint32_t bits[width];
#pragma unroll
        for (int i = 0; i < width; i += 4) {
            if constexpr (width == 1)
                asm volatile("ld.shared.b32 %0, [%1];" : "=r"(bits[0]) : "r"(address) : "memory");
            else
                asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(bits[i]), "=r"(bits[i + 1]), "=r"(bits[i + 2]), "=r"(bits[i + 3])
                             : "r"(address + 4 * i)
                             : "memory");
        }
#pragma unroll
        for (int i = 0; i < width; ++i) x[i] = sum_of<Sum>(bits[i]);
    }

    template <int width>
    static __device__ __forceinline__ void add_remote(Sum (&x)[width], std::uint32_t address) {
        const auto sum = [](float there) { return sum_of<Sum>(__float_as_uint(there)); };
        if constexpr (width == 1) {
            x[0] += sum(load_remote_float(address));
        } else {
#pragma unroll
            for (int i = 0; i < width; i += 4) {
                const float4 values = load_remote(address + 4 * i);
                x[i] += sum(values.x), x[i + 1] += sum(values.y), x[i + 2] += sum(values.z), x[i + 3] += sum(values.w);
            }
        }
    }

    // They are found in registers, by constants.
    __device__ __forceinline__ void write_piece(std::uint32_t target, const Sums& sums, int piece) const {
#pragma unroll
        for (int i = 0; i < Shape::pieces; ++i)
            if (i == piece) write_sums(target, sums_of(sums, i));
    }

    // Those of a swapped tile as its transpose.
    __device__ __forceinline__ void write_sums(std::uint32_t piece, const Sum* sums) const {
        constexpr int columns = Shape::swapped ? Shape::piece_rows : 64;
        const int lane = thread % 32, first_p = thread / 32 * 16 + lane / 4, first_q = lane % 4 * 2;
        const auto each = [&](auto&& put) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int j = 0; j < columns / 8; ++j)
                    put(first_p + 8 * half, first_q + 8 * j, sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]);
        };
        each([&](int p, int q, Sum x, Sum y) {
            if constexpr (Shape::swapped) {
                store_shared(piece + place(q, p), x);
                store_shared(piece + place(q + 1, p), y);
            } else {
                store_shared(piece + place(p, q), x, y);
            }
        });
    }

    // Part `part` of a piece, one of parts of equal size.
    __device__ __forceinline__ void finish_piece(const GemmTile& tile, int piece, std::uint32_t address, int part) const {
        const int p = (group * Shape::blocks_p + piece / Shape::pieces_q) * 64;
        const int q = Shape::piece_q(piece), done = piece % Shape::pieces_q * 64 - q;  // along q, in the piece before
        if (call.vectors && call.plain)
            finish_part<8, true>(tile, p, q, done, address, part);
        else if (call.vectors)
            finish_part<8, false>(tile, p, q, done, address, part);
        else
            finish_part<1, false>(tile, p, q, done, address, part);
    }

    template <int width, bool plain>
    __device__ __forceinline__ void finish_part(const GemmTile& tile, int p, int q, int done, std::uint32_t address,
                                                int part) const {
        constexpr int in_row = 64 / width, apart = 128 / in_row;  // rows of a thread
        constexpr int at_once = width == 1 ? 4 : 1;               // so that threads wait less for single elements
        const int first_row = tile.m + (Shape::swapped ? q : p), first_column = tile.n + (Shape::swapped ? p : q);
        const int done_rows = Shape::swapped ? done : 0, done_columns = Shape::swapped ? 0 : done;
        const int count = Shape::piece_rows >> call.log_parts, column = thread % in_row * width;
        const int end = min((part + 1) * count, tile.end_m - first_row);
        if (column < done_columns || first_column + column >= call.n) return;
        for (int first = part * count + thread / in_row; first < end; first += at_once * apart) {
            Sum x[at_once][width] = {};
            const auto each = [&](auto&& add) {
#pragma unroll
                for (int i = 0; i < at_once; ++i)
                    if (first + i * apart < end) add(x[i], address + place(first + i * apart, column));
            };
            if (call.log_parts == 0)
                each([](auto& sums, std::uint32_t there) { read(sums, there); });
            else
                for (int rank = 0; rank < call.parts(); ++rank)
                    each([&](auto& sums, std::uint32_t there) { add_remote(sums, shared_address_of(there, rank)); });
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                const int row = first + i * apart;
                if (done_rows <= row && row < end)
                    finish<Row, plain>(call, tile, first_row + row, first_column + column, x[i]);
            }
        }
    }

    const GemmCall& call;
    const std::uint32_t shared;
    const int group, thread;
    GemmPieces<Row, Out> pieces;  // of a plain product
};

}  // namespace catalog::cuda
