// Rotary embedding (RoPE) of a row, by the lanes that share it: each has two pieces of 8 elements.
#pragma once

#include <cstdint>

#include "cuda/common/call.hpp"
#include "cuda/common/eight.hpp"
#include "cuda/hopper.hpp"

namespace catalog::cuda {

// Whether element 2 i + 1 rotates with element 2 i; otherwise element i + rotary_dim / 2 rotates with i.
template <class Row>
inline constexpr bool neighbours_rotate = Row::rope == Rope::inter;

// The first elements of a lane's pieces. `whole`: of each piece all elements rotate or none, and with those of the
// lane's other piece where neighbours do not; see angles_are_whole.
template <class Row, int lanes, bool whole>
struct LanePieces {
    int element[2];

    __device__ __forceinline__ explicit LanePieces(const catalog_args& args) {
        const bool pairs = whole && Row::rope == Rope::half;
        const int lane = threadIdx.x % lanes, paired = pairs ? static_cast<int>(args.rotary_dim) / 16 : 0;
        element[0] = 8 * (lane < paired ? lane : lane + paired);
        element[1] = 8 * (lane < paired ? lane + paired : lane + lanes);
    }
};

// A lane's pieces of a row. Reading and rotating are apart, so that several rows are in flight.
template <class Row, int lanes, bool whole>
class RotaryRow {
    using T = QueryElement<Row>;
    using Pieces = LanePieces<Row, lanes, whole>;

   public:
    // `position`: row of the angles; not read where nothing rotates. `row` may be written later, so it is read as memory
    // that changes.
    __device__ __forceinline__ void read(const catalog_args& args, const Pieces& pieces, const T* row, int position) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (pieces.element[i] < args.hdim_q)
                piece[i].bits = read_eight(row + pieces.element[i], args.hdim_q - pieces.element[i]);
        if constexpr (Row::rope != Rope::none) {
            const int rotated = static_cast<int>(args.rotary_dim);
            const T* cosines = static_cast<const T*>(args.rotary_cos.data) + position * args.rotary_cos.stride_seqlen;
            const T* sines = static_cast<const T*>(args.rotary_sin.data) + position * args.rotary_sin.stride_seqlen;
            if constexpr (!whole) {
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    if (pieces.element[i] < rotated)
                        rotate_by_element(piece[i], row, pieces.element[i], rotated, cosines, sines);
            } else if constexpr (neighbours_rotate<Row>) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    if (pieces.element[i] >= rotated) continue;
                    cosine.half[i] = __ldg(reinterpret_cast<const FourBits<T>*>(cosines + pieces.element[i] / 2));
                    sine.half[i] = __ldg(reinterpret_cast<const FourBits<T>*>(sines + pieces.element[i] / 2));
                }
            } else if (pieces.element[0] < rotated) {
                cosine.bits = load_eight(cosines + pieces.element[0]);
                sine.bits = load_eight(sines + pieces.element[0]);
            }
        }
    }

    // To be called once, after read().
    __device__ __forceinline__ void rotate(const catalog_args& args, const Pieces& pieces) {
        if constexpr (Row::rope != Rope::none && whole) {
            const int rotated = static_cast<int>(args.rotary_dim);
            if constexpr (neighbours_rotate<Row>) {
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    if (pieces.element[i] < rotated)
#pragma unroll
                        for (int j = 0; j < 4; ++j)
                            rotate(piece[i].element[2 * j], piece[i].element[2 * j + 1], cosine.element[4 * i + j],
                                   sine.element[4 * i + j]);
            } else if (pieces.element[0] < rotated) {
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    rotate(piece[0].element[j], piece[1].element[j], cosine.element[j], sine.element[j]);
            }
        }
    }

    Eight<T> piece[2];

   private:
    static __device__ __forceinline__ void rotate(T& first, T& second, T cosine, T sine) {
        const float x = static_cast<float>(first), y = static_cast<float>(second);
        const float c = static_cast<float>(cosine), s = static_cast<float>(sine);
        first = static_cast<T>(fmaf(x, c, -y * s));
        second = static_cast<T>(fmaf(y, c, x * s));
    }

    // Elements `first` to first + 7.
    static __device__ __forceinline__ void rotate_by_element(Eight<T>& piece, const T* row, int first, int rotated,
                                                             const T* cosines, const T* sines) {
        const int half = rotated / 2;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int element = first + j;
            if (element >= rotated) continue;
            const bool second = neighbours_rotate<Row> ? j % 2 : element >= half;
            const int angle = neighbours_rotate<Row> ? element / 2 : second ? element - half : element;
            const T other = row[neighbours_rotate<Row> ? element ^ 1 : second ? element - half : element + half];
            T one = second ? other : piece.element[j], two = second ? piece.element[j] : other;
            rotate(one, two, cosines[angle], sines[angle]);
            piece.element[j] = second ? two : one;
        }
    }

    Eight<T> cosine, sine;  // of neighbours: a half for each piece
};

// Whether of every 8 elements all rotate or none, with angles that can be read at once.
template <class Row>
inline bool angles_are_whole(const catalog_args& args) {
    constexpr std::int64_t elements = neighbours_rotate<Row> ? 4 : 8;
    const auto aligned = [&](const catalog_tensor& table) {
        return reinterpret_cast<std::uintptr_t>(table.data) % (sizeof(QueryElement<Row>) * elements) == 0 &&
               (args.seqlen_k <= 1 || table.stride_seqlen % elements == 0);
    };
    return args.rotary_dim % (2 * elements) == 0 && aligned(args.rotary_cos) && aligned(args.rotary_sin);
}

}  // namespace catalog::cuda
