// Multi-head latent attention with the keys of every sequence divided into num_splits parts; each part gives an O and an
// LSE, which fmha_fwd_splitkv_combine.hpp makes one. Keys may lie in pages.
#pragma once

#include "cuda/common/launch.hpp"
#include "launch_latent.hpp"

namespace catalog::cuda {

template <class Traits>
inline std::int32_t launch_fmha_fwd_splitkv_latent(const catalog_args* args, cudaStream_t stream) noexcept {
    using Row = LatentRow<Traits>;
    if (const catalog_status status = check_splits<Row>(args); status != CATALOG_OK) return status;
    return launch_attend_latent<Row, true>(*args, stream);
}

}  // namespace catalog::cuda
