// The argument struct and the element types of the backward.
#pragma once

#include "ck_tile/core.hpp"

struct FmhaBwdFp16;
struct FmhaMasks {
    struct NoMask;
};
template <class>
struct FmhaBwdTypeConfig {
    using ODataType = short;
    using OGradDataType = short;
    using DDataType = float;
};

struct fmha_bwd_args {
    const void *o_ptr, *do_ptr;
    void* d_ptr;
    ck_tile::index_t seqlen_q;
};

template <class Kernel>
auto fmha_bwd_dot_do_o_create_kargs_and_grids(fmha_bwd_args args) {
    return std::pair(args, dim3{});
}
