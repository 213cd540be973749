// The templates of two revisions, as far as sources of rows name them.
#pragma once

namespace ck_tile {
enum class BlockAttentionBiasEnum { NO_BIAS, ELEMENTWISE_BIAS, ALIBI };
enum class RotaryEmbeddingEnum { NONE, INTERLEAVED, HALF_ROTATED };
template <bool masks>
struct SimplifiedGenericAttentionMask;
template <bool drops, bool wide, bool stores>
struct BlockDropoutBwd;

template <bool, bool, bool, bool, bool, BlockAttentionBiasEnum, bool, bool, bool, bool, int>
struct TileFmhaTraits;
#ifdef LIKE_2025_11
template <int, int, BlockAttentionBiasEnum, bool, int>
struct TileFmhaBwdTraits;
template <class, class, class, class, class, class, class, class, class, class, class, class, bool, class, class, bool,
          class>
struct BlockFmhaPipelineProblem;
template <class, class, class, class, class, class, class, class, class, class, class Warp4, int>
struct TileFmhaBwdShape {
    using Gemm4WarpTile = Warp4;
};
template <class, class, class, class, class, class, class, class, class, class, class, class, class, class, class,
          class, bool, bool, class, class, bool, class>
struct BlockFmhaBwdPipelineProblem;
template <class, class, class, class>
struct FmhaBwdDQDKDVKernel;
#else
template <class, class, class, class, class, class, class, class, class, class, class, class, bool, class, class, class>
struct BlockFmhaPipelineProblem;
template <class, class, class, class, class, class, class, class, class, class, class Warp4>
struct TileFmhaBwdShape {
    using Gemm4WarpTile = Warp4;
};
template <class, class, class, class, class, class, class, class, class, class, class, class, class, class, class,
          class, bool, bool, class, class, class>
struct BlockFmhaBwdPipelineProblem;
template <class, class, class>
struct FmhaBwdDQDKDVKernel;
#endif

template <bool pad_queries, bool pad_head_dim, int blocks_per_cu>
struct TileFmhaBwdOGradDotOTraits {
    static constexpr int pads = 2 * pad_queries + pad_head_dim, occupancy = blocks_per_cu;
};
template <class, class, class, int threads, int head_dim, bool ragged, class Traits>
struct BlockFmhaBwdOGradDotOPipelineProblem : Traits {
    static constexpr int queries = threads, hdim = head_dim, group = ragged;
};
template <class Problem>
struct BlockFmhaBwdOGradDotO : Problem {};

// Writes what it was instantiated with.
template <class Pipeline>
struct FmhaBwdOGradDotOKernel {
    static constexpr int kBlockPerCu = Pipeline::occupancy;
    static constexpr dim3 BlockSize() { return {Pipeline::queries}; }
    template <class Arguments>
    void operator()(const Arguments& arguments) const {
        const int seen[] = {Pipeline::queries, Pipeline::hdim, Pipeline::group, Pipeline::pads, kBlockPerCu};
        std::memcpy(arguments.d_ptr, seen, sizeof seen);
    }
};
}  // namespace ck_tile
