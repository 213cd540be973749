// Dropout of the rows of a block.
#pragma once

#include "cuda/common/dropout.hpp"
#include "mma_shape.hpp"
#include "mma_work.hpp"

namespace catalog::cuda {

// The number of a row's head among those of all sequences.
template <class Row, bool partial>
__device__ __forceinline__ int instance_of(const catalog_args& args, const MmaWork<Row, partial>& work,
                                           const QueryRow& at) {
    return work.seq.index * static_cast<int>(args.nhead_q) + work.head_of(at);
}

// Weights that are dropped become 0. `key`: the first of `keys`.
template <class Row, bool partial, int atoms, int columns>
__device__ __forceinline__ void drop(const catalog_args& args, const MmaWork<Row, partial>& work,
                                     const MmaThread<Row>& thread, int key, float (&weights)[atoms][columns][4]) {
    const Dropout dropout = dropout_of(args);
#pragma unroll
    for (int m = 0; m < atoms; ++m)
        drop_weights<8 * columns>(reinterpret_cast<float(&)[4 * columns]>(weights[m]), key, [&](int half, int first) {
            const QueryRow at = work.row_at(thread.row(m, half));
            return dropout.kept(instance_of(args, work, at), at.query, first);
        });
}

// The random bytes of all keys, seen or not; each warp for its rows.
template <class Row, bool partial>
__device__ __forceinline__ void store_random_bytes(const catalog_args& args, const MmaWork<Row, partial>& work,
                                                   const MmaThread<Row>& thread) {
    if (thread.warp_n > 0) return;
    const Dropout dropout = dropout_of(args);
    const int first = thread.warp_m * MmaShape<Row>::rows, end = min(first + MmaShape<Row>::rows, work.rows);
    for (int row = first; row < end; ++row) {
        const QueryRow at = work.row_at(row);
        auto* const bytes = work.template element_of<std::uint8_t>(args.randval, at);
        for (int key = thread.lane * philox_keys; key < work.seq.seqlen_k; key += 32 * philox_keys)
            dropout.store(bytes, instance_of(args, work, at), at.query, key, work.seq.seqlen_k);
    }
}

}  // namespace catalog::cuda
