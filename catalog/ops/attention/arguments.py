"""The argument struct of attention, which all its kernels take on every target."""

from __future__ import annotations

from catalog.ops.attention.stages import WORKSPACES
from catalog.schema.arguments import Arguments, Scalar, Size

_SCORES = "(batch, nhead_q, seqlen_q, seqlen_k), group: (nhead_q, tokens_q, seqlen_k)"

ARGUMENTS = Arguments(
    about="The arguments of attention kernels.",
    strides={
        "batch": "of a paged cache: between pages; 0 in group mode, where tokens of all sequences follow",
        "nhead": "",
        "seqlen": "",
        "split": "between the partial results of splits",
    },
    tensors={
        "#attention": "Attention. In group mode (tokens, nhead, hdim) stands for (batch, seqlen, nhead, hdim).",
        "q": "(batch, nhead_q, seqlen_q, hdim_q)",
        "k": "(batch, nhead_k, seqlen_k, hdim_q), or a paged cache: see below",
        "v": "(batch, nhead_k, seqlen_k, hdim_v), or a paged cache",
        "o": "(batch, nhead_q, seqlen_q, hdim_v)",
        "lse": "float32, natural logarithm, (batch, nhead_q, seqlen_q) or (nhead_q, tokens_q)",
        "bias": f"{_SCORES}; of the type of Q, float32 where that has 8 bits",
        "alibi_slopes": "float32, (batch, nhead_q)",
        "block_mask": "uint8, (batch, nhead_q, blocks of seqlen_q, blocks of seqlen_k); 0: nobody sees the block",
        "sink": "float32, (nhead_q): one more logit a row, without a value; NULL: none",
        "randval": "uint8, like bias; the random byte of every weight; NULL: not wanted",
        "rng_state": "uint64, (2): seed and offset of the dropout; NULL: zeros",
        "q_descale": "float32; per tensor: (1); blocks: (batch, nhead_q, blocks of seqlen_q)",
        "k_descale": "float32; per tensor: (1); blocks: (batch, nhead_k, blocks of seqlen_k); or (num_pages, nhead_k)",
        "v_descale": "like k_descale",
        "seqlens_q": "int32, (batch): real tokens of each sequence; NULL: all that are stored",
        "seqlens_k": "like seqlens_q",
        "#paged": "Paged cache: K and V are (num_pages, page_size, nhead_k, hdim); vectorized, with x elements in 16 "
        "bytes, K (num_pages, nhead_k, hdim_q / x, page_size, x) and V (num_pages, nhead_k, page_size / x, hdim_v, x).",
        "block_table": "int32, (batch, pages_per_sequence)",
        "kv_indptr": "int32, (batch + 1): where each sequence's pages start in kv_page_indices",
        "kv_page_indices": "int32, (num_page_indices)",
        "kv_last_page_lens": "int32, (batch): tokens of each sequence's last page",
        "#append": "Appending to a cache; seqlens_k counts the tokens before.",
        "k_new": "(batch, nhead_k, seqlen_new, hdim_q)",
        "v_new": "(batch, nhead_k, seqlen_new, hdim_v)",
        "rotary_cos": "(seqlen_k, rotary_dim / 2), of the type of Q",
        "rotary_sin": "like rotary_cos",
        "q_out": "rotated Q, like Q",
        "#backward": "Backward.",
        "grad_o": "like O",
        "dq": "like Q",
        "dk": "like K",
        "dv": "like V",
        "dbias": f"{_SCORES}; zeroed",
        "dlse": "gradient of LSE, like it; NULL: none, and so where LSE is -infinity",
        "#workspaces": "Workspaces between stages, float32, at least as large as catalog_workspace_size says.",
        "o_acc": "O of each split: (num_splits, batch, nhead_q, seqlen_q, hdim_v)",
        "lse_acc": "(num_splits, batch, nhead_q, seqlen_q), or (num_splits, nhead_q, tokens_q)",
        "delta": "sum of dO * O of each row, like lse",
        "dq_acc": "dQ of each split of the keys: (num_splits, batch, nhead_q, seqlen_q, hdim_q)",
    },
    lists={
        "seqstart_q": "group mode: batch + 1 first tokens, the last one is tokens_q; batch mode: NULL",
        "seqstart_k": "NULL where K is paged",
    },
    sizes=(
        Size("batch"),
        Size("nhead_q"),
        Size("nhead_k", "divides nhead_q: query head h reads key head h / (nhead_q / nhead_k)"),
        Size("seqlen_q", "group mode: no sequence has more queries"),
        Size("seqlen_k", "paged: no sequence has more keys"),
        Size("hdim_q"),
        Size("hdim_v"),
        Size("window_left", "keys visible to the left of the diagonal; -1: all, which a causal kernel insists on"),
        Size("window_right", "keys visible to the right of the diagonal; -1: all; a causal kernel insists on 0"),
        Size("sink_size", "first keys that are visible although left of the window"),
        Size("min_seqlen_q", "sequences of this many queries or fewer are skipped by kernels that know how"),
        Size("page_size"),
        Size("num_pages"),
        Size("pages_per_sequence", "columns of block_table"),
        Size("num_page_indices", extent_of="kv_page_indices"),
        Size("seqlen_new", "tokens to append"),
        Size("rotary_dim", "leading elements of a head that are rotated, even"),
        Size("block_scale_size_q", "tokens that share a block scale"),
        Size("block_scale_size_kv"),
        Size("block_mask_q", "queries of a block of block_mask"),
        Size("block_mask_kv", "keys of a block of block_mask"),
        Size("num_splits", "parts that the keys are divided into, at least 1"),
        Size("tokens_q", "queries of all sequences together"),
    ),
    scalars=(
        Scalar("mask_corner", "int32", "catalog_mask_corner: where the diagonal starts"),
        Scalar("scale", "float32", "scores are scale * (q . k) before the softmax", source="softmax_scale"),
        Scalar("logits_soft_cap", "float32", "c of c * tanh(score / c); 0: none"),
        Scalar("p_drop", "float32", "probability that a weight is dropped", source="dropout"),
    ),
    workspaces=WORKSPACES,
    constants={
        "catalog_mask_corner": {
            "CATALOG_TOP_LEFT": "query i and key i are aligned",
            "CATALOG_BOTTOM_RIGHT": "the last query and the last key are aligned",
        }
    },
)
