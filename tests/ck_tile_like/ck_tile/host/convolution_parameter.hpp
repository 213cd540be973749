// The sizes of a convolution.
#pragma once

#include <vector>

#include "ck_tile/core.hpp"

namespace ck_tile::conv {
struct ConvParam {
    using Extents = std::vector<index_t>;
    ConvParam(index_t ndim, index_t g, index_t n, index_t k, index_t c, const Extents& filter, const Extents& input,
              const Extents& strides, const Extents& dilations, const Extents& left, const Extents&)
        : ndim(ndim), g(g), n(n), k(k), c(c), filter(filter), input(input), strides(strides), dilations(dilations),
          pads(left) {
        for (index_t i = 0; i < ndim; ++i)
            output.push_back((input[i] + 2 * left[i] - dilations[i] * (filter[i] - 1) - 1) / strides[i] + 1);
    }
    index_t ndim, g, n, k, c;
    Extents filter, input, strides, dilations, pads, output;
};
}  // namespace ck_tile::conv
