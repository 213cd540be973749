"""Canonical names of GEMM kernels: those of the tile engine and of the dispatcher, which differ, and our own.

A name does not identify a kernel: some traits are left out, and a grammar lists them as hidden. Source:
tile_engine/ops/gemm*/*_instance_builder.py (write_kernel_list), dispatcher/codegen/unified_gemm_codegen.py
(KernelNaming.generate).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from catalog.ops.gemm.traits import TRAITS, Family
from catalog.schema.grammar import Grammar
from catalog.schema.lineage import Lineage
from catalog.schema.name_parts import Choice, Extents, Literal, Part, Row, Target, Word, words
from catalog.schema.traits import Traits

DISPATCHER = "dispatcher"
"""The space whose names differ from the tile engine's."""

NATIVE = "native"
"""The space of our own kernels."""

_OLDEST = "2025-11"
"""The revision of the tile engine that calls the family universal plain gemm."""

_WORDS = {
    Family.UNIVERSAL: "gemm_universal",
    Family.MULTI_D: "gemm_multi_d",
    Family.MULTI_ABD: "gemm_multi_abd",
    Family.PRESHUFFLE: "gemm_preshuffle",
    Family.STREAM_K: "gemm",
    Family.GROUPED: "grouped_gemm",
    Family.ROWWISE: "gemm_rowwise",
    Family.BLOCKSCALE: "gemm_blockscale",
    Family.GROUPED_ROWWISE: "grouped_gemm_rowwise",
    Family.GROUPED_BLOCKSCALE: "grouped_gemm_blockscale",
}
"""What the tile engine calls its families. It lists no kernels with scales: their words are ours."""

_SUFFIXES: dict[str, tuple[Part, ...]] = {
    Family.UNIVERSAL: (),
    Family.MULTI_D: (Word("_multid_", "elementwise"), Extents("_d", ("num_d",))),
    Family.MULTI_ABD: (
        *(
            Extents(f"_{prefix}", (f"num_{tensor}",))
            for prefix, tensor in (("multiabd_a", "a"), ("b", "b"), ("d", "d"))
        ),
        *(Word("_", field) for field in ("elementwise_a", "elementwise_b", "elementwise")),
    ),
    Family.PRESHUFFLE: (Literal("_preshuffle"),),
    Family.STREAM_K: (
        Literal("_streamk"),
        words("reduction", atomic="", linear="_linear", tree="_tree"),
    ),
    Family.GROUPED: (Literal("_grouped"),),
    Family.ROWWISE: (Literal("_rowwise"),),
    Family.BLOCKSCALE: (Literal("_blockscale"),),
    Family.GROUPED_ROWWISE: (Literal("_grouped_rowwise"),),
    Family.GROUPED_BLOCKSCALE: (Literal("_grouped_blockscale"),),
}
"""The end of the dispatcher's names."""


def _truth(field: str) -> Part:
    return Choice((field,), {(True,): "_True", (False,): "_False"})


_TRAITS: tuple[Part, ...] = (
    Word("_", "dtype"),
    Word("_", "layout"),
    Word("_", "pipeline"),
    Word("_", "epilogue"),
    Word("_", "scheduler"),
    *map(_truth, ("pad_m", "pad_n", "pad_k", "persistent")),
)
_TILE: tuple[Part, ...] = tuple(
    Extents("_", (f"{kind}_m", f"{kind}_n", f"{kind}_k")) for kind in ("tile", "wave", "warp_tile")
)


_OWN: tuple[Part, ...] = (
    *(Word("_", field) for field in ("dtype", "layout", "pipeline")),
    Extents("_b", ("tile_m", "tile_n", "tile_k")),
)
_OF_CPU: tuple[Part, ...] = (Extents("_w", ("warp_tile_m", "warp_tile_n")),)
_OF_GPU: tuple[Part, ...] = (
    Extents("_w", ("warp_tile_m", "warp_tile_n", "warp_tile_k")),
    Extents("_r", ("wave_m", "wave_n")),
    Extents("_s", ("num_stages",)),
    Choice(("cluster_m",), {(1,): "", (2,): "_c2"}),
)
"""What names of our own kernels state in addition: the register tile; or the instruction, waves, stages, clusters."""


def type_of_c(dtype: str) -> str:
    """The element type of C, where nothing else is stated."""
    return {"int8": "int32", "fp8": "fp16", "bf8": "fp16"}.get(dtype, dtype)


@dataclass(frozen=True, eq=False)
class _Result:
    """The element type of C, where it is not :func:`type_of_c`: ``_bf16``."""

    traits = ("dtype_c",)

    def text(self, row: Row) -> str:
        stated = row.get("dtype_c")
        return "" if stated is None or stated == type_of_c(row.get("dtype", "")) else f"_{stated}"

    def sql(self) -> str:
        usual = " ".join(f"WHEN '{dtype}' THEN '{type_of_c(dtype)}'" for dtype in ("int8", "fp8", "bf8"))
        return f"iif(dtype_c = CASE dtype {usual} ELSE dtype END, '', '_' || dtype_c)"

    def printf(self) -> tuple[str, tuple[str, ...]]:
        return "%s", (self.sql(),)

    def regex(self, traits: Traits) -> str:
        return "(?:_(?:" + "|".join(map(str, traits["dtype_c"].values)) + "))?"

    def read(self, text: str) -> dict[str, Any]:
        return {"dtype_c": text[1:]} if text else {}


@cache
def grammar_of(family: str, lineage: Lineage) -> Grammar:
    """How the generator of ``lineage`` names the kernels of ``family``."""
    family = Family(family)
    if lineage.space == NATIVE:
        on_gpu = lineage.arch.startswith("sm_")
        parts = (
            Literal("gemm"),
            *_OWN,
            *(_OF_GPU if on_gpu else _OF_CPU),
            *_SUFFIXES[family],
            _Result(),
            Target(r"_\w+"),
        )
        return Grammar(TRAITS, family, parts, _implied_on_gpus if on_gpu else _implied_natively)
    if lineage.space == DISPATCHER:
        parts = (Literal("gemm"), *_TRAITS, *_TILE, *_SUFFIXES[family])
        return Grammar(TRAITS, family, parts, implied)
    plain = family is Family.UNIVERSAL and lineage.known == _OLDEST
    reduction = (Word("_", "reduction"),) if family is Family.STREAM_K else ()
    hidden = {Family.MULTI_D: {"elementwise", "num_d"}, Family.PRESHUFFLE: {"permute_n"}}.get(family, set())
    parts = (Literal("gemm" if plain else _WORDS[family]), *_TRAITS, *reduction, *_TILE)
    return Grammar(TRAITS, family, parts, implied, frozenset(hidden))


def _implied_natively(row: Row) -> dict[str, Any]:
    pads = dict.fromkeys(("pad_m", "pad_n", "pad_k"), True)
    stated = {"dtype_c": row["dtype_c"]} if row["dtype_c"] else {}
    return implied(row) | stated | pads | {"scheduler": "default", "epilogue": "default", "general": True}


def _implied_on_gpus(row: Row) -> dict[str, Any]:
    return _implied_natively(row) | {"wave_k": 1, "persistent": True}


def implied(row: Row) -> dict[str, Any]:
    """The traits that follow from those in a name."""
    dtype, pipeline = row["dtype"], row["pipeline"]
    integer = dtype == "int8"
    return {
        "dtype_a": dtype,
        "dtype_b": dtype,
        "dtype_c": type_of_c(dtype),
        "dtype_acc": "int32" if integer else "fp32",
        "double_buffer": pipeline in ("compv4", "preshufflev2"),
    }
