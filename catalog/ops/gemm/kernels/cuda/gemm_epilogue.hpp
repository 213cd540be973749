// From sums to elements of C: C = f(alpha A B + beta C + bias), combined with the D tensors.
//
// A plain product is rounded in registers and stored by TMA while the block goes on. All others pass through shared
// memory in float32, a piece of 64 columns at a time, so that rows of C, D and the bias are read and written in vectors
// and the sums of all blocks that share a tile meet there.
#pragma once

#include "cuda/cluster.hpp"
#include "cuda/gemm_pieces.hpp"
#include "gemm_call.hpp"

namespace catalog::cuda {

// A tile of C by the coordinates of its first element.
struct GemmTile {
    int batch, m, n;
};

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

__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(fp16 x) { return __half2float(x); }

// `width` elements of a row: 1, or 8 in one access.
template <class T, int width>
struct Elements {
    alignas(sizeof(T) * width) T of[width];

    static __device__ __forceinline__ Elements load(const T* from) {
        Elements elements;
        if constexpr (width == 8)
            *reinterpret_cast<uint4*>(elements.of) = *reinterpret_cast<const uint4*>(from);
        else
            elements.of[0] = *from;
        return elements;
    }
};

// Elements of C in one row, `x`, from `row` and `column` on.
template <class Row, int width>
__device__ __forceinline__ void finish(const GemmCall& call, int batch, int row, int column, float (&x)[width]) {
    using T = typename Row::dtype;
    const auto place = [&](const OutTensor& tensor) {
        return static_cast<T*>(tensor.data) + batch * tensor.batch + row * tensor.row + column;
    };
    const auto each = [&](const T* from, auto&& change) {
        const auto values = Elements<T, width>::load(from);
#pragma unroll
        for (int i = 0; i < width; ++i) change(x[i], to_float(values.of[i]));
    };
    T* const c = place(call.c);
#pragma unroll
    for (int i = 0; i < width; ++i) x[i] *= call.alpha;
    if (call.beta != 0) each(c, [&](float& sum, float old) { sum += call.beta * old; });
    if (call.bias) each(static_cast<const T*>(call.bias) + column, [](float& sum, float bias) { sum += bias; });
    activate(x, call.activation);
    const auto combine = [](float& sum, float d) { sum = Row::multiplies ? sum * d : sum + d; };
    if constexpr (Row::num_d > 0) each(place(call.d[0]), combine);
    if constexpr (Row::num_d > 1) each(place(call.d[1]), combine);
    if constexpr (width == 8)
        *reinterpret_cast<uint4*>(c) =
            make_uint4(pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7]));
    else
        *c = T(x[0]);
}

template <class Row>
class GemmEpilogue {
    using Shape = GemmShape<Row>;
    using T = typename Row::dtype;
    using Sums = float[Shape::blocks_p][Shape::tile_q / 2];

   public:
    __device__ __forceinline__ GemmEpilogue(const GemmCall& call, std::uint32_t shared, int group)
        : call(call),
          shared(shared),
          group(group),
          thread(static_cast<int>(threadIdx.x) % 128),
          pieces(shared, group) {}

    // TMA may still read shared memory afterwards.
    __device__ __forceinline__ void store_plain(const GemmTile& tile, const Sums& sums) {
        pieces.store(sums, call.alpha, [&](std::uint32_t piece, int row, int column) {
            if (tile.m + row < call.m) tma_store(&call.c_map, piece, tile.n + column, tile.m + row, tile.batch);
        });
    }

