// The argument structs of CK Tile's FMHA launchers, filled from ours.
//
// CK's structs differ between families and revisions in which fields they have, hardly in what a field means. So there
// is one list of fields, and a struct gets those that it has.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>
#include <variant>

#include "operation/workspace.hpp"

namespace catalog::ck {

// What a row's traits say about the meaning of fields.
struct Traits {
    bool alibi, masked, descaled, deterministic;
    std::int64_t tile_n0;
    Uses uses;
};

template <class Args>
class Filler {
   public:
    explicit Filler(Args& args) : args(args) {}

    // assign(to) stores into a field; left out where naming the field does not compile.
    template <class Assign>
    void operator()(Assign assign) {
        if constexpr (std::is_invocable_v<Assign, Args&, Filler&>) assign(args, *this);
    }

    template <class To, class From>
    void store(To& to, From from) {
        if constexpr (std::is_integral_v<To> && !std::is_same_v<To, bool> && std::is_integral_v<From>)
            fits = fits && from >= std::numeric_limits<To>::min() && from <= std::numeric_limits<To>::max();
        to = static_cast<To>(from);
    }

    bool fits = true;  // whether every number fits its field: CK's strides have 32 bits

   private:
    Args& args;
};

#define CATALOG_CK_FIELD(field, value) \
    fill([&](auto& to, auto& filler) -> decltype(void(to.field)) { filler.store(to.field, value); })

// The four names that a tensor's fields have in CK's structs.
#define CATALOG_CK_STRIDES(name, tensor)                             \
    CATALOG_CK_FIELD(stride_##name, (tensor).stride_seqlen);         \
    CATALOG_CK_FIELD(nhead_stride_##name, (tensor).stride_nhead);    \
    CATALOG_CK_FIELD(batch_stride_##name, (tensor).stride_batch);    \
    CATALOG_CK_FIELD(split_stride_##name, (tensor).stride_split)

#define CATALOG_CK_TENSOR(name, tensor)               \
    CATALOG_CK_FIELD(name##_ptr, (tensor).data);      \
    CATALOG_CK_STRIDES(name, tensor)

// CK's mask_enum: none, from the top left, from the bottom right.
inline int mask_type(const catalog_args& args, const Traits& row) {
    if (!row.masked) return 0;
    return args.mask_corner == CATALOG_TOP_LEFT ? 1 : 2;
}

// False: a stride or an extent does not fit CK's struct.
template <class Args>
inline bool fill_arguments(const catalog_args& from, const Traits& row, Args& args) {
    Filler<Args> fill(args);
    CATALOG_CK_TENSOR(q, from.q);
    CATALOG_CK_TENSOR(k, from.k);
    CATALOG_CK_TENSOR(v, from.v);
    CATALOG_CK_TENSOR(o, from.o);
    CATALOG_CK_TENSOR(lse, from.lse);
    CATALOG_CK_TENSOR(o_acc, from.o_acc);
    CATALOG_CK_TENSOR(lse_acc, from.lse_acc);
    CATALOG_CK_TENSOR(knew, from.k_new);
    CATALOG_CK_TENSOR(vnew, from.v_new);
    CATALOG_CK_TENSOR(do, from.grad_o);
    CATALOG_CK_TENSOR(dq, from.dq);
    CATALOG_CK_TENSOR(dk, from.dk);
    CATALOG_CK_TENSOR(dv, from.dv);
    CATALOG_CK_TENSOR(dbias, from.dbias);
    CATALOG_CK_TENSOR(dq_acc, from.dq_acc);
    CATALOG_CK_FIELD(workspace_ptr, from.dq_acc.data);  // of a layout of CK's own
    CATALOG_CK_FIELD(rand_val_ptr, from.randval.data);
    CATALOG_CK_STRIDES(randval, from.randval);
    CATALOG_CK_FIELD(s_randval, from.randval.data != nullptr);
    CATALOG_CK_FIELD(d_ptr, from.delta.data);  // laid out as LSE is
    CATALOG_CK_FIELD(nhead_stride_lsed, from.lse.stride_nhead);
    CATALOG_CK_FIELD(batch_stride_lsed, from.lse.stride_batch);

    // ALiBi's slopes take the place of the bias, and their batch stride that of its rows.
    CATALOG_CK_TENSOR(bias, from.bias);
    if (row.alibi) {
        CATALOG_CK_FIELD(bias_ptr, from.alibi_slopes.data);
        CATALOG_CK_FIELD(stride_bias, from.alibi_slopes.stride_batch);
    }

    CATALOG_CK_FIELD(seqstart_q_ptr, from.seqstart_q);
    CATALOG_CK_FIELD(seqstart_k_ptr, from.seqstart_k);
    CATALOG_CK_FIELD(seqlen_q_ptr, from.seqlens_q.data);
    CATALOG_CK_FIELD(seqlen_k_ptr, from.seqlens_k.data);
    CATALOG_CK_FIELD(sink_ptr, from.sink.data);
    CATALOG_CK_FIELD(block_table_ptr, from.block_table.data);
    CATALOG_CK_FIELD(batch_stride_block_table, from.block_table.stride_batch);
    CATALOG_CK_FIELD(page_block_size, from.page_size);
    CATALOG_CK_FIELD(num_total_pages, from.num_pages);
    CATALOG_CK_FIELD(kv_indptr, from.kv_indptr.data);
    CATALOG_CK_FIELD(kv_page_indices, from.kv_page_indices.data);
    CATALOG_CK_FIELD(kv_last_page_lens, from.kv_last_page_lens.data);
    CATALOG_CK_FIELD(rotary_cos_ptr, from.rotary_cos.data);
    CATALOG_CK_FIELD(rotary_sin_ptr, from.rotary_sin.data);
    CATALOG_CK_FIELD(rotary_dim, from.rotary_dim);
    CATALOG_CK_FIELD(has_mask, row.masked);

    CATALOG_CK_FIELD(batch, from.batch);
    CATALOG_CK_FIELD(nhead_q, from.nhead_q);
    CATALOG_CK_FIELD(nhead_k, from.nhead_k);
    CATALOG_CK_FIELD(seqlen_q, from.seqlen_q);
    CATALOG_CK_FIELD(seqlen_k, from.seqlen_k);
    CATALOG_CK_FIELD(seqlen_knew, from.seqlen_new);
    CATALOG_CK_FIELD(max_seqlen_q, from.seqlen_q);
    CATALOG_CK_FIELD(max_seqlen_k, from.seqlen_k);
    CATALOG_CK_FIELD(hdim_q, from.hdim_q);
    CATALOG_CK_FIELD(hdim_v, from.hdim_v);
    CATALOG_CK_FIELD(num_splits, from.num_splits);
    CATALOG_CK_FIELD(min_seqlen_q, from.min_seqlen_q);

    CATALOG_CK_FIELD(window_size_left, from.window_left);
    CATALOG_CK_FIELD(window_size_right, from.window_right);
    CATALOG_CK_FIELD(sink_size, from.sink_size);
    CATALOG_CK_FIELD(mask_type, mask_type(from, row));

    CATALOG_CK_FIELD(scale_s, from.scale);
    CATALOG_CK_FIELD(scale, from.scale);
    CATALOG_CK_FIELD(scale_p, 1.0f);
    CATALOG_CK_FIELD(scale_o, 1.0f);
    CATALOG_CK_FIELD(logits_soft_cap, from.logits_soft_cap);
    CATALOG_CK_FIELD(q_descale_ptr, from.q_descale.data);
    CATALOG_CK_FIELD(k_descale_ptr, from.k_descale.data);
    CATALOG_CK_FIELD(v_descale_ptr, from.v_descale.data);
    CATALOG_CK_FIELD(block_scale_size_q, from.block_scale_size_q);
    CATALOG_CK_FIELD(block_scale_size_kv, from.block_scale_size_kv);

    CATALOG_CK_FIELD(p_drop, from.p_drop);
    CATALOG_CK_FIELD(p_undrop, 1.0f / (1.0f - from.p_drop));
    using Numbers = std::pair<std::uint64_t, std::uint64_t>;
    using Pointers = std::pair<const void*, const void*>;
    const auto* state = static_cast<const std::uint64_t*>(from.rng_state.data);
    CATALOG_CK_FIELD(drop_seed_offset, state ? (std::variant<Numbers, Pointers>(Pointers(state, state + 1)))
                                             : (std::variant<Numbers, Pointers>(Numbers(0, 0))));
    return fill.fits;
}

template <class Args, class = void>
inline constexpr bool has_own_workspace = false;
template <class Args>
inline constexpr bool has_own_workspace<Args, std::void_t<decltype(std::declval<Args>().workspace_ptr)>> = true;

template <class Args, class = void>
inline constexpr bool reads_descale = false;
template <class Args>
inline constexpr bool reads_descale<Args, std::void_t<decltype(std::declval<Args>().q_descale_ptr)>> = true;

}  // namespace catalog::ck
