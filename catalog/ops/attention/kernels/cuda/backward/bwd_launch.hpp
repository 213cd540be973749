// The main stage of backward: what its launches have in common. Host code, and a kernel that clears dQ.
#pragma once

#include "bwd_clear_ahead.hpp"
#include "cuda/common/launch.hpp"
#include "cuda/kernel_launch.hpp"

namespace catalog::cuda {

inline constexpr int clear_threads = 512;

// Numbers of 32 bits, of which there is a multiple of 4, at a multiple of 16 bytes.
struct Numbers {
    void* first;
    std::int64_t bytes;
};

// Sets numbers to 0.
template <class Row>
__global__ void __launch_bounds__(clear_threads) clear_dq(const Numbers sums, const Numbers counters) {
    follow_last_kernel();
    const std::int64_t step = std::int64_t{gridDim.x} * clear_threads;
    const std::int64_t first = std::int64_t{blockIdx.x} * clear_threads + threadIdx.x;
    for (std::int64_t i = first; i < sums.bytes / 16; i += step) static_cast<uint4*>(sums.first)[i] = uint4{};
    for (std::int64_t i = first; i < counters.bytes / 16; i += step) static_cast<uint4*>(counters.first)[i] = uint4{};
}

// A kernel and not a memset, so that it and the kernels beside it start early.
template <class Row>
inline catalog_status launch_clear_dq(const Numbers& sums, const Numbers& counters, cudaStream_t stream) {
    constexpr std::int64_t most_blocks = 1024;
    const std::int64_t vectors = std::max(sums.bytes, counters.bytes) / 16;
    const std::int64_t blocks = std::clamp<std::int64_t>(divide_up(vectors, clear_threads), 1, most_blocks);
    return KernelLaunch(static_cast<unsigned>(blocks), clear_threads, 0, stream, Start::early)
        .run(clear_dq<Row>, sums, counters);
}

// What lies behind the sums of dQ: places in bytes from their end.
template <class Row>
struct BehindSums {
    using Tile = BackwardTile<Row>;
    std::int64_t item = 0;  // the counter of items, behind those that order additions
    std::int64_t sections;  // a counter of each
    std::int64_t bytes;     // of everything

