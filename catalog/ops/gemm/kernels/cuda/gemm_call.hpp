// One launch of a GEMM kernel for Hopper, checked: its tensor maps, and how blocks share the tiles. Host code.
#pragma once

#include <algorithm>
#include <cstdint>

#include "abi/check.hpp"
#include "cuda/block.hpp"
#include "cuda/tensor_map.hpp"
#include "gemm_shape.hpp"

namespace catalog::cuda {

// TMA needs addresses and strides that are multiples of 16 bytes, 8 elements. Rows of any other matrix are 8 apart by
// such a stride: a map for each of the 8 residues of their number begins at the multiple of 16 below its first row.
inline constexpr int most_residues = 8;

// How TMA reads an operand. Row i of the matrix is row i / residues of map i % residues, and its first element is the
// column (shift + i * step) % 8 there.
struct Operand {
    CUtensorMap maps[most_residues];
    int residues;  // 1, 2, 4 or 8
    int shift, step;
    bool batched;  // otherwise all products of a batch share the matrix
};

struct OutTensor {
    void* data;
    std::int64_t batch, row;  // strides in elements
};

struct GemmCall {
    Operand p, q;
    CUtensorMap c_map;
    OutTensor c, d[2];
    const void* bias;
    float alpha, beta;
    std::int32_t activation;
    int m, n, k;
    bool apart;    // rows of P or Q are in several maps
    bool natural;  // sums have the order of rows and columns, not that of residues
    bool plain;    // C = alpha A B, and TMA can store it: no other element is read
    bool vectors;  // rows of C, D and the bias are aligned to 16 bytes
    // Tiles: `super_m` x `tiles_n` clusters of them in each product; `band` rows of clusters at a time.
    int super_m, tiles_n, band, tiles;
    int splits;  // parts of the depth, by the blocks of a cluster; 1: none
    int grid;
};

inline constexpr std::int64_t most_extent = 1ll << 30;

inline std::int64_t parts(std::int64_t extent, std::int64_t part) { return (extent + part - 1) / part; }

inline bool aligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; }

// A matrix of `rows` x `columns`, in boxes of 64 columns. `share` rows are a block's share of a tile, which are loaded at
// once if the matrix is aligned; otherwise in boxes of `apart` rows for each residue. False: TMA cannot address it.
template <class T>
inline bool describe_operand(Operand& operand, const catalog_tensor& tensor, std::int64_t batch, std::int64_t rows,
                             std::int64_t columns, int share, int apart) {
    const std::int64_t row = rows > 1 ? tensor.stride_outer : (columns + 7) / 8 * 8;
    const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(tensor.data);
    if (row < 0 || tensor.stride_batch < 0 || address % sizeof(T)) return false;
    int residues = 1;
    while (row * residues % 8) residues *= 2;
    operand.residues = residues;
    operand.shift = static_cast<int>(address / sizeof(T) % 8);
    operand.step = static_cast<int>(row % 8);
    operand.batched = batch > 1 && tensor.stride_batch > 0;
    const std::uint64_t products = operand.batched ? batch : 1;
    const std::uint64_t between = operand.batched ? tensor.stride_batch * sizeof(T) : 16;
    for (int residue = 0; residue < residues; ++residue) {
        const std::uintptr_t first = address + residue * row * sizeof(T);
        const std::uint64_t before = first % 16 / sizeof(T), found = rows > residue ? parts(rows - residue, residues) : 1;
        const std::uint64_t extents[3] = {before + columns, found, products};
        const std::uint64_t strides[2] = {static_cast<std::uint64_t>(row) * residues * sizeof(T), between};
        const std::uint32_t box = residues == 1 ? share : std::max(1, apart / residues);
        if (!make_tensor_map<T>(operand.maps[residue], reinterpret_cast<const void*>(first / 16 * 16), extents, strides,
                                {64, box, 1}))
            return false;
    }
    return true;
}

// P or Q of a tile: its rows are loaded by `sharing` blocks of a cluster. A piece of rows that are apart is at most 64
// long, lest it be in several pieces of C.
template <class T, Major major>
inline bool describe_operand(Operand& operand, const catalog_tensor& tensor, std::int64_t batch, std::int64_t extent,
                             std::int64_t k, int tile, int tile_k, int sharing) {
    if constexpr (major == Major::k)
        return describe_operand<T>(operand, tensor, batch, extent, k, tile / sharing, std::min(tile, 64));
    else
        return describe_operand<T>(operand, tensor, batch, k, extent, tile_k / sharing, 1);
}

// The bytes that may lie between products of a batch.
inline bool batch_aligned(const catalog_args& args) {
    const auto fits = [&](const catalog_tensor& tensor) { return args.batch == 1 || tensor.stride_batch % 8 == 0; };
    return fits(args.a) && fits(args.b);
}

// The parts of the depth that take the least time: a wave of blocks takes a step for each tile_k of its part, and as
// much as `fixed` steps besides, and some for each other part whose sums it adds.
template <class Row>
inline int best_splits(std::int64_t tiles, std::int64_t steps, int processors) {
    constexpr int most = 8, fixed = 6, added = 1;
    int best = 1;
    if constexpr (GemmShape<Row>::can_split) {
        std::int64_t least = INT64_MAX;
        for (int splits = 1; splits <= most && splits <= std::max<std::int64_t>(1, steps / 4); splits *= 2) {
            const std::int64_t waves = parts(tiles * splits, processors);
            const std::int64_t taken = waves * (parts(steps, splits) + fixed + (splits > 1 ? added * splits : 0));
            if (taken < least) {
                least = taken;
                best = splits;
            }
        }
    }
    return best;
}

