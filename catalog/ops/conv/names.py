"""Canonical names of convolution kernels: those of the dispatcher and of the tile engine, which differ, and our own.

Source: dispatcher/codegen/unified_grouped_conv_codegen.py (GroupedConvKernelConfig.name,
DepthwiseConvKernelConfig.name), dispatcher/python/grouped_conv_utils.py (GroupedConvKernelConfig.name).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

from catalog.ops.conv.traits import TRAITS, Direction, Family, Pipeline
from catalog.schema.grammar import Grammar
from catalog.schema.lineage import Lineage
from catalog.schema.name_parts import Choice, Extents, Literal, Part, Row, Target, Word, sql_literal
from catalog.schema.traits import Traits

TILE_ENGINE = "tile_engine"
"""The space whose names differ from the dispatcher's."""

NATIVE = "native"
"""The space of our own kernels."""


@dataclass(frozen=True, eq=False)
class Vectors:
    """Numbers joined by ``_`` behind a prefix: ``_vec8_8_4``. Left out when they equal ``absent``."""

    prefix: str
    fields: tuple[str, ...]
    absent: tuple[int, ...] = ()

    @property
    def traits(self) -> tuple[str, ...]:
        """The traits that the piece states."""
        return self.fields

    def text(self, row: Row) -> str:
        """The text of the piece for a row of traits."""
        numbers = tuple(row[field] for field in self.fields)
        return "" if numbers == self.absent else self.prefix + "_".join(map(str, numbers))

    def sql(self) -> str:
        """SQL expression of the same piece over the kernel columns."""
        shown = sql_literal(self.prefix) + " || " + " || '_' || ".join(self.fields)
        same = " AND ".join(f"{field} = {number}" for field, number in zip(self.fields, self.absent, strict=False))
        return f"iif({same}, '', {shown})" if same else shown

    def printf(self) -> tuple[str, tuple[str, ...]]:
        """The same piece as a printf format and the SQL of its arguments."""
        return "%s", (self.sql(),)

    def regex(self, traits: Traits) -> str:
        """Pattern that matches every text of the piece."""
        shown = self.prefix + "_".join([r"\d+"] * len(self.fields))
        return f"(?:{shown})?" if self.absent else shown

    def read(self, text: str) -> dict[str, Any]:
        """The traits that ``text`` states."""
        numbers = map(int, text[len(self.prefix) :].split("_")) if text else self.absent
        return dict(zip(self.fields, numbers, strict=True))


def _flag(field: str, text: str) -> Part:
    return Choice((field,), {(False,): "", (True,): text})


_DIRECTIONS = {Direction.FORWARD: "fwd", Direction.BWD_DATA: "bwd_data", Direction.BWD_WEIGHT: "bwd_weight"}
_VECTORS = ("vector_a", "vector_b", "vector_c")
_NDIM = Choice(("ndim",), {(n,): f"_{n}d" for n in (1, 2, 3)})
_MERGED = Extents("_gm", ("num_groups_to_merge",), absent=1)
_TWO_STAGE = _flag("two_stage", "_2stage")
_TILE = tuple(Extents("_", (f"{kind}_m", f"{kind}_n", f"{kind}_k")) for kind in ("tile", "wave", "warp_tile"))
_PADS = Choice(
    ("pad_m", "pad_n", "pad_k"),
    {pads: "_pad" + "".join(str(int(pad)) for pad in pads) for pads in product((False, True), repeat=3)}
    | {(True, True, True): ""},
)

_DISPATCHER: tuple[Part, ...] = (
    *(Word("_", field) for field in ("dtype", "layout")),
    _NDIM,
    *(Word("_", field) for field in ("pipeline", "epilogue", "scheduler")),
    *_TILE,
    Vectors("_vec", _VECTORS, (4, 8, 8)),
    Extents("_wg", ("num_wave_groups",), absent=1),
    _MERGED,
    _flag("double_buffer", "_dsb"),
    _TWO_STAGE,
    Word("_", "specialization", absent="default"),
    _flag("explicit_gemm", "_explicit_gemm"),
    Choice(
        ("reduction", "persistent"),
        {("no", False): ""}
        | {
            (reduction, persistent): f"_streamk_{reduction}" + ("_persistent" if persistent else "")
            for reduction, persistent in product(("linear", "tree"), (False, True))
        },
    ),
    _flag("split_image", "_large_tensor"),
    _PADS,
)

