"""Canonical kernel names, upstream's and our own: one grammar per family writes, parses and compiles them to SQL.

A grammar is a sequence of parts. Each part defines three things: the text of its traits, the SQL expression for that
text, and how to read the traits back. So the name in a row, the name of a model and the parser always agree. Upstream
renames families now and then: :func:`grammar_of` returns the grammar of a revision.

Source of the grammars: the ``name`` properties of the kernel, tile and pipeline classes in CK's
``example/ck_tile/01_fmha/codegen/ops/*.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from catalog.errors import UsageError
from catalog.ops.attention.traits import TRAITS, Family
from catalog.schema.grammar import Grammar, Implied, read_parts
from catalog.schema.name_parts import (
    Choice,
    Extents,
    Literal,
    Pads,
    Part,
    Row,
    Target,
    Word,
    flag,
    words,
)


def _triple(kind: str, gemm: int) -> tuple[str, str, str]:
    return (f"{kind}_m{gemm}", f"{kind}_n{gemm}", f"{kind}_k{gemm}")


_HEAD: tuple[Part, ...] = (Extents("_d", ("hdim_q",)), Word("_", "dtype"))
_BLOCK = ("tile_m0", "tile_n0", "tile_k0", "tile_n1", "tile_k1", "tile_k0max")
_OCCUPANCY = Extents("_o", ("block_per_cu",), absent=-1)
_STAGES = Extents("_s", ("num_stages",), absent=0)
_TILE: tuple[Part, ...] = (
    Extents("b", _BLOCK),
    Extents("_r", _triple("wave", 0)),
    Extents("_r", _triple("wave", 1)),
    Extents("_w", _triple("warp", 0)),
    Extents("_w", _triple("warp", 1)),
    _OCCUPANCY,
    _STAGES,
)
_TILE_BWD: tuple[Part, ...] = (
    Extents("b", (*_BLOCK, "tile_bwd6", "tile_bwd7", "tile_bwd8")),
    Extents("_r", _triple("wave", 0)),
    Extents("_r", _triple("wave", 1)),
    Extents("_r", _triple("wave", 2)),
    Extents("_w", _triple("warp", 0)),
    Extents("_w", _triple("warp", 1)),
    Extents("_o", ("block_per_cu",)),
    _STAGES,
    Extents("_maxq", ("max_seq_q",)),
)
_VLAYOUT = words("vlayout", row="_vr", col="_vc")
_PADS = Pads({"pad_s": "s", "pad_sk": "sk", "pad_d": "d", "pad_dv": "dv"})
_BIAS = words("bias", no="_nbias", bias="_bias", alibi="_alibi")
_MASK = words("mask", no="_nmask", causal="_mc", generic="_mg", mask="_mask")
_QSCALE = words(
    "qscale", no="_nqscale", pertensor="_pertensor", blockscale="_blockscale", kv_blockscale="_kv_blockscale", mx="_mx"
)
_SQUANT = words("qscale", no="_nsquant", pertensor="_squant")
_LOOP: tuple[Part, ...] = (Word("_", "pipeline"), _VLAYOUT, _PADS, flag("logits", "logits"), _BIAS, _MASK)
_LSE = flag("lse", "lse")
_SINK = flag("sink", "sink")
_DROPOUT = flag("dropout", "dropout")
_SKIP = flag("skip_min_seqlen_q", "skip")
_DROPOUT_BWD = Choice(
    ("dropout", "dropout_variant", "store_randval"),
    {(False, "no", False): "_ndropout"}
    | {
        (True, variant, stores): f"_dropout_{variant}{'_storerandval' if stores else ''}"
        for variant in ("wg16", "wg32")
        for stores in (False, True)
    },
)
_DROPOUT_NATIVE = Choice(
    ("dropout", "store_randval"),
    {(False, False): "_ndropout", (True, False): "_dropout", (True, True): "_dropout_storerandval"},
)
_BIAS_NATIVE = Choice(
    ("bias", "logits"),
    {("no", False): "_nbias", ("no", True): "_logits_nbias", ("bias", False): "_bias", ("alibi", False): "_alibi"},
)
_PIPELINE = Word("_", "pipeline", absent="no")


def _before_block_mask(name: str) -> Choice:
    """A flag of upstream's, and the block mask behind it, where there is one."""
    return Choice(
        (name, "block_mask"),
        {
            (stated, masked): f"_{'' if stated else 'n'}{name}{'_blockmask' if masked else ''}"
            for stated in (False, True)
            for masked in (False, True)
        },
    )


