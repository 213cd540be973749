// The convolution templates of two revisions, as far as sources of rows name them; kernels convolve on the CPU.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "ck_tile/host/convolution_parameter.hpp"
#include "ck_tile/ops/gemm.hpp"

namespace ck_tile {
template <>
struct tuple<> {};
template <int i>
struct number {};
namespace tensor_layout::convolution {
struct NHWGC;
struct GKYXC;
struct NHWGK;
}  // namespace tensor_layout::convolution
enum struct ConvolutionSpecialization { Default, Filter1x1Pad0, Filter1x1Stride1Pad0, Filter3x3 };

template <class In, class Weight, class Out>
struct GroupedConvHostArgs : conv::ConvParam {
    GroupedConvHostArgs(const conv::ConvParam& sizes, In in, Weight weight, const std::vector<const void*>&, Out out,
                        index_t k_batch)
        : conv::ConvParam(sizes), in(in), weight(weight), out(out), k_batch(k_batch) {}
    In in;
    Weight weight;
    Out out;
    index_t k_batch;
};
#ifdef LIKE_2025_11
template <class = void>
using GroupedConvFwdHostArgs = GroupedConvHostArgs<const void*, const void*, void*>;
using GroupedConvBwdDataHostArgs = GroupedConvHostArgs<void*, const void*, const void*>;
#else
using GroupedConvFwdHostArgs = GroupedConvHostArgs<const void*, const void*, void*>;
#endif
using GroupedConvBwdWeightHostArgs = GroupedConvHostArgs<const void*, void*, const void*>;

#ifdef LIKE_2025_11
template <int, ConvolutionSpecialization, class In, class Weight, class Ds, class Out, int, int, int, int merged>
#else
template <int, ConvolutionSpecialization, class In, class Weight, class Ds, class Out>
#endif
struct GroupedConvTraits {
    using ImplicitGemmDsLayout = Ds;
    using GroupedConvImplicitGemmTraits = void;
};

// As many products as strides have remainders: the first one is the deepest.
template <class Traits, class Partitioner>
struct GroupedConvBwdDataKernelArgs {
    static constexpr index_t MaxGroupedGemmGroupsNum = 4;
    struct Descriptor {
        index_t depth;
        index_t get_length(number<1>) const { return depth; }
    };
    template <class Arguments>
    explicit GroupedConvBwdDataKernelArgs(const Arguments& args) {
        index_t taps = 1;
        for (index_t i = 0; i < args.ndim; ++i) {
            gemm_count *= args.strides[i];
            taps *= args.filter[i];
        }
        for (index_t i = 0; i < std::min(gemm_count, MaxGroupedGemmGroupsNum); ++i)
            a_grid_descs_m_k[i].depth = args.k * std::max<index_t>(1, taps / (i + 1));
    }
    index_t gemm_count = 1;
    std::array<Descriptor, MaxGroupedGemmGroupsNum> a_grid_descs_m_k;
};

enum class Computed { in, weight, out };

template <Computed computed, class Arguments>
void convolve(const Arguments& of) {
    // The row of the test is fp32 of two axes.
    const auto elements = [](auto* pointer) { return const_cast<float*>(static_cast<const float*>(pointer)); };
    float *const in = elements(of.in), *const weight = elements(of.weight), *const out = elements(of.out);
    const index_t c_all = of.g * of.c, k_all = of.g * of.k;
    if (computed == Computed::out) std::fill_n(out, of.n * of.output[0] * of.output[1] * k_all, 0.f);
    if (computed == Computed::weight) std::fill_n(weight, k_all * of.filter[0] * of.filter[1] * of.c, 0.f);
    for (index_t n = 0; n < of.n; ++n)
        for (index_t place = 0; place < of.output[0] * of.output[1]; ++place)
            for (index_t tap = 0; tap < of.filter[0] * of.filter[1]; ++tap) {
                const index_t h = place / of.output[1] * of.strides[0] + tap / of.filter[1] * of.dilations[0] - of.pads[0];
                const index_t w = place % of.output[1] * of.strides[1] + tap % of.filter[1] * of.dilations[1] - of.pads[1];
                if (h < 0 || w < 0 || h >= of.input[0] || w >= of.input[1]) continue;
                for (index_t k = 0; k < k_all; ++k)
                    for (index_t c = 0; c < of.c; ++c) {
                        float& x = in[((n * of.input[0] + h) * of.input[1] + w) * c_all + k / of.k * of.c + c];
                        float& f = weight[(k * of.filter[0] * of.filter[1] + tap) * of.c + c];
                        float& y = out[(n * of.output[0] * of.output[1] + place) * k_all + k];
                        if (computed == Computed::out) y += x * f;
                        if (computed == Computed::weight) f += x * y;
                        if (computed == Computed::in) x += f * y;
                    }
            }
}

template <Computed computed>
struct ConvolutionKernel {
    template <class Arguments>
    static Arguments MakeKernelArgs(const Arguments& args) {
        return args;
    }
    template <class Arguments>
    static bool IsSupportedArgument(const Arguments& args) {
        return args.c % 2 == 0 && args.k_batch == 1;
    }
    template <class Arguments>
    static dim3 GridSize(const Arguments&) {
        return {};
    }
    static constexpr dim3 BlockSize() { return {256}; }
    template <class Arguments>
    void operator()(const Arguments& args) const {
        convolve<computed>(args);
    }
};
template <class Traits, class Partitioner, class Pipeline, class Epilogue>
struct GroupedConvolutionForwardKernel : ConvolutionKernel<Computed::out> {};
template <class Traits, class Partitioner, class Pipeline, class Epilogue>
struct GroupedConvolutionBackwardWeightKernel : ConvolutionKernel<Computed::weight> {};
#ifdef LIKE_2025_11
template <class Traits, class Partitioner, class Pipeline, class Epilogue>
struct GroupedConvolutionBackwardDataKernel : ConvolutionKernel<Computed::in> {};
#endif
}  // namespace ck_tile
