// Multi-head latent attention over dense keys, or pages of any size: families fwd and fwd_pagedkv.
#pragma once

#include "cuda/common/launch.hpp"
#include "launch_latent.hpp"

namespace catalog::cuda {

template <class Traits>
inline std::int32_t launch_fmha_fwd_latent(const catalog_args* args, cudaStream_t stream) noexcept {
    using Row = LatentRow<Traits>;
    if (const catalog_status status = check_whole<Row>(args); status != CATALOG_OK) return status;
    if (Row::lse && has_queries(*args) && !args->lse.data) return CATALOG_BAD_ARGUMENT;
    return launch_attend_latent<Row, false>(*args, stream);
}

}  // namespace catalog::cuda