def _v_is_n1(row: Row) -> dict[str, Any]:
    return {"hdim_v": row["tile_n1"]}


def _v_is_q(row: Row) -> dict[str, Any]:
    return {"hdim_v": row["hdim_q"]}


def _paged(row: Row) -> dict[str, Any]:
    return {"hdim_v": row["tile_n1"], "paged_kv": True}


def _paged_by_token(row: Row) -> dict[str, Any]:
    """The only form of paging in early batch_prefill kernels: pages of one token, in SGLang's table."""
    layout = {"kv_memory_layout": "linear", "kv_lookup_table": "sglang"}
    return _paged(row) | layout | {"page_size": 1, "kv_load_mode": "bload"}


def _third_gemm(row: Row) -> dict[str, int]:
    """The warp tile of dQ = dS K: CK uses that of the first GEMM, limited to the depth of the unroll."""
    return {
        "warp_m2": row["warp_m0"],
        "warp_n2": row["warp_n0"],
        "warp_k2": min(row["warp_k0"], row["tile_bwd6"]),
    }


def _bwd(row: Row) -> dict[str, Any]:
    return {"hdim_v": row["hdim_q"], **_third_gemm(row)}


def _v_is_bwd8(row: Row) -> dict[str, Any]:
    return {"hdim_v": row["tile_bwd8"], **_third_gemm(row)}


def _rows_of_64(row: Row) -> dict[str, Any]:
    return {"hdim_v": row["hdim_q"], "tile_m0": 64}


def _grammar(family: Family, implied: Implied, *parts: Part | Sequence[Part]) -> Grammar:
    flat: list[Part] = [Literal(f"fmha_{'bwd' if family is Family.BWD_DQ_DK_DV else family}"), *_HEAD]
    for part in parts:
        flat.extend(part if isinstance(part, Sequence) else (part,))
    return Grammar(TRAITS, family, (*flat, _UPSTREAM), implied)


_UPSTREAM = Target(r"(?:_gfx\w+)?")
_NATIVE = Target(r"_(?!gfx)\S+")  # any arch except upstream's: backends of other distributions add more
_MODE = Word("_", "mode")
_1D: tuple[Part, ...] = (Extents("_b", ("tile_m0",)), _MODE, Extents("_o", ("block_per_cu",)))

