// Appends new keys and values to the tokens in the cache, and applies rotary embedding (RoPE) to keys and queries.
//
// Key t of a sequence with n cached tokens has position n + t. Query i has position n + i if the attention that follows
// is masked, otherwise n, as in flash-attn and CK Tile. If the cache has 8 bits and queries have 16, new tokens
// are divided by the cache's factors, if it has any.
//
// The rows of all heads are read once and written once, by neighbouring lanes, twice 8 elements each: as many lanes as
// the head dim needs, so that a row belongs to one warp. Each lane has tile_m0 queries in flight, or the keys and values
// of tile_n0 tokens.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "cuda/common/launch.hpp"
#include "cuda/common/sequence.hpp"
#include "rotary.hpp"

namespace catalog::cuda {

inline constexpr int append_threads = 256;

// What the host computes for a launch. Rows count the heads fastest: in most layouts they are neighbours in memory.
struct AppendGrid {
    Divisor heads_q, heads_k, page_size;
    int queries, keys;              // rows of a sequence
    int query_blocks, key_blocks;  // of a sequence; those of keys come first
    bool masked;
};

template <class Row, int lanes, bool whole>
class Append {
    using T = QueryElement<Row>;
    using Cached = typename Row::dtype;
    static constexpr int rows = append_threads / lanes;  // that a block has at a time

   public:
    static constexpr int keys_of_block = rows * Row::tile_n0, queries_of_block = rows * Row::tile_m0;

    __device__ __forceinline__ Append(const catalog_args& args, const AppendGrid& grid, int sequence)
        : args(args),
          grid(grid),
          sequence(sequence),
          cached(length_of(args.seqlens_k, sequence, static_cast<int>(args.seqlen_k))),
          pieces(args) {}

