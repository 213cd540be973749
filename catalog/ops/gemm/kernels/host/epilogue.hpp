// From sums to elements of C: C = f(alpha A B + beta C + bias), combined with the D tensors. Scales of rows and columns
// multiply the sums here.
#pragma once

#include <algorithm>

#include "call.hpp"
#include "host/exp2.hpp"
#include "host/pack.hpp"

namespace catalog::host {

// exp(-x), whatever x is.
inline Float exp_of_minus(Float x) { return exp2_or_infinity(x * -0x1.715476p0f); }

inline Float silu(Float x) { return x / (exp_of_minus(x) + 1.0f); }

// x Phi(x), with the complement of the error function to within 1.5e-7: Abramowitz and Stegun, 7.1.26.
inline Float gelu(Float x) {
    const Float size = max(x, -x) * 0x1.6a09e6p-1f;
    const Float t = 1.0f / (size * 0.3275911f + 1.0f);
    Float p = splat(1.061405429f);
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const Float tail = p * t * exp_of_minus(size * size) * 0.5f;
    return x * (x < 0.0f ? tail : 1.0f - tail);
}

inline Float activated(Float x, std::int32_t activation) {
    switch (activation) {
        case CATALOG_RELU: return x < 0.0f ? Float{} : x;  // NaN stays NaN
        case CATALOG_GELU: return gelu(x);
        case CATALOG_SILU: return silu(x);
        default: return x;
    }
}

inline Ints activated(Ints x, std::int32_t activation) {
    return activation == CATALOG_RELU ? (x < 0 ? Ints{} : x) : x;
}

#if defined(__AVX512F__)

// Rows of sums, lds apart, rounded to C alone: four instructions for two vectors. Sums below the smallest normal number
// become zero, as their factors would.
inline void round_sums(const float* sums, std::int64_t lds, int rows, int columns, Rows<bf16> c) {
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < columns; j += 2 * lanes) {
            const float* const from = sums + i * lds + j;
            const Bits pairs = brain_pairs(load(from), load(from + lanes));
            bf16 rounded[2 * lanes];
            std::memcpy(rounded, &pairs, sizeof pairs);
            if (columns - j >= 2 * lanes)
                std::memcpy(c[i] + j, rounded, sizeof rounded);
            else
                write_first(c[i] + j, rounded, columns - j);
        }
}

#endif

// Whether C consists of the sums alone. D tensors and scales come on top.
inline bool is_as_summed(const catalog_args& args) {
    return args.alpha == 1 && args.beta == 0 && !args.bias.data && args.activation == CATALOG_PASS_THROUGH;
}

// Sums of `rows` x `columns`, lds apart, become the part of C that begins at a row and a column. Those of a part of K
// are kept in the workspace, whose rows are as long as those of C.
template <class Row, class Sum>
__attribute__((noinline)) void finish(const catalog_args& args, std::int64_t batch, const Sum* sums, std::int64_t lds,
                                      std::int64_t first_row, std::int64_t first_column, int rows, int columns) {
    if (args.num_splits > 1) {
        Sum* const to = static_cast<Sum*>(args.c_acc.data) + first_row * args.n + first_column;
        for (int i = 0; i < rows; ++i) std::copy_n(sums + i * lds, columns, to + i * args.n);
        return;
    }
    using Element = typename Row::otype;
    const auto row_of = [&](const catalog_tensor& tensor, std::int64_t row) {
        return data_of<Element>(tensor, batch) + row * tensor.stride_outer + first_column;
    };
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<Element, bf16> && Row::num_d == 0 && scales_of<Row> != Scales::row) {
        if (is_as_summed(args) && Units<BrainPair>::is_supported())
            return round_sums(sums, lds, rows, columns, {row_of(args.c, first_row), args.c.stride_outer});
    }
#endif
    const Element* const bias = args.bias.data ? data_of<const Element>(args.bias, 0) + first_column : nullptr;
    const auto scaled_sums = [&](int row, int column) {
        const auto x = load(sums + row * lds + column);
        if constexpr (scales_of<Row> == Scales::row) {
            const float of_row = data_of<const float>(args.scale_a, batch)[first_row + row];
            const float* const of_columns = data_of<const float>(args.scale_b, batch) + first_column + column;
            return as_float(x) * of_row * load_first(of_columns, columns - column);
        } else {
            return x;
        }
    };
    for (int i = 0; i < rows; ++i) {
        Element* const c = row_of(args.c, first_row + i);
        for (int j = 0; j < columns; j += lanes) {
            const int count = columns - j;
            auto x = scaled_sums(i, j);
            if constexpr (std::is_same_v<decltype(x), Float>) {
                x *= args.alpha;
                if (args.beta != 0) x += load_first(c + j, count) * args.beta;
            } else if (args.beta != 0) {
                x += load_first(c + j, count);
            }
            if (bias) x += load_first(bias + j, count);
            x = activated(x, args.activation);
            const auto combine = [&](const catalog_tensor& d) {
                const auto value = load_first(row_of(d, first_row + i) + j, count);
                x = Row::multiplies ? x * value : x + value;
            };
            if constexpr (Row::num_d > 0) combine(args.d0);
            if constexpr (Row::num_d > 1) combine(args.d1);
            store_first(c + j, x, count);
        }
    }
}

}  // namespace catalog::host