GRAMMARS: Mapping[str, Grammar] = MappingProxyType(
    {
        grammar.family: grammar
        for grammar in (
            _grammar(
                Family.FWD, _v_is_n1, _MODE, Literal("_"), _TILE, _LOOP, _LSE, _DROPOUT, _SKIP, _QSCALE,
                flag("trload", "trload"), _SINK,
            ),
            _grammar(
                Family.FWD_SPLITKV, _v_is_q, _MODE, Literal("_"), _TILE, _LOOP, _LSE, _SQUANT,
                flag("paged_kv", "pagedkv"), _SINK,
            ),
            _grammar(
                Family.FWD_SPLITKV_COMBINE, _v_is_q, _MODE, Extents("_b", ("tile_n1",)), _OCCUPANCY,
                Word("_", "pipeline"), Pads({"pad_s": "s", "pad_dv": "dv"}), _LSE, _SQUANT,
            ),
            _grammar(
                Family.FWD_PAGEDKV, _v_is_n1, _MODE, Literal("_"), _TILE, _LOOP, _LSE, _SKIP, _SQUANT,
                flag("paged_kv", "pagedkv"), _SINK,
            ),
            _grammar(
                Family.FWD_APPENDKV, _v_is_q, Extents("_b", ("tile_m0", "tile_n0", "tile_k0", "tile_n1")), _OCCUPANCY,
                _VLAYOUT, Pads(_PADS.letters, none=""), words("rope", no="", inter="_inter", half="_half"),
                Choice(("paged_kv",), {(True,): "_pagedkv", (False,): ""}),
            ),
            _grammar(
                Family.BATCH_PREFILL, _paged, _MODE, Extents("_ps", ("page_size",)), Word("_", "kv_load_mode"),
                Literal("_"), _TILE, _LOOP, _LSE, _DROPOUT, _QSCALE, _SINK, Word("_", "kv_memory_layout"),
                Word("_", "kv_lookup_table"),
            ),
            _grammar(Family.BWD_DOT_DO_O, _v_is_q, _1D, Pads({"pad_s": "s", "pad_dv": "dv"})),
            _grammar(
                Family.BWD_DQ_DK_DV, _bwd, _MODE, Literal("_"), _TILE_BWD,
                Pads({"pad_d": "d", "pad_dv": "dv"}, amounts={1: "1", 8: "8"}), _BIAS, flag("dbias", "dbias"), _MASK,
                _DROPOUT_BWD, flag("deterministic", "deterministic"), flag("trload", "trload"),
            ),
            _grammar(
                Family.BWD_CONVERT_DQ, _v_is_q, _1D, Pads({"pad_s": "s", "pad_d": "d"}),
                flag("deterministic", "deterministic"),
            ),
        )
    }
)  # fmt: skip
"""The name grammar of every family in the newest revision."""

_UNTIL_2025_11: Mapping[str, Grammar] = MappingProxyType(
    {
        grammar.family: grammar
        for grammar in (
            _grammar(
                Family.FWD_SPLITKV, _v_is_q, _MODE, Literal("_"), _TILE, _LOOP, _LSE, _SQUANT,
                flag("paged_kv", "pagedkv"),
            ),
            _grammar(
                Family.FWD_PAGEDKV, _v_is_n1, _MODE, Literal("_"), _TILE, _LOOP, _LSE, _SKIP, _SQUANT,
                flag("paged_kv", "pagedkv"),
            ),
            _grammar(
                Family.BATCH_PREFILL, _paged_by_token, _MODE, Literal("_"), _TILE, _LOOP, _LSE, _DROPOUT, _SQUANT
            ),
            _grammar(
                Family.BWD_CONVERT_DQ, _v_is_q, Extents("_b", ("tile_m0", "tile_n0")), _MODE,
                Extents("_o", ("block_per_cu",)), Pads({"pad_s": "s", "pad_d": "d"}),
                flag("deterministic", "deterministic"),
            ),
        )
    }
)  # fmt: skip
"""The families that 2025-07 and 2025-11 name alike, and 2026-05 differently."""

_OLDER: Mapping[str, Mapping[str, Grammar]] = MappingProxyType(
    {
        "2025-07": {
            **_UNTIL_2025_11,
            Family.FWD: _grammar(
                Family.FWD, _v_is_n1, _MODE, Literal("_"), _TILE, _LOOP, _LSE, _DROPOUT, _SKIP, _SQUANT
            ),
            Family.BWD_DOT_DO_O: _grammar(
                Family.BWD_DOT_DO_O, _rows_of_64, _MODE, Extents("_o", ("block_per_cu",)),
                Pads({"pad_s": "s", "pad_dv": "dv"}),
            ),
            Family.BWD_DQ_DK_DV: _grammar(
                Family.BWD_DQ_DK_DV, _bwd, _MODE, Literal("_"), _TILE_BWD[:-1], Word("_", "pipeline"), _PADS, _BIAS,
                flag("dbias", "dbias"), _MASK, _DROPOUT_BWD, flag("deterministic", "deterministic"),
            ),
        },
        "2025-11": {
            **_UNTIL_2025_11,
            Family.FWD: _grammar(
                Family.FWD, _v_is_n1, _MODE, Literal("_"), _TILE, _LOOP, _LSE, _DROPOUT, _SKIP, _SQUANT,
                flag("trload", "trload"),
            ),
        },
    }
)  # fmt: skip
"""The families that older revisions name differently."""