    __device__ __forceinline__ void keys(int block) const {
        constexpr int count = Row::tile_n0;
        RotaryRow<Row, lanes, whole> k[count];
        EightBits<T> v[count][2];
        Place place[count];
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const QueryRow at = row_of(block * count + i, grid.heads_k);
            place[i] = place_of(at, row_number(block * count + i) < grid.keys);
            if (!place[i].exists) continue;
            k[i].read(args, pieces, of<const T>(args.k_new, at), cached + at.query);
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if (pieces.element[j] < args.hdim_v)
                    v[i][j] = load_eight(of<const T>(args.v_new, at) + pieces.element[j], args.hdim_v - pieces.element[j]);
        }
        const float of_k = factor_of(args.k_descale), of_v = factor_of(args.v_descale);
#pragma unroll
        for (int i = 0; i < count; ++i) {
            if (!place[i].exists) continue;
            const int head = row_of(block * count + i, grid.heads_k).head;
            k[i].rotate(args, pieces);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int element = pieces.element[j];
                if (element < args.hdim_q)
                    keep(place[i].in(args.k, head) + element, k[i].piece[j].bits, args.hdim_q - element, of_k);
                if (element < args.hdim_v)
                    keep(place[i].in(args.v, head) + element, v[i][j], args.hdim_v - element, of_v);
            }
        }
    }

    // A warp reads whole rows before it writes them: q_out may be q.
    __device__ __forceinline__ void queries(int block) const {
        constexpr int count = Row::tile_m0;
        RotaryRow<Row, lanes, whole> q[count];
        bool exists[count];
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const QueryRow at = row_of(block * count + i, grid.heads_q);
            const int position = grid.masked ? cached + at.query : cached;
            const bool has_angles = Row::rope == Rope::none || position < args.seqlen_k;
            exists[i] = row_number(block * count + i) < grid.queries && has_angles;
            if (exists[i]) q[i].read(args, pieces, of<const T>(args.q, at), position);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < count; ++i) {
            if (!exists[i]) continue;
            T* target = of<T>(args.q_out, row_of(block * count + i, grid.heads_q));
            q[i].rotate(args, pieces);
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if (pieces.element[j] < args.hdim_q)
                    store_eight(target + pieces.element[j], q[i].piece[j].bits, args.hdim_q - pieces.element[j]);
        }
    }

   private:
    // Where a token lies in the cache: `batch` is a sequence or a page.
    struct Place {
        int batch, token;
        bool exists;

        __device__ __forceinline__ Cached* in(const catalog_tensor& cache, int head) const {
            return rows_of<Cached>(cache, batch, head, token);
        }
    };

    __device__ __forceinline__ int row_number(int turn) const {
        return turn * rows + static_cast<int>(threadIdx.x) / lanes;
    }

    // The token and the head of a row; those behind the last have some too.
    __device__ __forceinline__ QueryRow row_of(int turn, const Divisor& heads) const {
        return query_row(row_number(turn), heads);
    }

    template <class Element>
    __device__ __forceinline__ Element* of(const catalog_tensor& tensor, const QueryRow& at) const {
        return rows_of<Element>(tensor, sequence, at.head, at.query);
    }

    __device__ __forceinline__ Place place_of(const QueryRow& at, bool exists) const {
        const int position = cached + at.query;
        Place place{sequence, position, exists && position < args.seqlen_k};
        if constexpr (Row::paged_kv) {
            const int index = grid.page_size.quotient(position);
            place.token = position - index * static_cast<int>(grid.page_size.divisor);
            place.exists = place.exists && index < args.pages_per_sequence;
            place.batch = place.exists ? PageTable<Row>(args, sequence)[index] : -1;
            place.exists = 0 <= place.batch && place.batch < args.num_pages;
        }
        return place;
    }

    // What a token is multiplied with on its way into the cache.
    static __device__ __forceinline__ float factor_of(const catalog_tensor& descale) {
        if constexpr (!narrows) return 1.0f;
        return descale.data ? 1.0f / *static_cast<const float*>(descale.data) : 1.0f;
    }

    static __device__ __forceinline__ void keep(Cached* elements, EightBits<T> bits, std::int64_t left, float factor) {
        if constexpr (narrows) {
            Eight<T> eight;
            eight.bits = bits;
            float x[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] = static_cast<float>(eight.element[i]) * factor;
            *reinterpret_cast<uint2*>(elements) =
                make_uint2(pack_bytes<Cached>(x[0], x[1], x[2], x[3]), pack_bytes<Cached>(x[4], x[5], x[6], x[7]));
        } else {
            store_eight(elements, bits, left);
        }
    }

    static constexpr bool narrows = !std::is_same_v<T, Cached>;

    const catalog_args& args;
    const AppendGrid& grid;
    const int sequence;
    const int cached;  // tokens before the new ones
    const LanePieces<Row, lanes, whole> pieces;
};

template <class Row, int lanes, bool whole>
__global__ void __launch_bounds__(append_threads)
    append(const __grid_constant__ catalog_args args, const __grid_constant__ AppendGrid grid) {
    const unsigned blocks = grid.key_blocks + grid.query_blocks, sequence = blockIdx.x / blocks;
    const Append<Row, lanes, whole> append(args, grid, sequence);
    const int block = blockIdx.x - sequence * blocks;
    if (block < grid.key_blocks)
        append.keys(block);
    else
        append.queries(block - grid.key_blocks);
}

inline bool appends_keys(const catalog_args& args) {
    return args.batch > 0 && args.nhead_k > 0 && args.seqlen_new > 0;
}

