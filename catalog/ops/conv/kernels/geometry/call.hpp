// The check of a call, alike on every target.
#pragma once

#include "window.hpp"

namespace catalog::conv {

inline bool is_positive(const std::int32_t* extents) {
    return std::all_of(extents, extents + axes, [](std::int32_t extent) { return extent > 0; });
}

// Whether the sizes are possible and agree with each other, and the tensors that will be read or written are present.
template <Direction direction>
inline catalog_status check_call(const catalog_args* args) {
    if (const catalog_status status = check_abi(args); status != CATALOG_OK) return status;
    if (args->n < 0 || args->c < 1 || args->k < 1 || args->g < 1) return CATALOG_BAD_ARGUMENT;
    if (args->c % args->g || args->k % args->g || !args->geometry) return CATALOG_BAD_ARGUMENT;
    const Geometry of(*args);
    for (const std::int32_t* const extents : {of.size, of.out, of.filter, of.stride, of.dilation})
        if (!is_positive(extents)) return CATALOG_BAD_ARGUMENT;
    for (int i = 0; i < axes; ++i) {
        const std::int64_t reach = std::int64_t{of.dilation[i]} * (of.filter[i] - 1) + 1;
        const std::int64_t free = of.size[i] + 2 * std::int64_t{of.pad[i]} - reach;
        if (of.pad[i] < 0 || free < 0 || free / of.stride[i] + 1 != of.out[i]) return CATALOG_BAD_ARGUMENT;
    }
    const bool has_images = args->n > 0, weighs = has_images || direction == Direction::bwd_weight;
    if (has_images && !(args->input.data && args->output.data)) return CATALOG_BAD_ARGUMENT;
    return weighs && !args->weight.data ? CATALOG_BAD_ARGUMENT : CATALOG_OK;
}

}  // namespace catalog::conv
