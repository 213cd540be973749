// The launch of multi-head latent attention: by which kernel.
#pragma once

#include "attend_latent.hpp"
#include "attend_latent_tma.hpp"

namespace catalog::cuda {

// Whether V is the beginning of K, element by element.
inline bool values_begin_keys(const catalog_args& args) {
    const catalog_tensor &k = args.k, &v = args.v;
    return k.data == v.data && k.stride_batch == v.stride_batch && k.stride_nhead == v.stride_nhead &&
           k.stride_seqlen == v.stride_seqlen;
}

// False: TMA cannot load the tiles. The swizzled rows of a part begin with a group of eight.
template <class Row>
inline bool find_latent_keys(const catalog_args& args, LatentKeys& keys) {
    using T = typename Row::dtype;
    if (!has_keys(args)) return false;
    keys.strides = key_strides<Row>(args, args.k, args.hdim_q);
    keys.steps = steps_of(keys.strides);
    keys.part_rows = rows_of_part<Row>(args);
    return keys.part_rows % 8 == 0 && valid_steps(keys.strides) &&
           make_ragged_map<T>(keys.map, args.k.data, keys.strides.seqlen, args.hdim_q, panel_columns, keys.part_rows);
}

template <class Row, bool partial>
inline catalog_status launch_attend_latent(const catalog_args& args, cudaStream_t stream) {
    using Shape = LatentShape<Row>;
    if (!values_begin_keys(args))
        return launch_work<Row, partial, Shape>(args, attend_latent<Row, partial, false>, stream);
    if (LatentKeys keys; find_latent_keys<Row>(args, keys))
        return launch_work<Row, partial, LatentTmaShape<Row>>(args, attend_latent_tma<Row, partial>, stream, keys);
    return launch_work<Row, partial, Shape>(args, attend_latent<Row, partial, true>, stream);
}

// Of the kernel that copies: it has the most registers, for which occupancy is computed, and the most shared memory.
template <class Row>
inline constexpr Block block_of{LatentShape<Row>::threads, LatentShape<Row>::shared_bytes};

}  // namespace catalog::cuda
