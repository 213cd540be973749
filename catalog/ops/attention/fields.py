"""The domains of a problem's fields: types, limits, and which operation takes which field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from catalog.ops.attention.traits import Dtype, KvLookupTable, KvMemoryLayout, Qscale
from catalog.schema.problem import MAX_SIZE, Integer, Listed

Op = Literal["fwd", "splitkv", "pagedkv", "appendkv", "batch_prefill", "bwd"]
Layout = Literal["bhsd", "bshd"]
MaskWord = Literal["no", "causal", "top_left", "bottom_right", "window", "generic"]
BiasDims = Literal["11", "1h", "bh"]

ELEMENT_BYTES: Mapping[Dtype, tuple[int, int]] = MappingProxyType(
    {
        Dtype.FP32: (4, 4),
        Dtype.FP16: (2, 2),
        Dtype.BF16: (2, 2),
        Dtype.FP8: (1, 1),
        Dtype.BF8: (1, 1),
        Dtype.FP8FP16: (1, 2),
        Dtype.FP8BF16: (1, 2),
        Dtype.FP8FP32: (1, 4),
    }
)
"""Bytes of an element of Q, K, V and of an element of O. The mx types are missing: they need block scales."""

_SCORES = ("scale", "bias", "bias_dims", "mask", "window", "logits_soft_cap")
_BLOCKS = ("block_mask_q", "block_mask_kv")
_CACHE = ("page_size", "num_pages")
_INFERENCE = (*_SCORES, "lse", "sink_size", "qscale")

OP_FIELDS: Mapping[Op, frozenset[str]] = MappingProxyType(
    {
        "fwd": frozenset(
            {
                *(*_INFERENCE, *_BLOCKS, "dropout", "randval", "min_seqlen_q"),
                *("block_scale_size_q", "block_scale_size_kv"),
            }
        ),
        "splitkv": frozenset({*_INFERENCE, *_CACHE, "num_splits"}),
        "pagedkv": frozenset({*_INFERENCE, *_CACHE, "min_seqlen_q"}),
        "appendkv": frozenset({*_CACHE, "mask", "window", "seqlen_new", "rope", "rotary_dim"}),
        "batch_prefill": frozenset({*_INFERENCE, *_CACHE, "dropout", "randval", "kv_memory_layout", "kv_lookup_table"}),
        "bwd": frozenset({*_SCORES, *_BLOCKS, "dropout", "randval", "dbias", "dlse", "deterministic"}),
    }
)
"""Fields that apply to each operation, in addition to the sizes, which apply to all."""

QSCALES: Mapping[Op, frozenset[Qscale]] = MappingProxyType(
    {
        "fwd": frozenset({Qscale.NO, Qscale.PERTENSOR, Qscale.BLOCKSCALE}),
        "splitkv": frozenset({Qscale.NO, Qscale.PERTENSOR}),
        "pagedkv": frozenset({Qscale.NO, Qscale.PERTENSOR}),
        "batch_prefill": frozenset({Qscale.NO, Qscale.PERTENSOR, Qscale.KV_BLOCKSCALE}),
    }
)
"""Granularities of scales for which an operation has arguments."""

QUANTISED = frozenset(dtype for dtype, (size, _) in ELEMENT_BYTES.items() if size == 1)
"""Element types stored with scales."""

VECTOR_BYTES = 16
"""Bytes that the vectorized cache layout keeps together."""


def _known_dtype(value: Any) -> Any:
    if value not in list(ELEMENT_BYTES):
        raise ValueError("not a dtype of problems")
    return value


def _not_mx(value: Any) -> Any:
    if value == Qscale.MX:
        raise ValueError("not a scale of problems")
    return value


def _stated(value: Any) -> Any:
    if value == "no":
        raise ValueError("a cache has one")
    return value


def _one_of(words: Iterable[str]) -> WithJsonSchema:
    """JSON Schema of a type that accepts only some words of an enum."""
    return WithJsonSchema({"type": "string", "enum": [str(word) for word in words]})


Side = Annotated[int, Field(ge=-1, le=MAX_SIZE), Integer]
Window = Annotated[tuple[Side, Side], Listed]
Element = Annotated[Dtype, BeforeValidator(_known_dtype), _one_of(ELEMENT_BYTES)]
Scale = Annotated[Qscale, BeforeValidator(_not_mx), _one_of(scale for scale in Qscale if scale is not Qscale.MX)]
MemoryLayout = Annotated[
    KvMemoryLayout, BeforeValidator(_stated), _one_of(one for one in KvMemoryLayout if one is not KvMemoryLayout.NO)
]
LookupTable = Annotated[
    KvLookupTable, BeforeValidator(_stated), _one_of(one for one in KvLookupTable if one is not KvLookupTable.NO)
]
