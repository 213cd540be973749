// Rows of K or V on their way into shared memory, copied by single warps: from dense tensors, or from pages of a cache.
#pragma once

#include <numeric>

#include "cuda/mma.hpp"
#include "cuda/common/matrix_rows.hpp"
#include "cuda/common/sequence.hpp"

namespace catalog::cuda {

// The places of `rows` rows of a paged cache: lane i holds those of rows i, i + 32, ...
template <class Row, int rows>
struct Places {
    static constexpr int count = (rows + 31) / 32;
    int page[count], slot[count];  // page -1: there is no such row

    __device__ __forceinline__ void find(const catalog_args& args, const Divisor& page_size, int sequence,
                                         int first_key, int end) {
        const PageTable<Row> table(args, sequence);
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const int row = 32 * i + static_cast<int>(threadIdx.x % 32), key = first_key + row;
            page[i] = -1;
            slot[i] = 0;
            if (row < rows && key < end) {
                const int index = page_size.quotient(key);
                const int number = table[index];
                slot[i] = key - index * static_cast<int>(page_size.divisor);
                if (0 <= number && number < args.num_pages) page[i] = number;
            }
        }
    }
};

// Distances in bytes: of neighbouring rows (of one page), of the rows that a lane copies, of tiles. The host computes
// them, and so the kernel needs no registers for them.
struct KvSteps {
    std::int64_t row, turn, tile;
};

// Copies, tile after tile, the rows of one of the `warps` warps that share this: `rows` each. A lane has pieces of rows
// `turn_rows` apart; which, repeats after `period` steps.
template <class Row, int hdim, int rows, int warps, bool padded, int panel_rows>
class KvCopy {
    using T = typename Row::dtype;
    static constexpr int row_bytes = hdim * sizeof(T), pieces = row_bytes / 16, in_piece = 16 / sizeof(T);
    static constexpr int period = pieces / std::gcd(pieces, 32), turn_rows = 32 * period / pieces;
    static_assert(row_bytes % 64 == 0 && rows % turn_rows == 0);
    // A turn changes the permutation of pieces by a constant.
    static_assert(row_bytes % 128 == 0 ? rows % 8 == 0 || 8 % rows == 0 : turn_rows % 8 == 0);

    // The first of a lane's pieces. For `zero` see zero_of.
    struct Piece {
        int row, row_of_warp, piece;
        bool exists;

        __device__ __forceinline__ Piece(int part, std::int64_t hdim_stored, int zero) {
            const int thread = static_cast<int>(threadIdx.x) + zero, number = 32 * part + thread % 32;
            row_of_warp = number / pieces;
            row = thread / 32 % warps * rows + row_of_warp;
            piece = number % pieces;
            exists = !padded || piece * in_piece < hdim_stored;
        }

        // `rows_before` rows further on.
        __device__ __forceinline__ std::uint32_t target(std::uint32_t tile, int rows_before) const {
            return ((tile + piece_offset<row_bytes, panel_rows>(row, piece)) ^ (rows_before % 8 << 4)) +
                   rows_before * (panel_rows > 0 ? 128 : row_bytes);
        }
    };

   public:
    static __host__ KvSteps steps_of(const catalog_args&, const catalog_tensor& tensor) {
        const std::int64_t row = tensor.stride_seqlen * sizeof(T);
        return {row, row * turn_rows, row * Row::tile_n0};
    }

    __device__ __forceinline__ KvCopy(const catalog_tensor& tensor, const KvSteps& steps, std::int64_t hdim_stored,
                                      const Sequence& seq, int head)
        : tensor(tensor), steps(steps), hdim_stored(hdim_stored) {
        restart(seq, head);
    }

    // To the first key of a sequence.
    __device__ __forceinline__ void restart(const Sequence& seq, int head) {
        const auto* start = rows_of<const T>(tensor, Row::paged_kv ? 0 : seq.batch, head, seq.first_k);
#pragma unroll
        for (int part = 0; part < period; ++part) {
            const Piece first(part, hdim_stored, 0);
            source[part] = reinterpret_cast<const char*>(start + first.piece * in_piece) +
                           (Row::paged_kv ? 0 : first.row * steps.row);
        }
    }

    __device__ __forceinline__ void skip(int keys) {
        if constexpr (!Row::paged_kv)
#pragma unroll
            for (int part = 0; part < period; ++part) source[part] += keys * steps.row;
    }

    // To `tile`. `left`: keys that there are from the tile's first on; the others are zeros.
    __device__ __forceinline__ void copy(std::uint32_t tile, int left, int zero) {
#pragma unroll
        for (int part = 0; part < period; ++part) {
            const Piece first(part, hdim_stored, zero);
            const int rows_left = first.exists ? left - first.row : 0;
            const char* from = source[part];
#pragma unroll
            for (int row = 0; row < rows; row += turn_rows, from += steps.turn)
                copy_async(first.target(tile, row), from, row < rows_left);
            source[part] += steps.tile;
        }
    }

    __device__ __forceinline__ void copy(std::uint32_t tile, const Places<Row, rows>& places, int zero) const {
        const std::int64_t page_bytes = tensor.stride_batch * sizeof(T);
        std::int64_t offset[Places<Row, rows>::count];
        std::uint32_t exist[Places<Row, rows>::count];
#pragma unroll
        for (int i = 0; i < Places<Row, rows>::count; ++i) {
            offset[i] = places.page[i] * page_bytes + places.slot[i] * steps.row;
            exist[i] = __ballot_sync(0xffffffff, places.page[i] >= 0);
        }
#pragma unroll
        for (int part = 0; part < period; ++part) {
            const Piece first(part, hdim_stored, zero);
#pragma unroll
            for (int row = 0; row < rows; row += turn_rows) {
                const std::uint32_t exists = first.exists ? exist[row / 32] >> first.row_of_warp : 0;
                const std::int64_t place = __shfl_sync(0xffffffff, offset[row / 32], first.row_of_warp + row % 32);
                copy_async(first.target(tile, row), source[part] + place, exists & 1u << row % 32);
            }
        }
    }

   private:
    const catalog_tensor& tensor;
    const KvSteps& steps;
    const std::int64_t hdim_stored;
    const char* source[period];
};

}  // namespace catalog::cuda
