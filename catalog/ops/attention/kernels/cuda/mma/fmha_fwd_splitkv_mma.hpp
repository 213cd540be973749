// Forward attention with mma.sync and the keys of every sequence divided into num_splits parts; each part gives an O
// and an LSE, which fmha_fwd_splitkv_combine.hpp makes one. Keys may lie in pages.
//
// For decoding, tile_m0 = 16 and wave_m0 = 1: the heads that share a K/V head fill the tile, and wave_n0 warps divide
// its keys.
#pragma once

#include "attend_mma.hpp"
#include "cuda/common/launch.hpp"

namespace catalog::cuda {

template <class Row>
inline std::int32_t launch_fmha_fwd_splitkv_mma(const catalog_args* args, cudaStream_t stream) noexcept {
    if (const catalog_status status = check_splits<Row>(args); status != CATALOG_OK) return status;
    return launch_attend_mma<Row, true>(*args, stream);
}

template <class Row>
inline constexpr Block block_of{MmaShape<Row>::threads, MmaShape<Row>::shared_bytes};

}  // namespace catalog::cuda
