// One launch of a GEMM kernel for Hopper, checked: its tensor maps, and how blocks share the tiles. Host code.
#pragma once

#include <algorithm>
#include <cstdint>

#include "abi/check.hpp"
#include "cuda/block.hpp"
#include "cuda/divisor.hpp"
#include "cuda/gemm_shape.hpp"
#include "cuda/tensor_map.hpp"

namespace catalog::cuda {

// How TMA reads an operand, with its map.
struct Operand {
    std::uint8_t panels;  // of a stage: those that exist
    bool batched;         // otherwise all products of a batch share the matrix
};

struct OutTensor {
    void* data;
    std::int64_t batch, row;  // strides in elements
};

// What is read before the first load stands first: parameters come from memory, a line at a time.
struct GemmCall {
    // Tiles, those of a cluster below each other counted as one: `tiles_m` x `tiles_n` of each product, in bands of
    // `height` rows, of which the last may have `last_height`. Numbers of tiles are divided by those of a product, of a
    // band and of its columns.
    Divisor of_product, of_band, height, last_height;
    int tiles, tiles_m, tiles_n;
    int clusters;  // that run side by side, of 2^log_blocks blocks
    int m, n, k;
    int stage_bytes;
    std::uint8_t log_parts;  // 2^log_parts parts of the depth, by the blocks of a cluster
    std::uint8_t log_blocks;
    Operand p, q;
    bool shifts;   // the last tiles end with C, in the tiles before them, whose elements they write again
    bool plain;    // C = alpha A B: no other element is read
    bool mapped;   // and TMA stores it
    bool vectors;  // rows of C, D and the bias are aligned to 16 bytes
    float alpha, beta;
    std::int32_t activation;
    int groups;
    const std::int32_t* starts;  // of groups, in the device's memory
    const void* bias;
    OutTensor c, d[2];
    OutTensor scale_a, scale_b;
    std::int64_t p_row, q_row, c_row;  // bytes between rows, for ragged maps
    CUtensorMap p_map, q_map, c_map;

    __host__ __device__ int parts() const { return 1 << log_parts; }
};

inline constexpr std::int64_t most_extent = 1ll << 30;

inline bool aligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; }

// Whether TMA can read a matrix: addresses and strides are multiples of 16 bytes.
template <class T>
inline bool readable(const catalog_tensor& tensor, std::int64_t batch, std::int64_t rows) {
    const auto fits = [](std::int64_t extent, std::int64_t stride, std::int64_t least) {
        return extent <= 1 || (stride % in_vector<T> == 0 && stride >= least);
    };
    return aligned(tensor.data) && fits(rows, tensor.stride_outer, in_vector<T>) && fits(batch, tensor.stride_batch, 0);
}

// A matrix of `rows` x `columns`, in boxes of `box` rows of 128 bytes. False: TMA cannot address it.
template <class T>
inline bool describe_operand(Operand& operand, CUtensorMap& map, const catalog_tensor& tensor, std::int64_t batch,
                             std::int64_t rows, std::int64_t columns, int box) {
    const std::int64_t row = rows > 1 ? tensor.stride_outer : parts(columns, in_vector<T>) * in_vector<T>;
    operand.batched = batch > 1 && tensor.stride_batch > 0;
    const std::uint64_t extents[3] = {static_cast<std::uint64_t>(columns), static_cast<std::uint64_t>(rows),
                                      operand.batched ? static_cast<std::uint64_t>(batch) : 1};
    const std::uint64_t strides[2] = {row * sizeof(T), operand.batched ? tensor.stride_batch * sizeof(T) : 16};
    const std::uint32_t count = box;
    return make_tensor_map<T>(map, tensor.data, extents, strides, {in_panel_row<T>, count, 1});
}

// Groups are parts of the rows: the depth.
template <class T>
inline bool describe_groups(Operand& operand, CUtensorMap& map, const catalog_tensor& tensor, std::int64_t rows,
                            std::int64_t columns, int box, std::int64_t& row_bytes) {
    const std::int64_t row = rows > 1 ? tensor.stride_outer : parts(columns, in_vector<T>) * in_vector<T>;
    operand.batched = false;
    row_bytes = row * static_cast<std::int64_t>(sizeof(T));
    return make_ragged_map<T>(map, tensor.data, row_bytes, columns, in_panel_row<T>, box);
}

// A map of which nothing is read, though it is fetched; `data` is any address in the device's memory.
template <class T>
inline bool describe_nothing(Operand& operand, CUtensorMap& map, void* data) {
    catalog_tensor one{};
    one.data = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(data) & ~std::uintptr_t{15});
    return describe_operand<T>(operand, map, one, 1, 1, 1, 8);
}

