"""The names of CK's dispatcher, which rows of the spaces rules and exhaustive have in addition to their own.

They are only for comparison: they leave out the waves and all warp tiles except the first, so they identify no kernel.

Source of the form: FmhaKernelConfig.name in CK's dispatcher/python/fmha_utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from catalog.ops.attention.traits import Family
from catalog.schema.columns import Column
from catalog.schema.name_parts import Choice, Extents, Literal, Part, Row, Word, words

_PIPELINES: dict[str, str] = {
    Family.FWD_APPENDKV: "appendkv",
    Family.FWD_SPLITKV_COMBINE: "splitkv_combine",
    Family.BWD_DOT_DO_O: "qr",
    Family.BWD_DQ_DK_DV: "qr",
    Family.BWD_CONVERT_DQ: "qr",
}
"""The dispatcher's names where CK's codegen names no pipeline."""

_QUANTISED = (Family.FWD, Family.BATCH_PREFILL)
"""Families whose configs have a scale; fp8 kernels of other families are statically quantised without a mention."""


class _OtherHeadDim:
    """hdim_v if it differs from hdim_q: ``x128``."""

    def text(self, row: Row) -> str:
        return "" if row["hdim_v"] == row["hdim_q"] else f"x{row['hdim_v']}"

    def sql(self) -> str:
        return "iif(hdim_v = hdim_q, '', 'x' || hdim_v)"

    def printf(self) -> tuple[str, tuple[str, ...]]:
        return "%s", (self.sql(),)

    def regex(self) -> str:
        return r"(?:x\d+)?"

    def read(self, text: str) -> dict[str, Any]:
        return {"hdim_v": int(text[1:])} if text else {}


def _shown_if(field: str, word: str) -> Choice:
    return Choice((field,), {(True,): f"_{word}=1", (False,): ""})


def _parts(family: str) -> tuple[Part, ...]:
    pipeline: Part = Literal(f"_{_PIPELINES[family]}") if family in _PIPELINES else Word("_", "pipeline")
    scale = words(
        "qscale", no="", pertensor="_qs=pertensor", blockscale="_qs=blockscale", kv_blockscale="_qs=kv_blockscale"
    )
    variant = Choice(
        ("dropout_variant", "store_randval"),
        {("no", False): ""}
        | {
            (width, stores): f"_drv=dropout_{width}{'_storerandval' if stores else ''}"
            for width in ("wg16", "wg32")
            for stores in (False, True)
        },
    )
    return (
        Literal(f"fmha_{family}"),
        Word("_", "dtype"),
        Word("_", "mode"),
        Extents("_h", ("hdim_q",)),
        _OtherHeadDim(),
        pipeline,
        Extents("_t", ("tile_m0", "tile_n0", "tile_k0", "tile_n1", "tile_k1", "tile_k0max")),
        Choice(("tile_tag",), {("",): "", **{(tag,): f".{tag}" for tag in ("trload", "small", "bn192")}}),
        Extents("_w", ("warp_m0", "warp_n0", "warp_k0")),
        Extents("_pad", ("pad_s",)),
        *(Extents("", (pad,)) for pad in ("pad_sk", "pad_d", "pad_dv")),
        words("mask", no="_mask=no", causal="_mask=top_left", generic="_mask=generic"),
        Word("_bias=", "bias"),
        _shown_if("lse", "lse"),
        _shown_if("dropout", "drop"),
        _shown_if("logits", "logits"),
        _shown_if("sink", "sink"),
        _shown_if("skip_min_seqlen_q", "skip"),
        *((scale,) if family in _QUANTISED else ()),
        _shown_if("paged_kv", "pkv"),
        words("rope", no="", inter="_rope=interleaved", half="_rope=half_rotated"),
        Choice(("page_size",), {(0,): "", (1,): "", (16,): "_ps=16", (1024,): "_ps=1024"}),
        words("kv_memory_layout", no="", vectorized="", linear="_kvl=linear"),
        words("kv_lookup_table", no="", sglang="", vllm="_kvt=vllm"),
        _shown_if("deterministic", "det"),
        _shown_if("dbias", "dbias"),
        variant,
        Extents("_bpc=", ("block_per_cu",)),
    )


def _name_sql(family: str) -> str:
    """SQL expression for the dispatcher's name over the kernel columns.

    Uses no printf, which the sandbox of user expressions forbids, because a view contains it.
    """
    return " || ".join(f"({part.sql()})" for part in _parts(family))


DISPATCHER_NAME: Mapping[Column, str] = MappingProxyType(
    {
        Column(
            "dispatcher_name", "TEXT", "text", "", "name in CK's dispatcher; empty for the spaces ck and native"
        ): "iif(space IN ('ck', 'native'), '', CASE family "
        + " ".join(f"WHEN '{family}' THEN {_name_sql(family)}" for family in Family)
        + " END)"
    }
)
"""The view's column with the dispatcher's name, and its SQL."""
