// One launch of a CK Tile kernel: our arguments become CK's, its exceptions become a status.
#pragma once

#include <algorithm>
#include <exception>
#include <type_traits>
#include <vector>

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

// Splits of dQ: a deterministic kernel writes one for each of its key tiles, others add to a single one. Where a row does
// not say what its tiles are, and for O, there are as many as the caller likes.
inline std::int64_t splits_of(const catalog_args& args, const Traits& row) {
    const std::int64_t asked = std::max<std::int64_t>(1, args.num_splits);
    if (!row.uses.dq_acc) return asked;
    if (!row.deterministic) return 1;
    return row.tile_n0 > 0 ? std::max<std::int64_t>(1, divide_up(args.seqlen_k, row.tile_n0)) : asked;
}

// Kernels that are not deterministic add to dQ atomically, the others leave out what no query sees.
inline bool clear_dq(const catalog_args& from, hipStream_t stream) {
    const std::size_t bytes = from.num_splits * from.dq_acc.stride_split * sizeof(float);
    return bytes == 0 || succeeded(hipMemsetAsync(from.dq_acc.data, 0, bytes, stream));
}

// The row has no workspace of a layout of CK's own.
struct NoWorkspace {};

// First tokens of packed sequences, read back from the device; empty without packed sequences.
using Starts = std::vector<ck_tile::index_t>;

inline bool read_starts(const std::int32_t* from, std::int64_t batch, hipStream_t stream, Starts& starts) {
    if (!from) return true;
    starts.resize(batch + 1);
    return succeeded(hipMemcpyAsync(starts.data(), from, starts.size() * sizeof starts[0], hipMemcpyDeviceToHost,
                                    stream)) &&
           succeeded(hipStreamSynchronize(stream));
}

template <class Workspace>
inline std::size_t device_bytes(const catalog_args& args) {
    return Workspace::device_bytes(args.batch, args.hdim_q, args.nhead_q, args.tokens_q, args.seqlen_k);
}

// CK's own layout: what the host prepares, then partial dQ.
template <class Workspace>
inline bool prepare_workspace(const catalog_args& from, hipStream_t stream) {
    Starts q, k;
    if (!read_starts(from.seqstart_q, from.batch, stream, q) || !read_starts(from.seqstart_k, from.batch, stream, k))
        return false;
    std::vector<char> prepared(Workspace::host_bytes(from.batch));
    Workspace::prepare(prepared.data(), from.batch, from.hdim_q, from.nhead_q, from.seqlen_q, from.seqlen_k,
                       q.empty() ? nullptr : q.data(), k.empty() ? nullptr : k.data());
    const std::size_t rest = device_bytes<Workspace>(from);
    auto* const to = static_cast<char*>(from.dq_acc.data);
    if (!succeeded(hipMemcpyAsync(to, prepared.data(), prepared.size(), hipMemcpyHostToDevice, stream)) ||
        !succeeded(hipStreamSynchronize(stream)))  // what was prepared must live until it is there
        return false;
    return !Workspace::starts_from_zeros() || rest == 0 ||
           succeeded(hipMemsetAsync(to + prepared.size(), 0, rest, stream));
}

template <class Workspace>
inline std::int32_t workspace_size(const catalog_args* args, const Traits& row, catalog_workspace* size) {
    if (const catalog_status status = check_abi(args); status != CATALOG_OK) return status;
    if (!size) return CATALOG_BAD_ARGUMENT;
    const catalog_status status = dense_workspace(*args, row.uses, splits_of(*args, row), *size);
    if constexpr (!std::is_same_v<Workspace, NoWorkspace>)
        if (status == CATALOG_OK && row.uses.dq_acc)
            size->dq_acc = Workspace::host_bytes(args->batch) + device_bytes<Workspace>(*args);
    return status;
}

enum class Before { nothing, rotate_copy, clear_dq };

template <class Args, Before before, class Workspace, class Run>
inline std::int32_t launch(const catalog_args* from, void* queue, const Traits& row, std::size_t element_bytes,
                           Run run) noexcept {
    if (const catalog_status status = check_abi(from); status != CATALOG_OK) return status;
    constexpr bool own_workspace = has_own_workspace<Args>;
    if (from->batch < 0) return CATALOG_BAD_ARGUMENT;
    // CK has no gradient of LSE, and multiplies what it keeps of weights by 1 / (1 - p_drop).
    if (from->dlse.data || from->p_drop >= 1) return CATALOG_BAD_ARGUMENT;
    if (row.uses.dq_acc && own_workspace && !from->dq_acc.data) return CATALOG_BAD_ARGUMENT;
    if (row.uses.dq_acc && !own_workspace && from->num_splits < splits_of(*from, row)) return CATALOG_BAD_ARGUMENT;
    const auto stream = static_cast<hipStream_t>(queue);
    Args args{};
    if (!fill_arguments(*from, row, args)) return CATALOG_BAD_ARGUMENT;
    if constexpr (!reads_descale<Args>)
        if (row.descaled && !fold_descales(*from, stream, args)) return CATALOG_DEVICE_ERROR;
    if constexpr (before == Before::rotate_copy)
        if (!rotate_copy(*from, element_bytes, stream, args)) return CATALOG_DEVICE_ERROR;
    if constexpr (before == Before::clear_dq && !own_workspace)
        if (row.uses.dq_acc && !clear_dq(*from, stream)) return CATALOG_DEVICE_ERROR;
    try {
        if constexpr (!std::is_same_v<Workspace, NoWorkspace>)
            if (row.uses.dq_acc && !prepare_workspace<Workspace>(*from, stream)) return CATALOG_DEVICE_ERROR;
        run(ck_tile::stream_config{stream}, args);
    } catch (const std::exception&) {
        return CATALOG_DEVICE_ERROR;
    }
    return succeeded(hipGetLastError()) ? CATALOG_OK : CATALOG_DEVICE_ERROR;
}

}  // namespace catalog::ck
