// Multi-head latent attention where there are blocks enough without dividing the keys. They may lie in pages.
#pragma once

#include "cuda/common/launch.hpp"
#include "launch_latent.hpp"

namespace catalog::cuda {

template <class Traits>
inline std::int32_t workspace_size_fmha_fwd_splitkv_latent_whole(const catalog_args* args, Uses,
                                                                 catalog_workspace* size) {
    return catalog::no_workspace(args, size);
}

template <class Traits>
inline std::int32_t launch_fmha_fwd_splitkv_latent_whole(const catalog_args* args, cudaStream_t stream) noexcept {
    using Row = LatentRow<Traits>;
    if (const catalog_status status = check_whole<Row>(args); status != CATALOG_OK) return status;
    return launch_attend_latent<Row, false>(*args, stream);
}

}  // namespace catalog::cuda
