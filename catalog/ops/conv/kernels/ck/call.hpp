// A launch: its checks, and the geometry of the convolution.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <limits>
#include <vector>

#include <hip/hip_runtime.h>

#include "abi/check.hpp"

namespace catalog::ck {

inline bool succeeded(hipError_t error) { return error == hipSuccess; }

// The last `ndim` axes of what the argument struct says about depth, height and width.
class Geometry {
   public:
    enum Of { input, output, filter, stride, dilation, padding };
    static constexpr int count = 6, axes = 3;

    Geometry(const catalog_args& args, int ndim) : ndim_(ndim) {
        std::copy_n(args.geometry, numbers_.size(), numbers_.begin());
    }

    std::vector<std::int32_t> operator[](Of of) const {
        const auto end = numbers_.begin() + axes * (of + 1);
        return {end - ndim_, end};
    }

    std::int64_t product(Of of) const {
        std::int64_t total = 1;
        for (const std::int32_t extent : (*this)[of]) total *= extent;
        return total;
    }

   private:
    const int ndim_;
    std::array<std::int32_t, axes * count> numbers_;
};

// Whether images or filters lie side by side, and CK's offsets of 32 bits, in bytes, reach all of them.
template <class T>
inline bool is_dense(const catalog_tensor& tensor, std::int64_t count, std::int64_t each) {
    constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max() / std::int64_t{sizeof(T)};
    if (count == 0) return true;
    return tensor.data && each <= most && count <= most / each && (count == 1 || tensor.stride_first == each);
}

template <class Row>
inline bool fits(const catalog_args& args, const Geometry& geometry) {
    return is_dense<typename Row::In>(args.input, args.n, args.c * geometry.product(Geometry::input)) &&
           is_dense<typename Row::Weight>(args.weight, args.k, args.c / args.g * geometry.product(Geometry::filter)) &&
           is_dense<typename Row::Out>(args.output, args.n, args.k * geometry.product(Geometry::output));
}

inline catalog_status check_call(const catalog_args* args) {
    if (const catalog_status status = check_abi(args); status != CATALOG_OK) return status;
    const bool valid = args->n >= 0 && args->c > 0 && args->k > 0 && args->g > 0 && args->c % args->g == 0 &&
                       args->k % args->g == 0;
    return valid ? CATALOG_OK : CATALOG_BAD_ARGUMENT;
}

inline std::int32_t workspace_size(const catalog_args* args, catalog_workspace* size) noexcept {
    if (const catalog_status status = check_call(args); status != CATALOG_OK) return status;
    if (!size) return CATALOG_BAD_ARGUMENT;
    *size = {1};
    return CATALOG_OK;
}

template <class Row, class Family>
inline std::int32_t launch(const catalog_args* args, void* queue) noexcept {
    if (const catalog_status status = check_call(args); status != CATALOG_OK) return status;
    if (args->n == 0 && Row::direction != Direction::bwd_weight) return CATALOG_OK;
    if (!args->geometry) return CATALOG_BAD_ARGUMENT;
    const auto stream = static_cast<hipStream_t>(queue);
    try {
        const Geometry geometry(*args, Row::ndim);
        if (!fits<Row>(*args, geometry)) return CATALOG_BAD_ARGUMENT;
        if (const catalog_status status = Family::run(*args, geometry, stream); status != CATALOG_OK) return status;
    } catch (const std::exception&) {
        return CATALOG_DEVICE_ERROR;
    }
    return succeeded(hipGetLastError()) ? CATALOG_OK : CATALOG_DEVICE_ERROR;
}

}  // namespace catalog::ck
