"""catalog_abi.h in Python: the argument struct that every stage of a plan takes, and what it says of workspaces."""

from __future__ import annotations

import ctypes

from catalog.ops.attention.stages import WORKSPACES

ABI_VERSION = 4
"""CATALOG_ABI_VERSION of the header that this module mirrors."""


class CatalogTensor(ctypes.Structure):
    """``catalog_tensor``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("stride_batch", ctypes.c_int64),
        ("stride_nhead", ctypes.c_int64),
        ("stride_seqlen", ctypes.c_int64),
        ("stride_split", ctypes.c_int64),
    )


TENSORS = (
    *("q", "k", "v", "o", "lse", "bias", "alibi_slopes", "sink", "randval", "rng_state"),
    *("q_descale", "k_descale", "v_descale", "seqlens_q", "seqlens_k"),
    *("block_table", "kv_indptr", "kv_page_indices", "kv_last_page_lens"),
    *("k_new", "v_new", "rotary_cos", "rotary_sin", "q_out"),
    *("grad_o", "dq", "dk", "dv", "dbias", "dlse"),
    *WORKSPACES,
)
"""The tensors of the struct, in order."""

_SIZES = (
    *("batch", "nhead_q", "nhead_k", "seqlen_q", "seqlen_k", "hdim_q", "hdim_v"),
    *("window_left", "window_right", "sink_size", "min_seqlen_q"),
    *("page_size", "num_pages", "pages_per_sequence", "num_page_indices"),
    *("seqlen_new", "rotary_dim", "block_scale_size_q", "block_scale_size_kv", "num_splits"),
    "tokens_q",
)


class CatalogWorkspace(ctypes.Structure):
    """``catalog_workspace``: the splits that a launch takes, and bytes."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("num_splits", *WORKSPACES))


class CatalogArgs(ctypes.Structure):
    """``catalog_args``."""

    _fields_ = (
        ("struct_bytes", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        *((name, CatalogTensor) for name in TENSORS),
        ("seqstart_q", ctypes.c_void_p),
        ("seqstart_k", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in _SIZES),
        ("mask_corner", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("logits_soft_cap", ctypes.c_float),
        ("p_drop", ctypes.c_float),
        ("num_threads", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )
