// Forward attention with mma.sync, specialised for one row of the catalog: families fwd, fwd_pagedkv and
// batch_prefill.
//
// A translation unit defines a struct Row whose constexpr members are the row's traits, and exports it:
//
//     struct Row {
//         using dtype = catalog::cuda::bf16, otype = catalog::cuda::bf16;
//         static constexpr int hdim_q = 128, hdim_v = 128;    // multiples of 64
//         static constexpr int tile_m0 = 128, tile_n0 = 64;   // rows and keys of one tile
//         static constexpr int wave_m0 = 4, wave_n0 = 1;      // warps that divide the rows, and the keys, of a tile
//         static constexpr int num_stages = 1;                // tiles of K and V in shared memory
//         static constexpr int block_per_cu = 2;              // blocks of a multiprocessor
//         static constexpr auto mode = catalog::cuda::Mode::batch;
//         static constexpr auto mask = catalog::cuda::Mask::causal;
//         static constexpr auto bias = catalog::cuda::Bias::none;
//         static constexpr auto kv_memory_layout = catalog::cuda::KvMemoryLayout::none;  // with pages
//         static constexpr auto kv_lookup_table = catalog::cuda::KvLookupTable::none;    // none: as vllm
//         static constexpr bool lse = true, logits = false, paged_kv = false, pad_d = false, pad_dv = false;
//     };
//     CATALOG_EXPORT(catalog::cuda::launch_fmha_fwd_mma<Row>, "{\"family\": \"fwd\"}", false, false, false, false)
#pragma once

#include "attend_mma.hpp"
#include "cuda/common/launch.hpp"

namespace catalog::cuda {

template <class Row>
inline std::int32_t launch_fmha_fwd_mma(const catalog_args* args, cudaStream_t stream) noexcept {
    if (const catalog_status status = check_whole<Row>(args); status != CATALOG_OK) return status;
    if (Row::lse && has_queries(*args) && !args->lse.data) return CATALOG_BAD_ARGUMENT;
    return launch_attend_mma<Row, false>(*args, stream);
}

template <class Row>
inline constexpr Block block_of{MmaShape<Row>::threads, MmaShape<Row>::shared_bytes};

}  // namespace catalog::cuda
