// Rotary embedding (RoPE) of a row, by the lanes that share it: each has 8 elements.
#pragma once

#include <cstdint>

#include "cuda/common/call.hpp"
#include "cuda/common/eight.hpp"
#include "cuda/hopper.hpp"

namespace catalog::cuda {

// A lane's part of a row: elements first to first + 7. Reading and rotating are apart, so that several rows are in
// flight. `whole`: elements that rotate come in whole parts, and so do their angles; see angles_are_whole.
template <class Row, bool whole>
class RotaryPart {
    using T = typename Row::dtype;
    // Whether element 2 i + 1 rotates with element 2 i; otherwise i + half rotates with i.
    static constexpr bool neighbours = Row::rope == Rope::inter;
    static constexpr int angles = neighbours ? 4 : 8;

   public:
    // `position`: row of the angles; not read where nothing rotates.
    __device__ __forceinline__ void read(const catalog_args& args, const T* row, int first, int position) {
        own.bits = *reinterpret_cast<const uint4*>(row + first);
        if constexpr (Row::rope != Rope::none) {
            const int rotated = static_cast<int>(args.rotary_dim), half = rotated / 2;
            if (first >= rotated) return;
            const int angle = neighbours ? first / 2 : first < half ? first : first - half;
            const T* cosines = angles_at(args.rotary_cos, position);
            const T* sines = angles_at(args.rotary_sin, position);
            if constexpr (whole) {
                read_angles(cosines + angle, cosine);
                read_angles(sines + angle, sine);
                if constexpr (!neighbours)
                    other.bits = *reinterpret_cast<const uint4*>(row + (first < half ? first + half : first - half));
            } else {
#pragma unroll
                for (int i = 0; i < angles; ++i) {
                    const int element = neighbours ? first + 2 * i : first + i;
                    if (element >= rotated) continue;
                    const int place = neighbours ? element / 2 : element < half ? element : element - half;
                    cosine.element[i] = cosines[place];
                    sine.element[i] = sines[place];
                    if constexpr (!neighbours) other.element[i] = row[element < half ? element + half : element - half];
                }
            }
        }
    }

    // The part, rotated.
    __device__ __forceinline__ uint4 rotated(const catalog_args& args, int first) const {
        if constexpr (Row::rope == Rope::none) return own.bits;
        const int rotated = static_cast<int>(args.rotary_dim), half = rotated / 2;
        if (first >= rotated) return own.bits;
        float result[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int angle = neighbours ? i / 2 : i;
            const bool second = neighbours ? i % 2 : first + i >= half;
            const float x = static_cast<float>(own.element[i]);
            const float y = static_cast<float>(neighbours ? own.element[i ^ 1] : other.element[i]);
            const float turned = y * static_cast<float>(sine.element[angle]);
            const float sum = fmaf(x, static_cast<float>(cosine.element[angle]), second ? turned : -turned);
            result[i] = whole || first + i < rotated ? sum : x;
        }
        return make_uint4(pack<T>(result[0], result[1]), pack<T>(result[2], result[3]), pack<T>(result[4], result[5]),
                          pack<T>(result[6], result[7]));
    }

   private:
    static __device__ __forceinline__ const T* angles_at(const catalog_tensor& table, int position) {
        return static_cast<const T*>(table.data) + position * table.stride_seqlen;
    }

    static __device__ __forceinline__ void read_angles(const T* from, Eight<T>& to) {
        if constexpr (neighbours) {
            const uint2 four = __ldg(reinterpret_cast<const uint2*>(from));
            to.bits = make_uint4(four.x, four.y, 0, 0);
        } else {
            to.bits = load_eight(from);
        }
    }

    Eight<T> own, other, cosine, sine;  // `other`: the elements that rotate with those of the part
};

// Whether of every 8 elements all rotate or none, with angles that can be read at once.
template <class Row>
inline bool angles_are_whole(const catalog_args& args) {
    constexpr std::int64_t elements = Row::rope == Rope::inter ? 4 : 8;
    const auto aligned = [&](const catalog_tensor& table) {
        return reinterpret_cast<std::uintptr_t>(table.data) % (2 * elements) == 0 &&
               (args.seqlen_k <= 1 || table.stride_seqlen % elements == 0);
    };
    return args.rotary_dim % (2 * elements) == 0 && aligned(args.rotary_cos) && aligned(args.rotary_sin);
}

}  // namespace catalog::cuda