template <class Row>
inline bool valid_append(const catalog_args& args) {
    using T = QueryElement<Row>;
    static_assert(Row::hdim_q <= 512 && Row::hdim_v <= 512, "a row belongs to one warp");
    if (!valid_sizes(args) || args.seqlen_new < 0 || args.seqlen_new > most_tokens || !valid_pages<Row>(args))
        return false;
    constexpr int vector = std::min(8, in_vector<Row>);
    if (!valid_hdim(args.hdim_q, Row::hdim_q, Row::pad_d, vector) ||
        !valid_hdim(args.hdim_v, Row::hdim_v, Row::pad_dv, vector))
        return false;
    if (args.rotary_dim < 0 || args.rotary_dim % 2 || args.rotary_dim > args.hdim_q) return false;
    const bool rotates = Row::rope != Rope::none && args.rotary_dim > 0;
    const bool keys = appends_keys(args), queries = has_queries(args);
    if ((keys || queries) && (!args.seqlens_k.data || (rotates && !(args.rotary_cos.data && args.rotary_sin.data))))
        return false;
    const auto has_new = [&](const catalog_tensor& tensor) {
        return tensor.data && aligned_rows<T>(tensor, args.batch, args.nhead_k, args.seqlen_new);
    };
    const auto has_cache = [&](const catalog_tensor& tensor) { return tensor.data && aligned_keys<Row>(args, tensor); };
    if (keys && !(has_cache(args.k) && has_cache(args.v) && has_new(args.k_new) && has_new(args.v_new))) return false;
    return !queries || (args.q.data && args.q_out.data && aligned_queries<Row, T>(args, args.q) &&
                        aligned_queries<Row, T>(args, args.q_out));
}

template <class Row, int lanes, bool whole>
inline catalog_status launch_append(const catalog_args& args, cudaStream_t stream) {
    using Block = Append<Row, lanes, whole>;
    const std::int64_t keys = appends_keys(args) ? args.nhead_k * args.seqlen_new : 0;
    const std::int64_t queries = has_queries(args) ? args.nhead_q * args.seqlen_q : 0;
    const std::int64_t key_blocks = divide_up(keys, Block::keys_of_block);
    const std::int64_t query_blocks = divide_up(queries, Block::queries_of_block);
    std::int64_t blocks;
    if (keys > INT_MAX / 2 || queries > INT_MAX / 2 ||
        __builtin_mul_overflow(key_blocks + query_blocks, args.batch, &blocks) || blocks > INT_MAX)
        return CATALOG_BAD_ARGUMENT;
    if (blocks == 0) return CATALOG_OK;
    const AppendGrid grid{Divisor(std::max<std::int64_t>(1, args.nhead_q)),
                          Divisor(std::max<std::int64_t>(1, args.nhead_k)),
                          Divisor(Row::paged_kv ? args.page_size : 1),
                          static_cast<int>(queries),
                          static_cast<int>(keys),
                          static_cast<int>(query_blocks),
                          static_cast<int>(key_blocks),
                          args.window_left >= 0 || args.window_right >= 0};
    append<Row, lanes, whole><<<static_cast<unsigned>(blocks), append_threads, 0, stream>>>(args, grid);
    return launched();
}

template <class Row, bool whole>
inline catalog_status launch_append(const catalog_args& args, cudaStream_t stream) {
    const std::int64_t hdim = std::max(args.hdim_q, args.hdim_v);
    if (hdim <= 64) return launch_append<Row, 4, whole>(args, stream);
    if (hdim <= 128) return launch_append<Row, 8, whole>(args, stream);
    if constexpr (std::max(Row::hdim_q, Row::hdim_v) > 256)
        if (hdim > 256) return launch_append<Row, 32, whole>(args, stream);
    return launch_append<Row, 16, whole>(args, stream);
}

template <class Row>
inline std::int32_t launch_fmha_fwd_appendkv(const catalog_args* args, cudaStream_t stream) noexcept {
    if (const catalog_status status = check_abi(args); status != CATALOG_OK) return status;
    if (!valid_append<Row>(*args)) return CATALOG_BAD_ARGUMENT;
    if constexpr (Row::rope != Rope::none)
        if (!angles_are_whole<Row>(*args)) return launch_append<Row, false>(*args, stream);
    return launch_append<Row, true>(*args, stream);
}

template <class Row>
inline constexpr Block block_of{append_threads, 0};

}  // namespace catalog::cuda