def _native(grammar: Grammar, implied: Implied | None = None, **replaced: Part) -> Grammar:
    """Upstream's grammar adapted to our own kernels, which have other targets, and pipelines in every family.

    ``replaced``: parts by the trait that they show.
    """
    parts = [replaced.get(part.traits[0], part) if part.traits else part for part in grammar.parts[:-1]]
    if not any("pipeline" in part.traits for part in parts):
        parts.append(_PIPELINE)
    return Grammar(TRAITS, grammar.family, (*parts, _NATIVE), implied or grammar.implied)


_NATIVE_GRAMMARS: Mapping[str, Grammar] = MappingProxyType(
    {family: _native(grammar) for family, grammar in GRAMMARS.items()}
    | {
        Family.FWD: _native(GRAMMARS[Family.FWD], sink=_before_block_mask("sink")),
        Family.FWD_SPLITKV: _native(GRAMMARS[Family.FWD_SPLITKV], _v_is_n1),
        Family.FWD_APPENDKV: _native(GRAMMARS[Family.FWD_APPENDKV], _v_is_n1),
        Family.BATCH_PREFILL: _native(GRAMMARS[Family.BATCH_PREFILL], kv_load_mode=words("kv_load_mode", no="")),
        Family.BWD_DQ_DK_DV: _native(
            GRAMMARS[Family.BWD_DQ_DK_DV],
            _v_is_bwd8,
            dropout=_DROPOUT_NATIVE,
            bias=_BIAS_NATIVE,
            trload=_before_block_mask("trload"),
        ),
    }
)
"""The grammars of our own kernels.

V may have another head dim than Q everywhere; forward and backward may have a block mask; backward has one variant of
dropout, and may cap the logits.
"""


def grammar_of(family: str, revision: str) -> Grammar:
    """The grammar of ``revision`` for the kernels of ``family``."""
    if revision == "native":
        return _NATIVE_GRAMMARS[family]
    return _OLDER.get(revision, {}).get(family, GRAMMARS[family])


def stated_traits(family: str) -> frozenset[str]:
    """The traits of the kernels of ``family``, upstream's in the newest revision and our own."""
    return GRAMMARS[family].traits | _NATIVE_GRAMMARS[family].traits


_TILE_APPENDKV: tuple[Part, ...] = (Extents("b", ("tile_m0", "tile_n0", "tile_k0", "tile_n1")), _OCCUPANCY)
_TILE_COMBINE: tuple[Part, ...] = (Extents("b", ("tile_n1",)), _OCCUPANCY)


def parse_tile(text: str) -> dict[str, int]:
    """The tile traits in CK's tile notation: ``b128x128x32x128x32x128_r4x1x1_r4x1x1_w32x32x16_w32x32x16``.

    Raises:
        UsageError: ``text`` is not in this notation.
    """
    for parts in (_TILE_BWD, _TILE, _TILE_APPENDKV, _TILE_COMBINE):
        traits = read_parts(parts, text, TRAITS)
        if traits is not None:
            return traits | (_third_gemm(traits) if parts is _TILE_BWD else {})
    raise UsageError(
        f"{text!r} is not a tile",
        hint="Tiles are written as in kernel names: b64x64x32x64x32x64_r4x1x1_r4x1x1_w16x16x16_w16x16x16.",
    )


def parse_name(name: str) -> dict[str, Any]:
    """Every trait of the kernel called ``name`` at any revision, plus ``target``.

    Raises:
        UsageError: no family has such a name.
    """
    older = (grammar for grammars in _OLDER.values() for grammar in grammars.values())
    for grammar in (*GRAMMARS.values(), *older, *_NATIVE_GRAMMARS.values()):
        traits = grammar.parse(name)
        if traits is not None:
            return traits
    raise UsageError(f"{name!r} is not a kernel name", hint="`catalog query` prints names; see the column `name`.")
