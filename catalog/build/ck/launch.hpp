// One launch of a CK Tile kernel: our arguments become CK's, its exceptions become a status.
#pragma once

#include <exception>

#include <hip/hip_runtime.h>

#include "arguments.hpp"

namespace catalog::ck {

inline bool succeeded(hipError_t error) { return error == hipSuccess; }

// Factors for a whole tensor, for revisions that take them from the host: read once the stream has come so far.
template <class Args>
inline bool fold_descales(const catalog_args& from, hipStream_t stream, Args& args) {
    float factor[3] = {1, 1, 1};
    const catalog_tensor* tensors[3] = {&from.q_descale, &from.k_descale, &from.v_descale};
    for (int i = 0; i < 3; ++i)
        if (tensors[i]->data &&
            !succeeded(hipMemcpyAsync(&factor[i], tensors[i]->data, sizeof(float), hipMemcpyDeviceToHost, stream)))
            return false;
    if (!succeeded(hipStreamSynchronize(stream))) return false;
    constexpr float scale_p = 128;  // spreads weights over the range of 8 bits; exact, and below the largest number
    Filler<Args> fill(args);
    CATALOG_CK_FIELD(scale_s, from.scale * factor[0] * factor[1]);
    CATALOG_CK_FIELD(scale_p, scale_p);
    CATALOG_CK_FIELD(scale_o, factor[2] / scale_p);
    return true;
}

// CK rotates Q in place; ours stays as it is, so the copy is rotated.
template <class Args>
inline bool rotate_copy(const catalog_args& from, std::size_t element_bytes, hipStream_t stream, Args& args) {
    if (!from.q_out.data) return true;
    const auto at = [&](const catalog_tensor& tensor, std::int64_t b, std::int64_t h) {
        return static_cast<char*>(tensor.data) + (b * tensor.stride_batch + h * tensor.stride_nhead) * element_bytes;
    };
    for (std::int64_t b = 0; b < from.batch; ++b)
        for (std::int64_t h = 0; h < from.nhead_q; ++h)
            if (!succeeded(hipMemcpy2DAsync(at(from.q_out, b, h), from.q_out.stride_seqlen * element_bytes,
                                            at(from.q, b, h), from.q.stride_seqlen * element_bytes,
                                            from.hdim_q * element_bytes, from.seqlen_q, hipMemcpyDeviceToDevice,
                                            stream)))
                return false;
    Filler<Args> fill(args);
    CATALOG_CK_TENSOR(q, from.q_out);
    return true;
}

// Splits of dQ that a deterministic kernel writes: one for each of its key tiles.
inline bool has_room(const catalog_args& from, const Traits& row) {
    return !row.deterministic || from.num_splits >= (from.seqlen_k + row.tile_n0 - 1) / row.tile_n0;
}

// Kernels that are not deterministic add to dQ atomically, the others leave out what no query sees.
inline bool clear_dq(const catalog_args& from, hipStream_t stream) {
    const std::size_t bytes = from.num_splits * from.dq_acc.stride_split * sizeof(float);
    return succeeded(hipMemsetAsync(from.dq_acc.data, 0, bytes, stream));
}

enum class Before { nothing, rotate_copy, clear_dq };

template <class Args, Before before, class Run>
inline std::int32_t launch(const catalog_args* from, void* queue, const Traits& row, std::size_t element_bytes,
                           Run run) noexcept {
    if (const catalog_status status = check_abi(from); status != CATALOG_OK) return status;
    if (from->batch < 0 || !has_room(*from, row)) return CATALOG_BAD_ARGUMENT;
    const auto stream = static_cast<hipStream_t>(queue);
    Args args{};
    if (!fill_arguments(*from, row, args)) return CATALOG_BAD_ARGUMENT;
    if constexpr (!reads_descale<Args>)
        if (row.descaled && !fold_descales(*from, stream, args)) return CATALOG_DEVICE_ERROR;
    if constexpr (before == Before::rotate_copy)
        if (!rotate_copy(*from, element_bytes, stream, args)) return CATALOG_DEVICE_ERROR;
    if constexpr (before == Before::clear_dq)
        if (!clear_dq(*from, stream)) return CATALOG_DEVICE_ERROR;
    try {
        run(ck_tile::stream_config{stream}, args);
    } catch (const std::exception&) {
        return CATALOG_DEVICE_ERROR;
    }
    return succeeded(hipGetLastError()) ? CATALOG_OK : CATALOG_DEVICE_ERROR;
}

}  // namespace catalog::ck
