/* The arguments of attention kernels. Generated from the operation's list of fields; do not edit. */
#ifndef CATALOG_ARGS_H
#define CATALOG_ARGS_H

#include <stdint.h>

typedef struct catalog_tensor {
    void* data;
    int64_t stride_batch; /* of a paged cache: between pages; 0 in group mode, where tokens of all sequences follow */
    int64_t stride_nhead;
    int64_t stride_seqlen;
    int64_t stride_split; /* between the partial results of splits */
} catalog_tensor;

enum catalog_mask_corner {
    CATALOG_TOP_LEFT = 0, /* query i and key i are aligned */
    CATALOG_BOTTOM_RIGHT = 1, /* the last query and the last key are aligned */
};

typedef struct catalog_args {
    uint32_t struct_bytes; /* sizeof(catalog_args) as the caller compiled it */
    uint32_t abi_version; /* CATALOG_ABI_VERSION */

    /* Attention. In group mode (tokens, nhead, hdim) stands for (batch, seqlen, nhead, hdim). */
    catalog_tensor q; /* (batch, nhead_q, seqlen_q, hdim_q) */
    catalog_tensor k; /* (batch, nhead_k, seqlen_k, hdim_q), or a paged cache: see below */
    catalog_tensor v; /* (batch, nhead_k, seqlen_k, hdim_v), or a paged cache */
    catalog_tensor o; /* (batch, nhead_q, seqlen_q, hdim_v) */
    catalog_tensor lse; /* float32, natural logarithm, (batch, nhead_q, seqlen_q) or (nhead_q, tokens_q) */
    /* (batch, nhead_q, seqlen_q, seqlen_k), group: (nhead_q, tokens_q, seqlen_k); of the type of Q, float32 where
     * that has 8 bits */
    catalog_tensor bias;
    catalog_tensor alibi_slopes; /* float32, (batch, nhead_q) */
    /* uint8, (batch, nhead_q, blocks of seqlen_q, blocks of seqlen_k); 0: nobody sees the block */
    catalog_tensor block_mask;
    catalog_tensor sink; /* float32, (nhead_q): one more logit a row, without a value; NULL: none */
    catalog_tensor randval; /* uint8, like bias; the random byte of every weight; NULL: not wanted */
    catalog_tensor rng_state; /* uint64, (2): seed and offset of the dropout; NULL: zeros */
    catalog_tensor q_descale; /* float32; per tensor: (1); blocks: (batch, nhead_q, blocks of seqlen_q) */
    /* float32; per tensor: (1); blocks: (batch, nhead_k, blocks of seqlen_k); or (num_pages, nhead_k) */
    catalog_tensor k_descale;
    catalog_tensor v_descale; /* like k_descale */
    catalog_tensor seqlens_q; /* int32, (batch): real tokens of each sequence; NULL: all that are stored */
    catalog_tensor seqlens_k; /* like seqlens_q */

    /* Paged cache: K and V are (num_pages, page_size, nhead_k, hdim); vectorized, with x elements in 16 bytes, K
     * (num_pages, nhead_k, hdim_q / x, page_size, x) and V (num_pages, nhead_k, page_size / x, hdim_v, x). */
    catalog_tensor block_table; /* int32, (batch, pages_per_sequence) */
    catalog_tensor kv_indptr; /* int32, (batch + 1): where each sequence's pages start in kv_page_indices */
    catalog_tensor kv_page_indices; /* int32, (num_page_indices) */
    catalog_tensor kv_last_page_lens; /* int32, (batch): tokens of each sequence's last page */

    /* Appending to a cache; seqlens_k counts the tokens before. */
    catalog_tensor k_new; /* (batch, nhead_k, seqlen_new, hdim_q) */
    catalog_tensor v_new; /* (batch, nhead_k, seqlen_new, hdim_v) */
    catalog_tensor rotary_cos; /* (seqlen_k, rotary_dim / 2), of the type of Q */
    catalog_tensor rotary_sin; /* like rotary_cos */
    catalog_tensor q_out; /* rotated Q, like Q */

    /* Backward. */
    catalog_tensor grad_o; /* like O */
    catalog_tensor dq; /* like Q */
    catalog_tensor dk; /* like K */
    catalog_tensor dv; /* like V */
    catalog_tensor dbias; /* (batch, nhead_q, seqlen_q, seqlen_k), group: (nhead_q, tokens_q, seqlen_k); zeroed */
    catalog_tensor dlse; /* gradient of LSE, like it; NULL: none, and so where LSE is -infinity */

    /* Workspaces between stages, float32, at least as large as catalog_workspace_size says. */
    catalog_tensor o_acc; /* O of each split: (num_splits, batch, nhead_q, seqlen_q, hdim_v) */
    catalog_tensor lse_acc; /* (num_splits, batch, nhead_q, seqlen_q), or (num_splits, nhead_q, tokens_q) */
    catalog_tensor delta; /* sum of dO * O of each row, like lse */
    catalog_tensor dq_acc; /* dQ of each split of the keys: (num_splits, batch, nhead_q, seqlen_q, hdim_q) */

    const int32_t* seqstart_q; /* group mode: batch + 1 first tokens, the last one is tokens_q; batch mode: NULL */
    const int32_t* seqstart_k; /* NULL where K is paged */

    int64_t batch;
    int64_t nhead_q;
    int64_t nhead_k; /* divides nhead_q: query head h reads key head h / (nhead_q / nhead_k) */
    int64_t seqlen_q; /* group mode: no sequence has more queries */
    int64_t seqlen_k; /* paged: no sequence has more keys */
    int64_t hdim_q;
    int64_t hdim_v;
    int64_t window_left; /* keys visible to the left of the diagonal; -1: all, which a causal kernel insists on */
    int64_t window_right; /* keys visible to the right of the diagonal; -1: all; a causal kernel insists on 0 */
    int64_t sink_size; /* first keys that are visible although left of the window */
    int64_t min_seqlen_q; /* sequences of this many queries or fewer are skipped by kernels that know how */
    int64_t page_size;
    int64_t num_pages;
    int64_t pages_per_sequence; /* columns of block_table */
    int64_t num_page_indices;
    int64_t seqlen_new; /* tokens to append */
    int64_t rotary_dim; /* leading elements of a head that are rotated, even */
    int64_t block_scale_size_q; /* tokens that share a block scale */
    int64_t block_scale_size_kv;
    int64_t block_mask_q; /* queries of a block of block_mask */
    int64_t block_mask_kv; /* keys of a block of block_mask */
    int64_t num_splits; /* parts that the keys are divided into, at least 1 */
    int64_t tokens_q; /* queries of all sequences together */

    int32_t mask_corner; /* catalog_mask_corner: where the diagonal starts */
    float scale; /* scores are scale * (q . k) before the softmax */
    float logits_soft_cap; /* c of c * tanh(score / c); 0: none */
    float p_drop; /* probability that a weight is dropped */
    int32_t num_threads; /* host targets: 0 = every core that the process may use */
    int32_t reserved; /* 0 */
    struct catalog_pool* pool; /* host targets: the threads of the process; NULL = those of the library */
} catalog_args;

/* Bytes that a launch uses of each workspace, 0 of one that it does not use. */
typedef struct catalog_workspace {
    int64_t num_splits; /* what args->num_splits must be for the launch */
    int64_t o_acc;
    int64_t lse_acc;
    int64_t delta;
    int64_t dq_acc;
} catalog_workspace;

#endif /* CATALOG_ARGS_H */
