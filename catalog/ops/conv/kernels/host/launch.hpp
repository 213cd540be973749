// The launch of a row: its checks, and the windows of its direction.
#pragma once

#include "direct.hpp"
#include "direct_weight.hpp"
#include "host/choice.hpp"
#include "panel.hpp"
#include "scatter.hpp"

namespace catalog::host {

inline bool is_positive(const std::int32_t* extents) {
    return std::all_of(extents, extents + axes, [](std::int32_t extent) { return extent > 0; });
}

// Whether the sizes are possible and agree with each other, and the tensors that will be read or written are present.
template <class Row>
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
    const bool has_images = args->n > 0, weighs = has_images || Row::direction == Direction::bwd_weight;
    if (has_images && !(args->input.data && args->output.data)) return CATALOG_BAD_ARGUMENT;
    return weighs && !args->weight.data ? CATALOG_BAD_ARGUMENT : CATALOG_OK;
}

template <class Row>
inline std::int32_t launch(const catalog_args* args) noexcept {
    if (const catalog_status status = check_call<Row>(args); status != CATALOG_OK) return status;
    const Geometry of(*args);
    const double products = static_cast<double>(args->n * Geometry::volume(of.out) * of.taps()) *
                            static_cast<double>(args->c / args->g * args->k);
    const int threads = products < small_work ? 1 : threads_for(*args);
    const auto compute = [&](auto of_window) {
        catalog_status status = CATALOG_OK;
        for_windows<Row::direction>(of, [&](const Window& window) {
            const catalog_status of_one = of_window(window);
            if (of_one != CATALOG_OK) status = of_one;
        });
        return status;
    };
    if constexpr (Row::direct)
        return with_reading(*args, [&](auto reading) {
            return compute([&](const Window& window) {
                using Kernel = std::conditional_t<Row::direction == Direction::bwd_weight, NarrowGradients<Row, reading>,
                                                  NarrowGroups<Row, reading>>;
                return Kernel(*args, of, window, threads).run();
            });
        });
    else
        return with_units<typename Row::dtype, Row::in_tiles>([&](auto unit) {
            using Unit = typename decltype(unit)::type;
            if constexpr (Row::scattered)
                return ScatteredProduct<Row, Unit>(*args, of, threads).run();
            else
                return compute([&](const Window& window) {
                    return WindowProduct<Row, Unit>(*args, of, window, threads).run();
                });
        });
}

}  // namespace catalog::host
