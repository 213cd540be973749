// Copies of operands that TMA cannot read: an odd number of columns, a view that begins at any element, repeated rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "gemm_call.hpp"

namespace catalog::cuda {

// A matrix for each product of a batch, which is copied so that rows begin at multiples of 16 bytes.
struct MatrixCopy {
    const void* from;
    void* to;
    std::int64_t from_batch, from_row, to_batch, to_row;  // strides in elements
    std::int64_t rows;
    int columns, matrices;
    int lanes;             // threads of a block that share a row, a power of two
    int segments;          // parts of a row, of eight elements for each of these threads
    std::uint32_t pieces;  // of a matrix: as many rows of a segment as a block copies at a time
};

struct MatrixCopies {
    MatrixCopy of[2];
};

inline constexpr int copy_threads = 256, copy_width = 8;

// Up to eight elements at any address; those from `left` on are zeros.
__device__ __forceinline__ uint4 load_eight(const std::uint16_t* from, int left) {
    if (left >= copy_width && reinterpret_cast<std::uintptr_t>(from) % 4 == 0) {
        const auto* const pairs = reinterpret_cast<const std::uint32_t*>(from);
        return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    std::uint32_t x[copy_width];
#pragma unroll
    for (int i = 0; i < copy_width; ++i) x[i] = i < left ? from[i] : 0;
    return make_uint4(x[0] | x[1] << 16, x[2] | x[3] << 16, x[4] | x[5] << 16, x[6] | x[7] << 16);
}

// A thread copies eight elements of a row, which are written at once. Grid: blocks of rows, matrices, copies.
template <class T>
__global__ __launch_bounds__(copy_threads) void copy_rows(const __grid_constant__ MatrixCopies copies) {
    static_assert(sizeof(T) == 2);
    const MatrixCopy& copy = copies.of[blockIdx.z];
    const int thread = static_cast<int>(threadIdx.x), at_once = copy_threads / copy.lanes;
    for (std::int64_t matrix = blockIdx.y; matrix < copy.matrices; matrix += gridDim.y) {
        const auto* const from = static_cast<const std::uint16_t*>(copy.from) + matrix * copy.from_batch;
        auto* const to = static_cast<std::uint16_t*>(copy.to) + matrix * copy.to_batch;
        for (std::uint32_t piece = blockIdx.x; piece < copy.pieces; piece += gridDim.x) {
            const std::uint32_t above = piece / copy.segments, segment = piece - above * copy.segments;
            const std::int64_t row = static_cast<std::int64_t>(above) * at_once + thread / copy.lanes;
            const int column = (static_cast<int>(segment) * copy.lanes + thread % copy.lanes) * copy_width;
            if (row < copy.rows && column < copy.columns)
                *reinterpret_cast<uint4*>(to + row * copy.to_row + column) =
                    load_eight(from + row * copy.from_row + column, copy.columns - column);
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

    // The operand is one of `rows` x `columns`, one for each product of the batch.
    void add(catalog_tensor& tensor, std::int64_t batch, std::int64_t rows, std::int64_t columns) {
        if (status != CATALOG_OK || readable(tensor, batch, rows)) return;
        const std::int64_t matrices = tensor.stride_batch == 0 ? 1 : batch, row = pitch(columns);
        std::int64_t elements;
        if (__builtin_mul_overflow(rows * row, matrices, &elements) || elements > (std::int64_t{1} << 60) - bytes) {
            status = CATALOG_BAD_ARGUMENT;
            return;
        }
        int lanes = 1;
        while (lanes < copy_threads && lanes * copy_width < columns) lanes *= 2;
        const std::int64_t segments = parts(columns, lanes * copy_width);
        const std::int64_t pieces = parts(rows, copy_threads / lanes) * segments;
        if (pieces > most_pieces) {
            status = CATALOG_BAD_ARGUMENT;
            return;
        }
        copies.of[count] = {tensor.data, nullptr, tensor.stride_batch, tensor.stride_outer, rows * row, row, rows,
                            static_cast<int>(columns), static_cast<int>(matrices), lanes, static_cast<int>(segments),
                            static_cast<std::uint32_t>(pieces)};
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
        copy_rows<T><<<grid, copy_threads, 0, stream>>>(copies);
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
        const std::int64_t unit = columns > 32 ? line / static_cast<std::int64_t>(sizeof(T)) : 8;
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
