"""Small problems that show whether a kernel of each family works."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from catalog.ops.attention.fields import Op
from catalog.ops.attention.stages import MAIN_STAGE

_SIZES = {"batch": 2, "nhead_q": 4, "nhead_k": 2}
_LENGTHS = {"seqlen_q": 256}
_PACKED = {"seqlens_q": [256, 128], "nhead_q": 4, "nhead_k": 2}

_FORMS: Mapping[Op, tuple[dict[str, Any], ...]] = MappingProxyType(
    {
        "fwd": (_SIZES | _LENGTHS, _PACKED),
        "splitkv": (_SIZES | _LENGTHS, _PACKED, _SIZES | _LENGTHS | {"page_size": 128}),
        "pagedkv": tuple(
            sizes | {"page_size": page, "seqlen_k": 512} for sizes in (_SIZES | _LENGTHS, _PACKED) for page in (128, 16)
        ),
        "batch_prefill": tuple(
            _PACKED | {"page_size": page, "seqlen_k": 512, "kv_lookup_table": table}
            for page in (16, 1024, 1)
            for table in ("vllm", "sglang")
        ),
        "appendkv": (
            _SIZES | {"seqlen_q": 16, "seqlen_k": 256, "seqlen_new": 16},
            _SIZES | {"seqlen_q": 16, "seqlen_k": 256, "seqlen_new": 16, "page_size": 128},
        ),
        # A kernel would ignore an unknown input, so kernels selected with a gradient of LSE must be shown to use it.
        "bwd": tuple(form | of_lse for of_lse in ({"dlse": True}, {}) for form in (_SIZES | _LENGTHS, _PACKED)),
    }
)
"""Small problems of each operation, in the order in which to try them; no tile needs padding for their lengths."""


def smoke_fields(family: str, traits: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The fields of small problems with these traits and a main stage of ``family``, in the order to try them."""
    for op, main in MAIN_STAGE.items():
        if main == family:
            yield from ({"op": op, **traits, **form} for form in _FORMS[op])