    // Where the blocks of a cluster share the tile, threads that have no sums call cluster_sync() meanwhile.
    __device__ __forceinline__ void store(const GemmTile& tile, const Sums& sums) {
        const bool split = Shape::can_split && call.splits > 1;
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
            finish_piece(tile, piece, out + (split ? piece * Shape::piece_bytes : 0), rank, call.splits);
        }
    }

   private:
    // Of this warpgroup.
    __device__ __forceinline__ void sync() { named_barrier_sync(1 + group, 128); }

    // Where an element of a piece lies: rows of 64 floats, of which groups of 8 are permuted.
    static __device__ __forceinline__ std::uint32_t place(int row, int column) {
        return 4 * (row * 64 + (column ^ (((row ^ row >> 2) & 3) << 3)));
    }

    template <int width>
    static __device__ __forceinline__ void read(float (&x)[width], std::uint32_t address) {
#pragma unroll
        for (int i = 0; i < width; i += 4) {
            if constexpr (width == 1)
                asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x[0]) : "r"(address) : "memory");
            else
                asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                             : "=f"(x[i]), "=f"(x[i + 1]), "=f"(x[i + 2]), "=f"(x[i + 3])
                             : "r"(address + 4 * i)
                             : "memory");
        }
    }

    template <int width>
    static __device__ __forceinline__ void add_remote(float (&x)[width], std::uint32_t address) {
        if constexpr (width == 1) {
            x[0] += load_remote_float(address);
        } else {
#pragma unroll
            for (int i = 0; i < width; i += 4) {
                const float4 values = load_remote(address + 4 * i);
                x[i] += values.x, x[i + 1] += values.y, x[i + 2] += values.z, x[i + 3] += values.w;
            }
        }
    }

    // The sums of a piece, 32 of each thread. They are found in registers, by constants.
    __device__ __forceinline__ void write_piece(std::uint32_t target, const Sums& sums, int piece) const {
#pragma unroll
        for (int i = 0; i < Shape::pieces; ++i)
            if (i == piece) write_sums(target, &sums[i / Shape::pieces_q][i % Shape::pieces_q * 32]);
    }

    // Those of a swapped tile as its transpose.
    __device__ __forceinline__ void write_sums(std::uint32_t piece, const float* sums) const {
        constexpr int columns = Shape::swapped ? Shape::tile_q : 64;
        const int lane = thread % 32, first_p = thread / 32 * 16 + lane / 4, first_q = lane % 4 * 2;
        const auto each = [&](auto&& put) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int j = 0; j < columns / 8; ++j)
                    put(first_p + 8 * half, first_q + 8 * j, sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]);
        };
        each([&](int p, int q, float x, float y) {
            if constexpr (Shape::swapped) {
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(piece + place(q, p)), "f"(x) : "memory");
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(piece + place(q + 1, p)), "f"(y) : "memory");
            } else {
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(piece + place(p, q)), "f"(x), "f"(y) : "memory");
            }
        });
    }

    // Part `part` of a piece, one of `splits` of equal size.
    __device__ __forceinline__ void finish_piece(const GemmTile& tile, int piece, std::uint32_t address, int part,
                                                 int splits) const {
        const int p = (group * Shape::blocks_p + piece / Shape::pieces_q) * 64, q = piece % Shape::pieces_q * 64;
        const int first_row = tile.m + (Shape::swapped ? 0 : p), first_column = tile.n + (Shape::swapped ? p : q);
        if (call.vectors)
            finish_part<8>(tile.batch, first_row, first_column, address, part, splits);
        else
            finish_part<1>(tile.batch, first_row, first_column, address, part, splits);
    }

    template <int width>
    __device__ __forceinline__ void finish_part(int batch, int first_row, int first_column, std::uint32_t address,
                                                int part, int splits) const {
        constexpr int in_row = 64 / width, apart = 128 / in_row;  // rows of a thread
        constexpr int at_once = width == 1 ? 4 : 1;               // so that threads wait less for single elements
        const int count = Shape::piece_rows / splits, column = thread % in_row * width;
        const int end = min((part + 1) * count, call.m - first_row);
        if (first_column + column >= call.n) return;
        for (int first = part * count + thread / in_row; first < end; first += at_once * apart) {
            float x[at_once][width] = {};
            const auto each = [&](auto&& add) {
#pragma unroll
                for (int i = 0; i < at_once; ++i)
                    if (first + i * apart < end) add(x[i], address + place(first + i * apart, column));
            };
            if (splits == 1)
                each([](auto& sums, std::uint32_t there) { read(sums, there); });
            else
                for (int rank = 0; rank < splits; ++rank)
                    each([&](auto& sums, std::uint32_t there) { add_remote(sums, shared_address_of(there, rank)); });
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                const int row = first + i * apart;
                if (row < end) finish<Row>(call, batch, first_row + row, first_column + column, x[i]);
            }
        }
    }

    const GemmCall& call;
    const std::uint32_t shared;
    const int group, thread;
    GemmPieces<Row> pieces;  // of a plain product
};

}  // namespace catalog::cuda
