// Forward attention with mma.sync for few queries over many keys, where there are blocks enough without dividing the keys:
// each block attends to all keys of its rows, and writes O itself. Keys may lie in pages.
#pragma once

#include "attend_mma.hpp"
#include "cuda/common/launch.hpp"

namespace catalog::cuda {

template <class Row>
inline std::int32_t workspace_size_fmha_fwd_splitkv_whole(const catalog_args* args, Uses, catalog_workspace* size) {
    return catalog::no_workspace(args, size);
}

template <class Row>
inline std::int32_t launch_fmha_fwd_splitkv_whole(const catalog_args* args, cudaStream_t stream) noexcept {
    if (const catalog_status status = check_whole<Row>(args); status != CATALOG_OK) return status;
    return launch_attend_mma<Row, false>(*args, stream);
}

template <class Row>
inline constexpr Block block_of{MmaShape<Row>::threads, MmaShape<Row>::shared_bytes};

}  // namespace catalog::cuda
