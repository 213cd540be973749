// The values of a row's traits, spelled as in the catalog; `no` is `none`.
#pragma once

#include "cuda/dtype.hpp"
#include "operation/elements.hpp"

namespace catalog::cuda {

enum class Mode { batch, group };
enum class Mask { none, causal, generic };
enum class Bias { none, bias, alibi };
enum class Qscale { none, pertensor, blockscale, kv_blockscale };
enum class Rope { none, inter, half };
enum class KvMemoryLayout { none, linear, vectorized };
enum class KvLookupTable { none, vllm, sglang };

}  // namespace catalog::cuda
