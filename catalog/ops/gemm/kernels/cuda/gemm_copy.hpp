// Copies of operands that TMA cannot read: an odd number of columns, a view that begins at any element, repeated rows;
// and transposed copies, for tensor cores that read elements of 8 bits along the depth alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "gemm_call.hpp"

namespace catalog::cuda {

// A matrix for each product of a batch, which is copied so that rows begin at multiples of 16 bytes, or is transposed.
struct MatrixCopy {
    const void* from;
    void* to;
    std::int64_t from_batch, from_row, to_batch, to_row;  // strides in elements
    std::int64_t rows;
    int columns, matrices;
    bool transposes;
    int lanes;             // threads of a block that share a row, a power of two
    int segments;          // parts of a row, of a vector for each of these threads; or tiles of a row
    std::uint32_t pieces;  // of a matrix: as many rows of a segment as a block copies at a time
};

struct MatrixCopies {
    MatrixCopy of[2];
};

inline constexpr int copy_threads = 256;
inline constexpr int copy_tile = 64;  // rows and columns that a block transposes at a time

// An element of a copy: only its bits matter.
template <class T>
using Bits = std::conditional_t<sizeof(T) == 1, std::uint8_t, std::uint16_t>;

// Up to 16 bytes of elements at any address; those from `left` on are zeros.
template <class Bits>
__device__ __forceinline__ uint4 load_vector(const Bits* from, int left) {
    constexpr int width = 16 / sizeof(Bits), in_word = 4 / sizeof(Bits);
    if (left >= width && reinterpret_cast<std::uintptr_t>(from) % 4 == 0) {
        const auto* const words = reinterpret_cast<const std::uint32_t*>(from);
        return make_uint4(words[0], words[1], words[2], words[3]);
    }
    std::uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < width; ++i)
        words[i / in_word] |= static_cast<std::uint32_t>(i < left ? from[i] : 0) << i % in_word * 8 * sizeof(Bits);
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// A thread copies a vector of a row, which is written at once.
template <class Bits>
__device__ __forceinline__ void copy_piece(const MatrixCopy& copy, const Bits* from, Bits* to, std::uint32_t above,
                                           std::uint32_t segment) {
    constexpr int width = 16 / sizeof(Bits);
    const int thread = static_cast<int>(threadIdx.x), at_once = copy_threads / copy.lanes;
    const std::int64_t row = static_cast<std::int64_t>(above) * at_once + thread / copy.lanes;
    const int column = (static_cast<int>(segment) * copy.lanes + thread % copy.lanes) * width;
    if (row < copy.rows && column < copy.columns)
        *reinterpret_cast<uint4*>(to + row * copy.to_row + column) =
            load_vector(from + row * copy.from_row + column, copy.columns - column);
}

// A tile passes through shared memory, whose rows are a word longer.
template <class Bits>
__device__ __forceinline__ void transpose_piece(const MatrixCopy& copy, const Bits* from, Bits* to, std::uint32_t above,
                                                std::uint32_t segment) {
    constexpr int width = 16 / sizeof(Bits), lanes = copy_tile / width, pitch = copy_tile + 4 / sizeof(Bits);
    __shared__ alignas(16) Bits tile[copy_tile * pitch];
    const std::int64_t first_row = static_cast<std::int64_t>(above) * copy_tile;
    const int first_column = static_cast<int>(segment) * copy_tile;
    const auto each = [&](auto&& move) {
#pragma unroll
        for (int i = static_cast<int>(threadIdx.x); i < copy_tile * lanes; i += copy_threads)
            move(i / lanes, i % lanes * width);
    };
    __syncthreads();  // the tile before was written
    each([&](int row, int column) {
        const int left = first_row + row < copy.rows ? copy.columns - first_column - column : 0;
        const uint4 vector =
            left > 0 ? load_vector(from + (first_row + row) * copy.from_row + first_column + column, left) : uint4{};
        auto* const words = reinterpret_cast<std::uint32_t*>(tile + row * pitch + column);
        words[0] = vector.x, words[1] = vector.y, words[2] = vector.z, words[3] = vector.w;
    });
    __syncthreads();
    each([&](int column, int row) {
        if (first_column + column >= copy.columns || first_row + row >= copy.rows) return;
        alignas(16) Bits vector[width];
#pragma unroll
        for (int i = 0; i < width; ++i) vector[i] = tile[(row + i) * pitch + column];
        *reinterpret_cast<uint4*>(to + (first_column + column) * copy.to_row + first_row + row) =
            *reinterpret_cast<const uint4*>(vector);
    });
}

// Grid: blocks of pieces, matrices, copies.
template <class Bits>
__global__ __launch_bounds__(copy_threads) void copy_matrices(const __grid_constant__ MatrixCopies copies) {
    const MatrixCopy& copy = copies.of[blockIdx.z];
    for (std::int64_t matrix = blockIdx.y; matrix < copy.matrices; matrix += gridDim.y) {
        const auto* const from = static_cast<const Bits*>(copy.from) + matrix * copy.from_batch;
        auto* const to = static_cast<Bits*>(copy.to) + matrix * copy.to_batch;
        for (std::uint32_t piece = blockIdx.x; piece < copy.pieces; piece += gridDim.x) {
            const std::uint32_t above = piece / copy.segments, segment = piece - above * copy.segments;
            if (copy.transposes)
                transpose_piece(copy, from, to, above, segment);
            else
                copy_piece(copy, from, to, above, segment);
        }
    }
}

// Operands as TMA reads them: the tensors themselves, or copies, which live until the stream has done what is queued
// before the destructor. Both are copied by one launch.
template <class T>
class ReadableCopies {
   public:
    catalog_status status = CATALOG_OK;

