// The stages of backward that treat every query row of every head by itself: a row is read by neighbouring lanes, 8
// elements each, and each lane has several rows in flight.
#pragma once

#include "bwd_call.hpp"

namespace catalog::cuda {

inline constexpr int row_threads = 256;
inline constexpr int rows_in_flight = 4;

// 8 elements of 16 bits.
template <class T>
union Eight {
    uint4 bits;
    T element[8];
};

template <class T>
__device__ __forceinline__ uint4 load_eight(const T* elements) {
    return __ldg(reinterpret_cast<const uint4*>(elements));
}

constexpr int power_of_two_from(int least) {
    int power = 1;
    while (power < least) power *= 2;
    return power;
}

template <int hdim>
struct RowLanes {
    static constexpr int lanes = power_of_two_from((hdim + 7) / 8);
    static constexpr int rows = row_threads / lanes;  // that a block treats at a time
    static_assert(lanes <= 32, "a row belongs to one warp");
};

// The rows of a thread. Heads follow each other fastest: in most layouts they are neighbours in memory.
template <class Row, int hdim>
struct ThreadRows {
    using Lanes = RowLanes<hdim>;

    Sequence sequence;
    int head, lane, first;

    __device__ __forceinline__ ThreadRows(const catalog_args& args)
        : head(blockIdx.x % static_cast<unsigned>(args.nhead_q)), lane(threadIdx.x % Lanes::lanes) {
        find_queries<Row>(args, blockIdx.y, sequence);
        const int block = blockIdx.x / static_cast<unsigned>(args.nhead_q);
        first = block * Lanes::rows * rows_in_flight + threadIdx.x / Lanes::lanes;
    }

    __device__ __forceinline__ int query(int i) const { return first + i * Lanes::rows; }
    __device__ __forceinline__ bool has(int i) const { return query(i) < sequence.seqlen_q; }

    // The elements of row i that are this lane's.
    template <class T>
    __device__ __forceinline__ T* of(const catalog_tensor& tensor, int i, std::int64_t split = 0) const {
        return static_cast<T*>(tensor.data) + split * tensor.stride_split +
               offset_of(tensor, sequence.batch, head, sequence.first_q + query(i)) + lane * 8;
    }
};

template <class Row>
inline catalog_status check_rows(const catalog_args* args) {
    if (const catalog_status status = check_abi(args); status != CATALOG_OK) return status;
    const bool valid = valid_sizes(*args) && (Row::mode == Mode::batch || args->batch == 0 || args->seqstart_q);
    return valid ? CATALOG_OK : CATALOG_BAD_ARGUMENT;
}

template <int hdim, class Kernel>
inline catalog_status launch_rows(const catalog_args& args, cudaStream_t stream, Kernel kernel) {
    constexpr std::int64_t rows = RowLanes<hdim>::rows * rows_in_flight;
    const std::int64_t blocks = (args.seqlen_q + rows - 1) / rows * args.nhead_q;
    if (blocks > 0x7fffffff) return CATALOG_BAD_ARGUMENT;
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(args.batch));
    kernel<<<grid, row_threads, 0, stream>>>(args);
    return launched();
}

inline bool has_rows(const catalog_args& args) { return args.batch > 0 && args.nhead_q > 0 && args.seqlen_q > 0; }

}  // namespace catalog::cuda
