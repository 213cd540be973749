// Forward attention on the host CPU, specialised for one row of the catalog: families fwd, fwd_pagedkv, batch_prefill.
//
// A translation unit defines a struct Row whose constexpr members are the row's traits, and exports it:
//
//     struct Row {
//         using dtype = float, otype = float;                  // or fp16, bf16, fp8, bf8 of catalog::host
//         static constexpr int hdim_q = 128, hdim_v = 128;
//         static constexpr int tile_m0 = 96, tile_n0 = 128;    // query rows and keys of one tile
//         static constexpr int warp_m0 = 12, warp_n0 = 32;     // register block of S = Q K^T
//         static constexpr int warp_m1 = 12, warp_n1 = 32;     // register block of O += P V
//         static constexpr auto mask = catalog::host::Mask::causal;
//         static constexpr bool lse = true, pad_d = false, pad_dv = false;
//         ...                                                  // every other trait of the signature
//     };
//     CATALOG_EXPORT(catalog::host::launch_fmha_fwd<Row>, "{\"family\": \"fwd\"}")
#pragma once

#include "attend.hpp"

namespace catalog::host {

template <class Row>
inline std::int32_t launch_fmha_fwd(const catalog_args* args) noexcept {
    if (const catalog_status status = check_abi(args); status != CATALOG_OK) return status;
    if (args->num_splits != 1) return CATALOG_BAD_ARGUMENT;
    return launch_attention<Row, false>(args);
}

}  // namespace catalog::host
