// What the stages of the backward share: element types.
#pragma once

#include "ck_tile/ops/epilogue.hpp"
#include "fmha_bwd.hpp"

#include "pads.hpp"

namespace catalog::ck {

template <class Row>
using BackwardTypes = FmhaBwdTypeConfig<typename Row::Element>;

}  // namespace catalog::ck
