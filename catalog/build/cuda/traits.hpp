// The values of a row's traits, spelled as in the catalog; `no` is `none`.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace catalog::cuda {

using fp16 = __half;
using bf16 = __nv_bfloat16;

enum class Mode { batch, group };
enum class Mask { none, causal, generic };
enum class Bias { none, alibi };

}  // namespace catalog::cuda