_DEPTHWISE: tuple[Part, ...] = (
    Word("_", "dtype"),
    Word("_", "layout"),
    _NDIM,
    Extents("_", ("tile_h", "tile_w")),
    Extents("_f", ("filter_size",)),
    Extents("_s", ("stride_h", "stride_w")),
    Extents("_p", ("pad_h", "pad_w")),
    Extents("_nb", ("images",)),
    Extents("_sub", ("subtile_h", "subtile_w")),
    Vectors("_vec", ("vector_a", "vector_c")),
)

_OWN: tuple[Part, ...] = (
    *(Word("_", field) for field in ("dtype", "layout")),
    _NDIM,
    Word("_", "pipeline"),
    Extents("_b", ("tile_m", "tile_n", "tile_k"), absent=0),
    Extents("_r", ("wave_m", "wave_n", "wave_k"), absent=0),
    Extents("_w", ("warp_tile_m", "warp_tile_n"), absent=0),
    Extents("_vec", ("vector_c",), absent=1),
    Extents("_wg", ("num_wave_groups",), absent=1),
    Target(r"_\w+"),
)

_HIDDEN = frozenset(
    (
        *("layout", "epilogue", "explicit_gemm", "wave_m", "wave_n", "wave_k", *_VECTORS),
        *("warp_tile_m", "warp_tile_n", "warp_tile_k"),
    )
)
"""What the tile engine's names leave out."""

_FOLDED = Choice(
    ("pipeline",),
    {("compv3",): "_compv3"} | {(str(one),): "_mem" if one is Pipeline.MEM else "_compv3" for one in Pipeline},
)
"""The tile engine calls all backward pipelines but mem compv3."""


@cache
def grammar_of(family: str, lineage: Lineage) -> Grammar:
    """How the generator of ``lineage`` names the kernels of ``family``."""
    family = Family(family)
    direction = Direction.FORWARD if family is Family.DEPTHWISE else Direction(family)
    if lineage.space == NATIVE:
        kind = "fwd_depthwise" if family is Family.DEPTHWISE else _DIRECTIONS[direction]
        return Grammar(TRAITS, family, (Literal(f"grouped_conv_{kind}"), *_OWN), partial(_implied_natively, direction))
    if family is Family.DEPTHWISE:
        parts = (Literal("grouped_conv_fwd_depthwise"), *_DEPTHWISE)
        return Grammar(TRAITS, family, parts, partial(_implied, direction, depthwise=True))
    if lineage.space == TILE_ENGINE:
        backward = family is not Family.FORWARD
        parts = (
            Literal(f"grouped_conv_{direction}"),
            Word("_", "dtype"),
            _NDIM,
            Extents("_", ("tile_m", "tile_n", "tile_k")),
            _FOLDED if backward else Word("_", "pipeline"),
            Word("_", "scheduler"),
            _MERGED,
            _flag("double_buffer", "_dsb"),
            _flag("split_image", "_si"),
            _TWO_STAGE,
        )
        hidden = _HIDDEN | {"pipeline"} if backward else _HIDDEN
        return Grammar(TRAITS, family, parts, partial(_implied, direction), hidden)
    parts = (Literal(f"grouped_conv_{_DIRECTIONS[direction]}"), *_DISPATCHER)
    return Grammar(TRAITS, family, parts, partial(_implied, direction, occupied=True))


def _implied_natively(direction: Direction, row: Row) -> dict[str, Any]:
    return _implied(direction, row) | {"scheduler": "default", "epilogue": "default"}


def _implied(direction: Direction, row: Row, *, depthwise: bool = False, occupied: bool = False) -> dict[str, Any]:
    """The traits that follow from those in a name."""
    traits: dict[str, Any] = {"direction": str(direction), **types_of(str(row["dtype"]))}
    if depthwise:
        traits |= {"pipeline": "depthwise", "scheduler": "default", "epilogue": "default"}
    if occupied:
        traits["block_per_cu"] = 1 if row["double_buffer"] else 2
    return traits


def types_of(dtype: str) -> dict[str, str]:
    """The element types of the tensors and the accumulator of kernels of ``dtype``."""
    integer = dtype == "int8"
    out = "int32" if integer else "fp16" if dtype in ("fp8", "bf8") else dtype
    return {
        "dtype_in": dtype,
        "dtype_weight": dtype,
        "dtype_out": out,
        "dtype_acc": "int32" if integer else "fp32",
    }
