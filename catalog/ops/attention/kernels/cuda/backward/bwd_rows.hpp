// The stages of backward that treat every query row of every head by itself: a row is read by neighbouring lanes, 8
// elements at a time, as many lanes as the head dim needs, and each lane may have several rows in flight.
#pragma once

#include "bwd_call.hpp"
#include "cuda/common/eight.hpp"
#include "cuda/kernel_launch.hpp"

namespace catalog::cuda {

inline constexpr int row_threads = 256;

// Turns of 8 elements in which the lanes of a warp read a row of a head dim.
inline constexpr int pieces_of(int hdim) { return (hdim + 255) / 256; }

// The rows of a thread, `in_flight` at a time. Heads follow each other fastest: in most layouts they are neighbours in
// memory.
template <class Row, int lanes, int in_flight>
struct ThreadRows {
    static constexpr int rows = row_threads / lanes;  // that a block treats at a time

    Sequence sequence;
    int head, lane, first;

    __device__ __forceinline__ ThreadRows(const catalog_args& args)
        : head(blockIdx.x % static_cast<unsigned>(args.nhead_q)), lane(threadIdx.x % lanes) {
        find_queries<Row>(args, blockIdx.y, sequence);
        const int block = blockIdx.x / static_cast<unsigned>(args.nhead_q);
        first = block * rows * in_flight + threadIdx.x / lanes;
    }

    __device__ __forceinline__ int query(int i) const { return first + i * rows; }
    __device__ __forceinline__ bool has(int i) const { return query(i) < sequence.seqlen_q; }

    // The first of this lane's elements of a row in a turn.
    __device__ __forceinline__ int element(int piece) const { return (piece * lanes + lane) * 8; }

    // Those of row i in the first turn.
    template <class T>
    __device__ __forceinline__ T* of(const catalog_tensor& tensor, int i) const {
        return static_cast<T*>(tensor.data) +
               offset_of(tensor, sequence.batch, head, sequence.first_q + query(i)) + element(0);
    }
};

template <class Row>
inline catalog_status check_rows(const catalog_args* args) {
    if (const catalog_status status = check_abi(args); status != CATALOG_OK) return status;
    const bool starts = Row::mode == Mode::batch || args->batch == 0 || args->seqstart_q;
    return valid_backward_sizes(*args) && starts ? CATALOG_OK : CATALOG_BAD_ARGUMENT;
}

template <int lanes, int in_flight, class Kernel>
inline catalog_status launch_rows(const catalog_args& args, cudaStream_t stream, Kernel kernel, Start start) {
    constexpr std::int64_t rows = row_threads / lanes * in_flight;
    const std::int64_t blocks = (args.seqlen_q + rows - 1) / rows * args.nhead_q;
    if (blocks > 0x7fffffff) return CATALOG_BAD_ARGUMENT;
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(args.batch));
    return KernelLaunch(grid, row_threads, 0, stream, start).run(kernel, args);
}

}  // namespace catalog::cuda