// Which tiles are worked on side by side: about as many rows as columns of C, so that the L2 cache is read for most.
template <class Row>
inline bool plan_tiles(const catalog_args& args, int processors, int clusters, GemmCall& call) {
    using Shape = GemmShape<Row>;
    const std::int64_t super_m = parts(args.m, Row::tile_m * Shape::cluster), tiles_n = parts(args.n, Row::tile_n);
    std::int64_t tiles;
    if (__builtin_mul_overflow(super_m, tiles_n, &tiles) || __builtin_mul_overflow(tiles, args.batch, &tiles) ||
        tiles > most_extent / 16)
        return false;
    call.super_m = static_cast<int>(super_m);
    call.tiles_n = static_cast<int>(tiles_n);
    call.tiles = static_cast<int>(tiles);
    call.splits = best_splits<Row>(tiles, parts(args.k, Row::tile_k), processors);
    std::int64_t band = 1;
    const std::int64_t area = static_cast<std::int64_t>(processors) * Row::tile_m * Row::tile_n;
    const std::int64_t height = static_cast<std::int64_t>(Row::tile_m) * Shape::cluster;
    while ((band + 1) * (band + 1) * height * height <= area) ++band;
    call.band = static_cast<int>(std::min(band, super_m));
    call.grid = call.splits > 1 ? call.tiles * call.splits
                                : static_cast<int>(std::min<std::int64_t>(tiles, clusters)) * Shape::cluster;
    return true;
}

inline bool valid_tensors(const catalog_args& args, int num_d) {
    const catalog_tensor* const given[] = {&args.c, &args.d0, &args.d1};
    for (int i = 0; i <= num_d; ++i)
        if (!given[i]->data) return false;
    return args.k == 0 || (args.a.data && args.b.data);
}

inline bool valid_sizes(const catalog_args& args) {
    const auto fits = [](std::int64_t size) { return 0 <= size && size <= most_extent; };
    return fits(args.batch) && fits(args.m) && fits(args.n) && fits(args.k) && !args.starts &&
           CATALOG_PASS_THROUGH <= args.activation && args.activation <= CATALOG_SILU;
}

// plan_tiles() follows.
template <class Row>
inline bool describe_call(const catalog_args& args, GemmCall& call) {
    using Shape = GemmShape<Row>;
    using T = typename Row::dtype;
    const catalog_tensor& p = Shape::swapped ? args.b : args.a;
    const catalog_tensor& q = Shape::swapped ? args.a : args.b;
    const std::int64_t extent_p = Shape::swapped ? args.n : args.m, extent_q = Shape::swapped ? args.m : args.n;
    if (args.k > 0) {
        if (!describe_operand<T, Shape::major_p>(call.p, p, args.batch, extent_p, args.k, Shape::tile_p, Row::tile_k, 1) ||
            !describe_operand<T, Shape::major_q>(call.q, q, args.batch, extent_q, args.k, Shape::tile_q, Row::tile_k,
                                                 Shape::cluster))
            return false;
    }
    const auto out = [&](const catalog_tensor& tensor) {
        return OutTensor{tensor.data, args.batch > 1 ? tensor.stride_batch : 0, args.m > 1 ? tensor.stride_outer : 0};
    };
    call.c = out(args.c);
    call.d[0] = out(args.d0);
    call.d[1] = out(args.d1);
    call.bias = args.bias.data;
    call.alpha = args.alpha;
    call.beta = args.beta;
    call.activation = args.activation;
    call.m = static_cast<int>(args.m);
    call.n = static_cast<int>(args.n);
    call.k = static_cast<int>(args.k);
    const auto whole = [](const OutTensor& tensor) {
        return aligned(tensor.data) && tensor.batch % 8 == 0 && tensor.row % 8 == 0;
    };
    call.vectors = args.n % 8 == 0 && whole(call.c) && (Row::num_d < 1 || whole(call.d[0])) &&
                   (Row::num_d < 2 || whole(call.d[1])) && aligned(call.bias);
    const auto in_order = [&](const Operand& operand, Major major) {
        return args.k == 0 || major == Major::mn || operand.residues == 1;
    };
    call.apart = args.k > 0 && call.p.residues * call.q.residues > 1;
    call.natural = in_order(call.p, Shape::major_p) && in_order(call.q, Shape::major_q);
    call.plain = !Shape::swapped && call.natural && call.c.row >= 0 && whole(call.c) && Row::num_d == 0 && !call.bias && args.beta == 0 &&
                 args.activation == CATALOG_PASS_THROUGH;
    if (call.plain) {
        const auto bytes = [](std::int64_t stride, std::int64_t otherwise) {
            return static_cast<std::uint64_t>(stride > 0 ? stride : otherwise) * sizeof(T);
        };
        const std::uint64_t extents[3] = {static_cast<std::uint64_t>(args.n), static_cast<std::uint64_t>(args.m),
                                          static_cast<std::uint64_t>(args.batch)};
        const std::uint64_t strides[2] = {bytes(call.c.row, (args.n + 7) / 8 * 8), bytes(call.c.batch, 8)};
        call.plain = make_tensor_map<T>(call.c_map, args.c.data, extents, strides, {64, 64, 1});
    }
    return true;
}

}  // namespace catalog::cuda
