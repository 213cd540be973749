// Copies of operands that TMA cannot read: an odd number of columns, a view that begins at any element, repeated rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "gemm_call.hpp"

namespace catalog::cuda {

struct CopyShape {
    std::int64_t from_batch, from_row, to_batch, to_row;  // strides in elements
    std::int64_t rows;
    int columns;
};

// A block copies a row at a time, element by element.
template <class T>
__global__ __launch_bounds__(256) void copy_rows(const T* from, T* to, const CopyShape shape, std::int64_t all_rows) {
    for (std::int64_t i = blockIdx.x; i < all_rows; i += gridDim.x) {
        const std::int64_t batch = i / shape.rows, row = i - batch * shape.rows;
        const T* const source = from + batch * shape.from_batch + row * shape.from_row;
        T* const target = to + batch * shape.to_batch + row * shape.to_row;
        for (int column = static_cast<int>(threadIdx.x); column < shape.columns; column += 256)
            target[column] = source[column];
    }
}

// An operand of `rows` x `columns` as TMA reads it: the tensor itself, or a copy, which lives until the stream has done
// what is queued before the destructor.
template <class T>
class ReadableCopy {
   public:
    catalog_tensor tensor;
    catalog_status status = CATALOG_OK;

    ReadableCopy(const catalog_tensor& given, std::int64_t batch, std::int64_t rows, std::int64_t columns,
                 cudaStream_t stream)
        : tensor(given), stream(stream) {
        if (readable(given, batch, rows)) return;
        const std::int64_t row = parts(columns, 8) * 8, matrices = given.stride_batch == 0 ? 1 : batch;
        std::int64_t bytes;
        if (__builtin_mul_overflow(rows * row * static_cast<std::int64_t>(sizeof(T)), matrices, &bytes)) {
            status = CATALOG_BAD_ARGUMENT;
            return;
        }
        if (cudaMallocAsync(&own, bytes, stream) != cudaSuccess) {
            own = nullptr;
            status = (launched(), CATALOG_NO_MEMORY);
            return;
        }
        const CopyShape shape{given.stride_batch, given.stride_outer, rows * row, row, rows, static_cast<int>(columns)};
        const std::int64_t all_rows = rows * matrices, most_blocks = 1 << 16;
        copy_rows<T><<<static_cast<unsigned>(std::min(all_rows, most_blocks)), 256, 0, stream>>>(
            static_cast<const T*>(given.data), static_cast<T*>(own), shape, all_rows);
        status = launched();
        tensor = {own, matrices > 1 ? shape.to_batch : 0, row};
    }

    ReadableCopy(const ReadableCopy&) = delete;
    ReadableCopy& operator=(const ReadableCopy&) = delete;

    ~ReadableCopy() {
        if (own) cudaFreeAsync(own, stream);
    }

   private:
    void* own = nullptr;
    cudaStream_t stream;
};

}  // namespace catalog::cuda
