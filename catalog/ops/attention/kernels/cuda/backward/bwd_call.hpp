// What the stages of backward share: the checks of a call, on the host, and where a sequence lies, on the device.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include <cuda_runtime.h>

#include "cuda/common/call.hpp"

namespace catalog::cuda {

// Coordinates and distances of tokens are 32 bits wide.
inline constexpr std::int64_t longest_sequence = 1 << 28;
inline constexpr std::int64_t largest_grid = 65535;  // along y and z

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

inline bool valid_backward_sizes(const catalog_args& args) {
    return valid_sizes(args) && args.batch <= largest_grid && args.nhead_q <= largest_grid &&
           args.seqlen_q <= longest_sequence && args.seqlen_k <= longest_sequence;
}

// Whether every row of a tensor with this number of heads starts at a multiple of 16 bytes. The stride of an axis of one
// element means nothing.
template <class Element>
inline bool has_aligned_rows(const catalog_args& args, const catalog_tensor& tensor, std::int64_t nhead) {
    constexpr std::int64_t step = 16 / sizeof(Element);
    const auto aligned = [](std::int64_t extent, std::int64_t stride) { return extent <= 1 || stride % step == 0; };
    return reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0 && tensor.stride_seqlen % step == 0 &&
           aligned(args.batch, tensor.stride_batch) && aligned(nhead, tensor.stride_nhead);
}

// One sequence: `batch` is its place along the batch axis, 0 in group mode.
struct Sequence {
    std::int64_t batch, first_q, first_k;
    int seqlen_q, seqlen_k;
};

// Whatever device memory says, no sequence is longer than what is stored.
__device__ __forceinline__ int real_length(const catalog_tensor& lengths, int index, std::int64_t stored) {
    const std::int64_t length = lengths.data ? static_cast<const std::int32_t*>(lengths.data)[index] : stored;
    return static_cast<int>(max(std::int64_t{0}, min(length, stored)));
}

template <class Row>
__device__ __forceinline__ void find_queries(const catalog_args& args, int index, Sequence& sequence) {
    std::int64_t stored = args.seqlen_q;
    sequence.batch = index;
    sequence.first_q = 0;
    if constexpr (Row::mode == Mode::group) {
        sequence.batch = 0;
        sequence.first_q = max(0, args.seqstart_q[index]);
        const std::int64_t end = min(static_cast<std::int64_t>(args.seqstart_q[index + 1]), args.tokens_q);
        stored = min(end - sequence.first_q, longest_sequence);
    }
    sequence.seqlen_q = real_length(args.seqlens_q, index, stored);
}

template <class Row>
__device__ __forceinline__ void find_keys(const catalog_args& args, int index, Sequence& sequence) {
    std::int64_t stored = args.seqlen_k;
    sequence.first_k = 0;
    if constexpr (Row::mode == Mode::group) {
        sequence.first_k = args.seqstart_k[index];
        stored = min(args.seqstart_k[index + 1] - sequence.first_k, longest_sequence);
    }
    sequence.seqlen_k = real_length(args.seqlens_k, index, stored);
}

// In elements, from the start of the tensor.
__device__ __forceinline__ std::int64_t offset_of(const catalog_tensor& tensor, std::int64_t batch, int head,
                                                  std::int64_t token) {
    return batch * tensor.stride_batch + head * tensor.stride_nhead + token * tensor.stride_seqlen;
}

}  // namespace catalog::cuda
