"""Attention, as the rest of the catalog sees it."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from catalog.ops.attention.kernel import AttentionKernel
from catalog.ops.attention.names import parse_tile
from catalog.ops.protocol import Operation


class Attention(Operation):
    """Scaled dot-product attention, its gradients, and the caches of keys and values that it reads."""

    name = "attention"
    about = "scaled dot-product attention"
    kernel = AttentionKernel
    index = ("family", "dtype", "mode", "mask", "hdim_q", "hdim_v")
    parameters = (
        *("batch", "nhead_q", "nhead_k", "seqlen_q", "seqlen_k", "hdim_q", "hdim_v"),
        *("tokens_k", "page_size", "num_pages", "num_splits", "seqlen_new", "rotary_dim"),
        *("dropout", "dlse"),
    )
    variant_trait = "mask"
    axes = MappingProxyType({"hdim": ("hdim_q", "hdim_v"), "warp": ("warp_m0", "warp_n0", "warp_k0")})
    # The names and words of CK's dispatcher: dispatcher/codegen/fmha/instance_gen.py, expand_sweep. A mask is named by
    # its corner, where the kernel is compiled for causal masks of either.
    sweep_names = MappingProxyType(
        {name: name for name in ("pipeline", "mask", "bias", "mode", "lse", "dropout", "logits", "sink", "paged_kv")}
        | {"data_type": "dtype", "block_per_cu": "block_per_cu"}
    )
    filter_names = MappingProxyType({"data_type": "dtype", "use_trload": "trload"})
    sweep_words = MappingProxyType({"mask": {"no": "no", "top_left": "causal", "generic": "generic"}})
    chunk = ("dtype", "hdim_q", "hdim_v")

    def read_tile(self, text: str) -> dict[str, Any]:
        """As :func:`~catalog.ops.attention.names.parse_tile`."""
        return parse_tile(text)


OPERATION = Attention()