// P or Q, `extent` long, of which a stage has `bytes` in panels; boxes are the rows of panels that a block loads. What
// would lie outside of a matrix is not loaded: TMA fills rows that do not exist more slowly than it reads others, and
// whatever is in their place only reaches elements that are not stored.
template <class T, Major major, int bytes, int panel_bytes, int load_bytes>
inline bool describe_operand(GemmCall& call, Operand& operand, CUtensorMap& map, const catalog_tensor& tensor,
                             std::int64_t batch, std::int64_t extent, std::int64_t k) {
    constexpr int panels = bytes / panel_bytes, box = load_bytes / panel_row_bytes, sharers = panel_bytes / load_bytes;
    operand.panels = panels;
    if constexpr (major == Major::k) {
        const int rows = sharers > 1 ? box : static_cast<int>(std::min<std::int64_t>(box, extent));
        call.stage_bytes += panels * sharers * rows * panel_row_bytes;
        return describe_operand<T>(operand, map, tensor, batch, extent, k, rows);
    } else {
        if (sharers == 1)
            operand.panels = static_cast<std::uint8_t>(std::min<std::int64_t>(panels, parts(extent, in_panel_row<T>)));
        call.stage_bytes += operand.panels * panel_bytes;
        return describe_operand<T>(operand, map, tensor, batch, k, extent, box);
    }
}

// The parts of the depth that a launch has if `args` asks for `num_splits`: a power of two, a block of a cluster for
// each, and a stage for each.
template <class Row>
inline int splits_of(const catalog_args& args) {
    constexpr std::int64_t most_blocks = 8;  // of a cluster that every GPU can run
    int splits = 1;
    if constexpr (GemmShape<Row>::can_split && !Row::grouped) {
        const std::int64_t most = std::min({args.num_splits, most_blocks, parts(args.k, Row::tile_k)});
        while (2 * splits <= most) splits *= 2;
    }
    return splits;
}

// Of a power of two.
inline std::uint8_t exponent(int power) {
    std::uint8_t exponent = 0;
    while (1 << exponent < power) ++exponent;
    return exponent;
}

// Which tiles are worked on side by side: about as many rows as columns of C, so that the L2 cache is read for most.
template <class Row>
inline bool plan_tiles(const catalog_args& args, int processors, GemmCall& call) {
    constexpr int tall = Row::cluster_m * Row::tile_m;
    const std::int64_t tiles_m = parts(args.m, tall), tiles_n = parts(args.n, Row::tile_n);
    // Each group of rows has at most one tile that is not full.
    const bool divides_rows = Row::grouped && !Row::along_depth;
    std::int64_t tiles;
    if (__builtin_mul_overflow(divides_rows ? tiles_m + args.batch : tiles_m, tiles_n, &tiles) ||
        __builtin_mul_overflow(tiles, divides_rows ? 1 : args.batch, &tiles) || tiles > most_extent / 16)
        return false;
    call.tiles_m = static_cast<int>(tiles_m);
    call.tiles_n = static_cast<int>(tiles_n);
    call.tiles = static_cast<int>(tiles);
    const int splits = splits_of<Row>(args);
    std::int64_t band = 1;
    const std::int64_t area = static_cast<std::int64_t>(processors) * Row::tile_m * Row::tile_n;
    while ((band + 1) * (band + 1) * tall * tall <= area) ++band;
    band = std::min(band, tiles_m);
    call.of_product = Divisor(tiles_m * tiles_n);
    call.of_band = Divisor(band * tiles_n);
    call.height = Divisor(band);
    call.last_height = Divisor(tiles_m % band ? tiles_m % band : band);
    const int blocks = std::max(splits, Row::cluster_m);
    call.clusters = splits > 1 ? call.tiles : std::min(call.tiles, processors / blocks);
    call.log_parts = exponent(splits);
    call.log_blocks = exponent(blocks);
    return true;
}

template <class Row>
inline bool valid_tensors(const catalog_args& args) {
    if ((args.starts != nullptr) != Row::grouped) return false;
    const catalog_tensor* const given[] = {&args.c, &args.d0, &args.d1};
    for (int i = 0; i <= Row::num_d; ++i)
        if (!given[i]->data) return false;
    const bool scaled = Row::scales == Scales::row || (Row::scales == Scales::block && args.k > 0);
    if (scaled && (!args.scale_a.data || !args.scale_b.data)) return false;
    return args.k == 0 || (args.a.data && args.b.data);
}

inline bool valid_sizes(const catalog_args& args) {
    const auto fits = [](std::int64_t size) { return 0 <= size && size <= most_extent; };
    return fits(args.batch) && fits(args.m) && fits(args.n) && fits(args.k) &&
           CATALOG_PASS_THROUGH <= args.activation && args.activation <= CATALOG_SILU;
}

// The sums of parts of the depth meet in shared memory, so there is no workspace.
template <class Row>
inline std::int32_t gemm_workspace(const catalog_args* args, catalog_workspace* size) noexcept {
    if (const catalog_status status = check_abi(args); status != CATALOG_OK) return status;
    if (!size || !valid_sizes(*args)) return CATALOG_BAD_ARGUMENT;
    *size = {splits_of<Row>(*args), 0};
    return CATALOG_OK;
}

// plan_tiles() follows.
template <class Row>
inline bool describe_call(const catalog_args& args, GemmCall& call) {
    using Shape = GemmShape<Row>;
    using T = typename Row::dtype;
    using Out = typename Row::out;
    const catalog_tensor& p = Shape::swapped ? args.b : args.a;
    const catalog_tensor& q = Shape::swapped ? args.a : args.b;
    const std::int64_t extent_p = Shape::swapped ? args.n : args.m, extent_q = Shape::swapped ? args.m : args.n;
    const std::int64_t products_a = Row::grouped ? 1 : args.batch, products_b = Row::along_depth ? 1 : args.batch;
    const std::int64_t products_c = Row::grouped && !Row::along_depth ? 1 : args.batch;
    call.stage_bytes = 0;
    if (args.k > 0) {
        if constexpr (Row::along_depth) {
            if (!describe_groups<T>(call.p, call.p_map, p, args.k, extent_p, Row::tile_k, call.p_row) ||
                !describe_groups<T>(call.q, call.q_map, q, args.k, extent_q, Row::tile_k, call.q_row))
                return false;
            call.stage_bytes = Shape::stage_bytes;
        } else {
            const std::int64_t products_p = Shape::swapped ? products_b : products_a;
            const std::int64_t products_q = Shape::swapped ? products_a : products_b;
            if (!describe_operand<T, Shape::major_p, Shape::p_bytes, Shape::panel_p, Shape::panel_p>(
                    call, call.p, call.p_map, p, products_p, extent_p, args.k) ||
                !describe_operand<T, Shape::major_q, Shape::q_bytes, Shape::panel_q, Shape::load_q>(
                    call, call.q, call.q_map, q, products_q, extent_q, args.k))
                return false;
        }
    } else if (!describe_nothing<T>(call.p, call.p_map, args.c.data) ||
               !describe_nothing<T>(call.q, call.q_map, args.c.data)) {
        return false;
    }
    const auto out = [&](const catalog_tensor& tensor) {
        return OutTensor{tensor.data, products_c > 1 ? tensor.stride_batch : 0, args.m > 1 ? tensor.stride_outer : 0};
    };
    const auto scale = [&](const catalog_tensor& tensor, std::int64_t products) {
        return OutTensor{tensor.data, products > 1 ? tensor.stride_batch : 0, tensor.stride_outer};
    };
    call.scale_a = scale(args.scale_a, products_a);
    call.scale_b = scale(args.scale_b, products_b);
    call.starts = args.starts;
    call.groups = static_cast<int>(args.batch);
    call.c = out(args.c);
    call.d[0] = out(args.d0);
    call.d[1] = out(args.d1);
    call.bias = args.bias.data;
    call.alpha = args.alpha;
    call.beta = args.beta;
    call.activation = args.activation;
    call.m = static_cast<int>(args.m);
    call.n = static_cast<int>(args.n);
    // What is written twice must not be read between.
    call.shifts = args.beta == 0 && args.d0.data != args.c.data && args.d1.data != args.c.data;
    call.k = static_cast<int>(args.k);
    const auto whole = [](const OutTensor& tensor) {
        return aligned(tensor.data) && tensor.batch % 8 == 0 && tensor.row % 8 == 0;
    };
    call.vectors = args.n % 8 == 0 && whole(call.c) && (Row::num_d < 1 || whole(call.d[0])) &&
                   (Row::num_d < 2 || whole(call.d[1])) && aligned(call.bias);
    const auto forward = [](std::int64_t extent, std::int64_t stride) { return extent == 1 || stride > 0; };
    call.plain = Row::num_d == 0 && !call.bias && args.beta == 0 && args.activation == CATALOG_PASS_THROUGH;
    call.mapped = call.plain && Shape::stores_pieces && sizeof(Out) == 2 && whole(call.c) &&
                  forward(args.m, call.c.row) && forward(products_c, call.c.batch);
    if (call.mapped) {
        const auto bytes = [](std::int64_t stride, std::int64_t otherwise) {
            return static_cast<std::uint64_t>(stride > 0 ? stride : otherwise) * sizeof(Out);
        };
        const std::uint64_t extents[3] = {static_cast<std::uint64_t>(args.n), static_cast<std::uint64_t>(args.m),
                                          static_cast<std::uint64_t>(args.batch)};
        const std::uint64_t strides[2] = {bytes(call.c.row, (args.n + 7) / 8 * 8), bytes(call.c.batch, 8)};
        call.c_row = static_cast<std::int64_t>(strides[0]);
        if constexpr (Row::grouped && !Row::along_depth)
            call.mapped = make_ragged_map<Out>(call.c_map, args.c.data, call.c_row, args.n, 64, 64);
        else
            call.mapped = make_tensor_map<Out>(call.c_map, args.c.data, extents, strides, {64, 64, 1});
    }
    return true;
}

}  // namespace catalog::cuda
