// The launch of a row: the windows of its direction.
#pragma once

#include "depthwise_weight.hpp"
#include "direct.hpp"
#include "direct_weight.hpp"
#include "geometry/call.hpp"
#include "host/choice.hpp"
#include "in_place.hpp"
#include "line_product.hpp"
#include "padded.hpp"
#include "panel.hpp"
#include "pixel_weight.hpp"
#include "pixels.hpp"
#include "scatter.hpp"
#include "shift_weight.hpp"
#if defined(__AVX512F__)
#include "group_product.hpp"
#include "two_rows.hpp"
#endif
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
    if constexpr (Row::narrow == Narrow::pixels)
        return compute([&](const Window& window) {
            using Kernel = std::conditional_t<Row::direction == Direction::bwd_weight, PixelGradients<Row>,
                                              PixelConvolution<Row>>;
            return Kernel(*args, of, window, threads).run();
        });
    else if constexpr (Row::narrow != Narrow::no)
        return with_reading<Row>(*args, [&](auto reading) {
            return compute([&](const Window& window) {
                if constexpr (!is_depthwise<Row> && Row::direction == Direction::bwd_weight)
                    return NarrowGradients<Row, reading>(*args, of, window, threads).run();
                else if constexpr (Row::narrow == Narrow::direct)
                    return NarrowGroups<Row, reading>(*args, of, window, threads).run();
                else if constexpr (Row::narrow == Narrow::padded)
                    return PaddedGroups<Row, reading>(*args, of, window, threads).run();
                else if constexpr (Row::direction == Direction::bwd_weight)
                    return DepthwiseGradients<Row>(*args, of, window, threads).run();
                else if constexpr (Row::narrow == Narrow::depthwise)
                    return DepthwiseInPlace<Row>(*args, of, window, threads).run();
#if defined(__AVX512F__)
                else
                    return DepthwiseTwoRows<Row>(*args, of, window, threads).run();
#endif
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
#if defined(__AVX512F__)
                    if constexpr (Row::in_groups && !Row::shifted && !std::is_same_v<Unit, SplitHalf>) {
                        const catalog_status status = multiply_groups<Row, Unit>(*args, of, window, threads);
                        if (status != CATALOG_UNSUPPORTED) return status;
                    }
#endif
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
