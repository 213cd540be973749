// Factors of keys and values where every head of every page has its own (kv_blockscale), or of every block of keys of a
// sequence (blockscale). They are copied with a tile of keys and lie behind it in shared memory: a number for each key, then
// for each value.
//
// Scores are multiplied by the factors of keys. Weights are multiplied by those of values relative to the largest factor so
// far, so that they still fit fp16; O is in units of that factor.
#pragma once

#include "mma_shape.hpp"

namespace catalog::cuda {

template <class Row>
class KeyFactors {
    using Shape = MmaShape<Row>;
    static constexpr int atoms = Shape::atoms, keys = Shape::keys;

   public:
    using Tile = float[atoms][keys / 8][4];

    // Starts to copy the factors of the keys that a warp copies, from `key` on, to the tile at `k`, where `first` is the
    // number of the first one. Keys from `end` on have none.
    template <class Work>
    static __device__ __forceinline__ void copy(const catalog_args& args, const Work& work, std::uint32_t k, int first,
                                                int key, int end, const Places<Row, Shape::copied>& places) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
        for (int i = 0; i < places.count; ++i) {
            const int row = 32 * i + lane;
            if (row >= Shape::copied) break;
            const bool exists = Row::paged_kv ? places.page[i] >= 0 : key + row < end;
            const int batch = Row::paged_kv ? max(places.page[i], 0) : work.seq.index;
            const int block = Row::paged_kv || !exists ? 0 : work.grid.page_size.quotient(key + row);
            const std::uint32_t target = k + Shape::k_bytes + (first + row) * sizeof(float);
            copy_async_word(target, factor_of(args.k_descale, batch, work.head_k, block), exists);
            copy_async_word(target + keys * sizeof(float), factor_of(args.v_descale, batch, work.head_k, block), exists);
        }
    }

    static __device__ __forceinline__ void multiply_scores(Tile& s, std::uint32_t k) { multiply(s, k, 0, 1.0f); }

    // Makes the unit of O at least as large as the factors of these values: what O is to be multiplied with.
    __device__ __forceinline__ float find_unit(std::uint32_t k) {
        float largest = 0.0f;
#pragma unroll
        for (int n = 0; n < keys / 8; ++n) {
            const float2 of_two = read(k, keys + LaneKeys<Row>::offset(n));
            largest = fmaxf(largest, fmaxf(fabsf(of_two.x), fabsf(of_two.y)));
        }
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 2));
        if (!(largest > unit)) return 1.0f;
        const float change = unit / largest;
        unit = largest;
        return change;
    }

    __device__ __forceinline__ void multiply_weights(Tile& weights, std::uint32_t k) const {
        multiply(weights, k, keys, 1.0f / unit);
    }

    // O is in units of this, which is at least as large as the factors of all values so far.
    float unit = 0x1p-100f;

   private:
    // `batch`: a page, or a sequence, whose blocks of keys have factors.
    static __device__ __forceinline__ const float* factor_of(const catalog_tensor& factors, int batch, int head,
                                                             int block) {
        const std::int64_t offset = batch * factors.stride_batch + head * factors.stride_nhead;
        return static_cast<const float*>(factors.data) + offset + (Row::paged_kv ? 0 : block * factors.stride_seqlen);
    }

    // Of the lane's two keys; `first`: their number but for the lane's part.
    static __device__ __forceinline__ float2 read(std::uint32_t k, int first) {
        const int number = first + LaneKeys<Row>::first(static_cast<int>(threadIdx.x));
        float2 of_two;
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                     : "=f"(of_two.x), "=f"(of_two.y)
                     : "r"(k + Shape::k_bytes + number * static_cast<int>(sizeof(float)))
                     : "memory");
        return of_two;
    }

    static __device__ __forceinline__ void multiply(Tile& s, std::uint32_t k, int first, float by) {
#pragma unroll
        for (int n = 0; n < keys / 8; ++n) {
            const float2 of_two = read(k, first + LaneKeys<Row>::offset(n));
            const float of_key[2] = {of_two.x * by, of_two.y * by};
#pragma unroll
            for (int m = 0; m < atoms; ++m)
#pragma unroll
                for (int c = 0; c < 4; ++c) s[m][n][c] *= of_key[c % 2];
        }
    }
};

}  // namespace catalog::cuda
