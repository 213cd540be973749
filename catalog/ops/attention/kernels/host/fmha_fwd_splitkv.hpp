// Forward attention with the keys of every sequence divided into num_splits parts; each part yields an O and an LSE.
#pragma once

#include "attend.hpp"

namespace catalog::host {

template <class Row>
inline std::int32_t launch_fmha_fwd_splitkv(const catalog_args* args) noexcept {
    return launch_attention<Row, true>(args);
}

}  // namespace catalog::host