    explicit ReadableCopies(cudaStream_t stream) : stream(stream) {}
    ReadableCopies(const ReadableCopies&) = delete;
    ReadableCopies& operator=(const ReadableCopies&) = delete;

    // The operand is one of `rows` x `columns`, one for each product of the batch; or should be its transpose.
    void add(catalog_tensor& tensor, std::int64_t batch, std::int64_t rows, std::int64_t columns, bool transposes) {
        if (status != CATALOG_OK || (!transposes && readable<T>(tensor, batch, rows))) return;
        const std::int64_t matrices = tensor.stride_batch == 0 ? 1 : batch;
        const std::int64_t rows_there = transposes ? columns : rows, row = pitch(transposes ? rows : columns);
        std::int64_t elements;
        if (__builtin_mul_overflow(rows_there * row, matrices, &elements) ||
            elements > (std::int64_t{1} << 60) - bytes) {
            status = CATALOG_BAD_ARGUMENT;
            return;
        }
        int lanes = 1;
        while (lanes < copy_threads && lanes * in_vector<T> < columns) lanes *= 2;
        const std::int64_t segments = parts(columns, transposes ? copy_tile : lanes * in_vector<T>);
        const std::int64_t pieces = parts(rows, transposes ? copy_tile : copy_threads / lanes) * segments;
        if (pieces > most_pieces) {
            status = CATALOG_BAD_ARGUMENT;
            return;
        }
        copies.of[count] = {tensor.data, nullptr, tensor.stride_batch, tensor.stride_outer, rows_there * row, row, rows,
                            static_cast<int>(columns), static_cast<int>(matrices), transposes, lanes,
                            static_cast<int>(segments), static_cast<std::uint32_t>(pieces)};
        places[count] = bytes;
        tensors[count++] = &tensor;
        bytes += parts(elements * static_cast<std::int64_t>(sizeof(T)), line) * line;
    }

    // Queues the copies. The tensors that were added then describe them.
    void run() {
        if (status != CATALOG_OK || count == 0) return;
        if (cudaMallocAsync(&own, bytes, stream) != cudaSuccess) {
            own = nullptr;
            status = (launched(), CATALOG_NO_MEMORY);
            return;
        }
        std::int64_t blocks = 1, matrices = 1;
        for (int i = 0; i < count; ++i) {
            MatrixCopy& copy = copies.of[i];
            copy.to = static_cast<char*>(own) + places[i];
            *tensors[i] = {copy.to, copy.matrices > 1 ? copy.to_batch : 0, copy.to_row};
            blocks = std::max<std::int64_t>(blocks, copy.pieces);
            matrices = std::max<std::int64_t>(matrices, copy.matrices);
        }
        constexpr std::int64_t most_blocks = 2048;
        blocks = std::min(blocks, most_blocks);
        const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(std::min(matrices, most_blocks / blocks)),
                        static_cast<unsigned>(count));
        copy_matrices<Bits<T>><<<grid, copy_threads, 0, stream>>>(copies);
        status = launched();
    }

    ~ReadableCopies() {
        if (own) cudaFreeAsync(own, stream);
    }

   private:
    static constexpr std::int64_t line = 128;  // bytes
    static constexpr std::int64_t most_pieces = std::int64_t{1} << 31;  // 2^43 bytes

    // Rows that begin with a cache line are read from fewer lines; short ones rather stay close together.
    static std::int64_t pitch(std::int64_t columns) {
        const std::int64_t unit = columns > 32 ? line / static_cast<std::int64_t>(sizeof(T)) : in_vector<T>;
        return parts(columns, unit) * unit;
    }

    MatrixCopies copies{};
    catalog_tensor* tensors[2]{};
    std::int64_t places[2]{}, bytes = 0;
    int count = 0;
    void* own = nullptr;
    cudaStream_t stream;
};

}  // namespace catalog::cuda
