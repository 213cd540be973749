// Forward.
#pragma once

#include "forward.hpp"

namespace catalog::ck {

template <class Row>
struct Family {
    using Args = fmha_fwd_args;
    using Kernel = ck_tile::FmhaFwdKernel<ForwardPipeline<Row>, StoreOutput<Row>>;

    static void run(const ck_tile::stream_config& to, const Args& args) {
        Headers::enqueue<Kernel>(to, fmha_fwd_create_kargs_and_grids<Kernel>(args));
    }
};

}  // namespace catalog::ck