    BehindSums(const catalog_args& args, const Sections& of) {
        if (Row::deterministic)
            item = args.nhead_q * counters_of_head(args.tokens_q, args.batch, Row::tile_m0) * Tile::slices * 4;
        sections = item + (Tile::persistent ? 4 : 0);
        bytes = divide_up(sections + (Tile::clears_ahead ? std::int64_t{of.count} * 4 : 0), 16) * 16;
    }
};

template <class Row>
inline std::int32_t backward_workspace(const catalog_args* args, Uses uses, catalog_workspace* size) {
    if (const catalog_status status = check_abi(args); status != CATALOG_OK) return status;
    if (!size) return CATALOG_BAD_ARGUMENT;
    if (const catalog_status status = dense_workspace(*args, uses, 1, *size); status != CATALOG_OK) return status;
    if (args->batch > 0 && args->nhead_k > 0) size->dq_acc += BehindSums<Row>(*args, sections_of<Row>(*args)).bytes;
    return CATALOG_OK;
}

// Bytes from the first element of dQ to the last, -1 where they are not dense: then they cannot be cleared.
template <class Row>
inline std::int64_t dense_dq_bytes(const catalog_args& args) {
    const catalog_tensor& dq = args.dq_acc;
    const bool group = Row::mode == Mode::group;
    const std::int64_t tokens = group ? args.tokens_q : args.seqlen_q, batch = group ? 1 : args.batch;
    if (batch * tokens != args.tokens_q) return -1;
    const std::int64_t all = batch * args.nhead_q * tokens * args.hdim_q;
    const std::int64_t last = (batch - 1) * dq.stride_batch + (args.nhead_q - 1) * dq.stride_nhead +
                              (tokens - 1) * dq.stride_seqlen + args.hdim_q;
    return last == all || all == 0 ? all * static_cast<std::int64_t>(sizeof(float)) : -1;
}

template <class Row>
inline bool has_backward_tensors(const catalog_args& args) {
    using T = typename Row::dtype;
    const auto rows = [&](const catalog_tensor& tensor, std::int64_t nhead) {
        return tensor.data && has_aligned_rows<T>(args, tensor, nhead);
    };
    if (args.seqlen_k > 0 && !(rows(args.dk, args.nhead_k) && rows(args.dv, args.nhead_k))) return false;
    if (args.seqlen_q == 0) return true;
    if (!args.dq_acc.data || !has_aligned_rows<float>(args, args.dq_acc, args.nhead_q)) return false;
    if (args.seqlen_k == 0) return true;
    return rows(args.q, args.nhead_q) && rows(args.k, args.nhead_k) && rows(args.v, args.nhead_k) &&
           rows(args.grad_o, args.nhead_q) && args.lse.data && args.delta.data &&
           (Row::bias != Bias::alibi || args.alibi_slopes.data) && (Row::bias != Bias::bias || args.bias.data) &&
           (!Row::dbias || args.dbias.data) && (!Row::logits || args.logits_soft_cap > 0) &&
           (!Row::block_mask || args.block_mask.data);
}

// Checks a call and clears dQ. CATALOG_OK with no items: there is nothing else to do.
template <class Row>
inline catalog_status begin_backward(const catalog_args* args, cudaStream_t stream, Sections& sections) {
    using Tile = BackwardTile<Row>;
    sections = Sections{};
    if (const catalog_status status = check_abi(args); status != CATALOG_OK) return status;
    const bool starts = Row::mode == Mode::batch || args->batch == 0 || (args->seqstart_q && args->seqstart_k);
    if (!valid_backward_sizes(*args) || !valid_hdims<Row>(*args) || !starts || !valid_mask<Row::mask>(*args) ||
        !valid_block_mask<Row, std::min(Tile::n, 64)>(*args))
        return CATALOG_BAD_ARGUMENT;
    if (args->batch == 0 || args->nhead_q == 0) return CATALOG_OK;
    if (!has_backward_tensors<Row>(*args) || args->num_splits != 1) return CATALOG_BAD_ARGUMENT;
    const std::int64_t dq_bytes = args->seqlen_q > 0 ? dense_dq_bytes<Row>(*args) : 0;
    if (dq_bytes < 0) return CATALOG_BAD_ARGUMENT;
    if (args->batch * args->nhead_k > most_items) return CATALOG_BAD_ARGUMENT;
    Sections found = sections_of<Row>(*args);
    const BehindSums<Row> behind(*args, found);
    char* const end = static_cast<char*>(args->dq_acc.data) + dq_bytes;
    std::int64_t cleared = dq_bytes;
    if (Tile::persistent && args->seqlen_q > 0) found.next = reinterpret_cast<std::int32_t*>(end + behind.item);
    if (clears_ahead<Row>(*args, found)) {
        found.cleared = reinterpret_cast<std::int32_t*>(end + behind.sections);
        found.share = static_cast<int>(divide_up(args->seqlen_q, found.tiles));
        cleared = bytes_of_sections(*args, found, found.ahead);
    }
    if (args->seqlen_q > 0) {
        const catalog_status status =
            launch_clear_dq<Row>({args->dq_acc.data, cleared}, {end, behind.bytes}, stream);
        if (status != CATALOG_OK) return status;
    }
    if (args->seqlen_k == 0) return CATALOG_OK;
    if (found.items < 0) return CATALOG_BAD_ARGUMENT;
    sections = found;
    return CATALOG_OK;
}

// begin_backward() was called. More parameters of a kernel stand between the arguments and the sections.
template <class Row, class Kernel, class... Parameters>
inline catalog_status launch_blocks(const catalog_args& args, cudaStream_t stream, const Sections& sections,
                                    Kernel kernel, const Parameters&... more) {
    using Tile = BackwardTile<Row>;
    Sections started = sections;
    started.blocks = sections.items * Tile::slices;
    if (sections.next) {
        int device, processors;
        if (cudaGetDevice(&device) != cudaSuccess ||
            cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
            return launched();
        started.blocks = std::min(started.blocks, processors);
    }
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::shared_bytes) != cudaSuccess)
        return launched();
    return KernelLaunch(static_cast<unsigned>(started.blocks), Tile::threads, Tile::shared_bytes, stream, Start::early)
        .in_clusters(Tile::slices)
        .run(kernel, args, more..., started);
}

}  // namespace catalog::cuda
