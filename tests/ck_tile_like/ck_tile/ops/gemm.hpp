// The GEMM templates of two revisions, as far as sources of rows name them; kernels multiply on the CPU.
#pragma once

#include <array>
#include <cstddef>
#include <type_traits>
#include <vector>

#include "ck_tile/core.hpp"

namespace ck_tile {
template <class...>
struct tuple;
enum class memory_operation_enum { set, atomic_add };
enum class TailNumber { Odd, Even, Full };
enum class GemmPipelineScheduler { Intrawave, Interwave, Default };
constexpr index_t get_warp_size() { return 64; }
namespace tensor_layout::gemm {
struct RowMajor;
struct ColumnMajor;
}  // namespace tensor_layout::gemm
namespace element_wise {
struct PassThrough {};
#ifdef LIKE_2025_11
struct MultiDAdd {};
struct MultiDMultiply {};
#endif
}  // namespace element_wise

template <int m, int n, int k>
constexpr int depth_of(sequence<m, n, k>*) {
    return k;
}
template <class Tile, class Waves, class Instruction>
struct TileGemmShape {
    static constexpr int depth = depth_of(static_cast<Tile*>(nullptr));
};
template <class Shape, int, int>
struct GemmSpatiallyLocalTilePartitioner {};
template <class Shape>
struct GemmTile1DPartitioner {};
template <bool pad_m, bool pad_n, bool pad_k, bool buffers, class A, class B, class C, bool, bool, bool, int,
          bool = false>
struct TileGemmUniversalTraits {
    using LayoutA = A;
    using LayoutB = B;
};
template <bool pad_m, bool pad_n, bool pad_k, class A, class B, class C, int>
struct TileGemmTraits {};
#ifdef LIKE_2025_11
template <class A, class B, class Sum, class Shape, class Traits, class = void, class = void, class = void,
          bool = false, int = 1, int = 1>
#else
template <class A, class B, class Sum, class Shape, class Traits, class = void, bool = false, int = 1, int = 1>
#endif
struct GemmPipelineProblem {
    static constexpr int kBlockSize = 256;
};
template <class A, class B, class Sum, class Shape, class Traits, GemmPipelineScheduler, bool hot_loop = true,
          TailNumber tail = TailNumber::Full, class = void, class = void, class = void, bool = false, int = 1, int = 1>
struct UniversalGemmPipelineProblem : Traits {
    using TypeA = A;
    using TypeB = B;
    static constexpr bool hot = hot_loop;
};

// Three steps or more have a hot loop, others an odd or an even tail.
template <class>
struct BaseGemmPipelineAgBgCrCompV3 {
    static bool BlockHasHotloop(index_t loops) { return loops > 2; }
    static TailNumber GetBlockLoopTailNum(index_t loops) {
        return loops > 2 ? TailNumber::Full : loops == 2 ? TailNumber::Even : TailNumber::Odd;
    }
    template <class Run>
    static auto TailHandler(const Run& run, bool hot, TailNumber tail) {
        if (hot) return run(std::true_type{}, std::integral_constant<TailNumber, TailNumber::Full>{});
        if (tail == TailNumber::Odd)
            return run(std::false_type{}, std::integral_constant<TailNumber, TailNumber::Odd>{});
        return run(std::false_type{}, std::integral_constant<TailNumber, TailNumber::Even>{});
    }
};
template <class Problem>
struct GemmPipelineAgBgCrCompV3 : Problem {};
template <class Problem>
struct GemmPipelineAGmemBGmemCRegV1 : Problem {};

#ifdef LIKE_2025_11
template <class A, class B, class Ds, class Sum, class C, class LayoutsD, class Layout, class Function, int, int, int,
          int, int, int, int, bool, memory_operation_enum how, int, bool = false, int = 1, bool = false>
#else
template <class A, class B, class Ds, class Sum, class C, class LayoutsD, class Layout, class Function, int, int, int,
          int, int, int, int, int, bool, memory_operation_enum how, int, bool = false, int = 1>
#endif
struct CShuffleEpilogueProblem {
    using Type = C;
    static constexpr bool adds = how == memory_operation_enum::atomic_add;
};
template <class Problem>
struct CShuffleEpilogue : Problem {};
#ifdef LIKE_2025_11
template <class A, class B, class Ds, class Sum, class C, class LayoutsD, class Layout, class Function, auto...>
#else
template <class A, class B, class Sum, class C, class Layout, auto...>
#endif
struct DefaultGemm2DEpilogueProblem;
template <class Problem>
struct DefaultGemm2DEpilogue;

template <int count>
struct Call {
    const void *a, *b;
    std::array<const void*, count> ds;
    void* c;
    index_t splits, M, N, K, stride_a, stride_b;
    std::array<index_t, count> strides_d;
    index_t stride_c;
};

struct GemmHostArgs : Call<0> {
    GemmHostArgs(const void* a, const void* b, void* c, index_t splits, index_t m, index_t n, index_t k, index_t lda,
                 index_t ldb, index_t ldc)
        : Call<0>{a, b, {}, c, splits, m, n, k, lda, ldb, {}, ldc} {}
};
template <int count>
struct GemmMultiDHostArgs : Call<count> {
    template <class... All>
    GemmMultiDHostArgs(All... all) : Call<count>{all...} {}
};

template <class Pipeline, class Epilogue, int count>
void multiply(const Call<count>& of) {
    using Rows = tensor_layout::gemm::RowMajor;
    constexpr bool rows_a = std::is_same_v<typename Pipeline::LayoutA, Rows>;
    constexpr bool rows_b = std::is_same_v<typename Pipeline::LayoutB, Rows>;
    using C = typename Epilogue::Type;
    const auto* const a = static_cast<const typename Pipeline::TypeA*>(of.a);
    const auto* const b = static_cast<const typename Pipeline::TypeB*>(of.b);
    for (index_t i = 0; i < of.M; ++i)
        for (index_t j = 0; j < of.N; ++j) {
            C sum = 0;
            for (index_t k = 0; k < of.K; ++k)
                sum += a[rows_a ? i * of.stride_a + k : k * of.stride_a + i] *
                       b[rows_b ? k * of.stride_b + j : j * of.stride_b + k];
            for (int d = 0; d < count; ++d) sum += static_cast<const C*>(of.ds[d])[i * of.strides_d[d] + j];
            C& c = static_cast<C*>(of.c)[i * of.stride_c + j];
            c = Epilogue::adds ? c + sum : sum;
        }
}

template <class Partitioner, class Pipeline, class Epilogue>
struct GemmKernel {
    template <int count>
    static Call<count> MakeKernelArgs(const Call<count>& of) {
        return of;
    }
    template <int count>
    static bool IsSupportedArgument(const Call<count>& of) {
        return of.N % 2 == 0;
    }
    static dim3 GridSize(index_t, index_t, index_t) { return {}; }
    static constexpr dim3 BlockSize() { return {256}; }
    template <int count>
    void operator()(const Call<count>& of) const {
        multiply<Pipeline, Epilogue>(of);
    }
};
template <class Partitioner, class Pipeline, class Epilogue>
struct GemmKernelMultiD : GemmKernel<Partitioner, Pipeline, Epilogue> {};

struct GroupedArgs : GemmHostArgs {
    using GemmHostArgs::GemmHostArgs;
    GroupedArgs(const void* a, const void* b, std::array<const void*, 0>, void* c, index_t splits, index_t m, index_t n,
                index_t k, index_t lda, index_t ldb, std::array<index_t, 0>, index_t ldc)
        : GemmHostArgs(a, b, c, splits, m, n, k, lda, ldb, ldc) {}
};
#ifdef LIKE_2025_11
template <int = 0>
using GroupedGemmHostArgs = GroupedArgs;
#else
using GroupedGemmHostArgs = GroupedArgs;
#endif
inline void* cast_pointer_to_constant_address_space(void* pointer) { return pointer; }

template <class Partitioner, class Pipeline, class Epilogue>
struct GroupedGemmKernel {
    static std::size_t GetWorkSpaceSize(index_t groups) { return groups * sizeof(GroupedArgs); }
    static std::vector<GroupedArgs> MakeKargs(const std::vector<GroupedArgs>& groups) { return groups; }
    static bool IsSupportedArgument(const std::vector<GroupedArgs>&) { return true; }
    static dim3 GridSize(const std::vector<GroupedArgs>&) { return {}; }
    static constexpr dim3 BlockSize() { return {256}; }
    void operator()(void* groups, index_t count) const {
        for (index_t i = 0; i < count; ++i) multiply<Pipeline, Epilogue, 0>(static_cast<GroupedArgs*>(groups)[i]);
    }
};
}  // namespace ck_tile
