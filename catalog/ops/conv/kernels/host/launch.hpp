// The launch of a row: the windows of its direction.
#pragma once

#include "direct.hpp"
#include "direct_weight.hpp"
#include "geometry/call.hpp"
#include "host/choice.hpp"
#include "line_product.hpp"
#include "padded.hpp"
#include "panel.hpp"
#include "scatter.hpp"
#include "shift_weight.hpp"
#include "winograd.hpp"
#include "winograd_weight.hpp"

namespace catalog::host {

template <class Row>
inline std::int32_t launch(const catalog_args* args) noexcept {
    if (const catalog_status status = conv::check_call<Row::direction>(args); status != CATALOG_OK) return status;
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
                // With 32 registers, NarrowGroups has enough of them.
                constexpr bool pads = Row::direction != Direction::bwd_weight && reading == Reading::own;
                if constexpr (pads && vector_registers < 32) {
                    const catalog_status status = PaddedDepthwise<Row>(*args, of, window, threads).run();
                    if (status != CATALOG_UNSUPPORTED) return status;
                }
                using Kernel = std::conditional_t<Row::direction == Direction::bwd_weight, NarrowGradients<Row, reading>,
                                                  NarrowGroups<Row, reading>>;
                return Kernel(*args, of, window, threads).run();
            });
        });
    else if constexpr (Row::transformed)
        return compute([&](const Window& window) {
            using Kernel = std::conditional_t<Row::direction == Direction::bwd_weight, WinogradGradients<Row>,
                                              WinogradProduct<Row>>;
            return Kernel(*args, of, window, threads).run();
        });
    else
        return with_units<typename Row::dtype, Row::in_tiles>([&](auto unit) {
            using Unit = typename decltype(unit)::type;
            if constexpr (Row::scattered)
                return ScatteredProduct<Row, Unit>(*args, of, threads).run();
            else
                return compute([&](const Window& window) {
                    if constexpr (Row::shifted && !std::is_same_v<Unit, SplitHalf>) {
                        const catalog_status status = ShiftedGradients<Row, Unit>(*args, of, window, threads).run();
                        if (status != CATALOG_UNSUPPORTED) return status;
                    }
                    if constexpr (Row::in_lines && !std::is_same_v<Unit, SplitHalf>) {
                        const catalog_status status = LineProduct<Row, Unit>(*args, of, window, threads).run();
                        if (status != CATALOG_UNSUPPORTED) return status;
                    }
                    return WindowProduct<Row, Unit>(*args, of, window, threads).run();
                });
        });
}

}  // namespace catalog::host
