"""The domains of a problem's fields: types, limits, and which operation takes which field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, WithJsonSchema

from catalog.ops.attention.traits import Dtype, KvLookupTable, KvMemoryLayout, Qscale
from catalog.schema.problem import MAX_SIZE, Integer, Listed

Op = Literal["fwd", "splitkv", "pagedkv", "appendkv", "batch_prefill", "bwd"]
Layout = Literal["bhsd", "bshd"]
MaskWord = Literal["no", "causal", "top_left", "bottom_right", "window", "generic"]
BiasDims = Literal["11", "1h", "bh"]


class Elements(NamedTuple):
    """NumPy's or ml_dtypes' names of the element types of Q, of K and V, and of O."""

    q: str
    kv: str
    o: str


_FP32, _FP16, _BF16, _FP8, _BF8 = "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"

ELEMENTS: Mapping[Dtype, Elements] = MappingProxyType(
    {
        Dtype.FP32: Elements(_FP32, _FP32, _FP32),
        Dtype.FP16: Elements(_FP16, _FP16, _FP16),
        Dtype.BF16: Elements(_BF16, _BF16, _BF16),
        Dtype.FP8: Elements(_FP8, _FP8, _FP8),
        Dtype.BF8: Elements(_BF8, _BF8, _BF8),
        Dtype.FP8FP16: Elements(_FP8, _FP8, _FP16),
        Dtype.FP8BF16: Elements(_FP8, _FP8, _BF16),
        Dtype.FP8FP32: Elements(_FP8, _FP8, _FP32),
        Dtype.FP16KVFP8: Elements(_FP16, _FP8, _FP16),
        Dtype.BF16KVFP8: Elements(_BF16, _FP8, _BF16),
    }
)
"""The element types of each dtype. The mx types are missing: they need block scales."""

BYTE_ELEMENTS = frozenset({_FP8, _BF8})
"""Element types of 8 bits, which are stored with scales."""

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

QUANTISED = frozenset(dtype for dtype, elements in ELEMENTS.items() if elements.kv in BYTE_ELEMENTS)
"""Dtypes whose K and V are stored with scales."""

OF_CACHES = frozenset(dtype for dtype in QUANTISED if ELEMENTS[dtype].q not in BYTE_ELEMENTS)
"""Of these, the ones whose Q is not."""

VECTOR_BYTES = 16
"""Bytes that the vectorized cache layout keeps together."""


def _known_dtype(value: Any) -> Any:
    if value not in list(ELEMENTS):
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
Element = Annotated[Dtype, BeforeValidator(_known_dtype), _one_of(ELEMENTS)]
Scale = Annotated[Qscale, BeforeValidator(_not_mx), _one_of(scale for scale in Qscale if scale is not Qscale.MX)]
MemoryLayout = Annotated[
    KvMemoryLayout, BeforeValidator(_stated), _one_of(one for one in KvMemoryLayout if one is not KvMemoryLayout.NO)
]
LookupTable = Annotated[
    KvLookupTable, BeforeValidator(_stated), _one_of(one for one in KvLookupTable if one is not KvLookupTable.NO)
]
