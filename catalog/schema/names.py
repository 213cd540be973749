"""Upstream's canonical kernel names, as one grammar a family that writes, parses and compiles to SQL.

A grammar is a sequence of parts. Every part knows three things: the text of its traits, the SQL expression of that
text, and how to read the traits back. So the name in a row, the name of a model and the parser cannot drift apart.
Upstream renames families now and then: :func:`grammar_of` gives the grammar of a revision.

Source of the forms: the ``name`` properties of the kernel, tile and pipeline classes in CK's
``example/ck_tile/01_fmha/codegen/ops/*.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, Protocol

from catalog.errors import UsageError
from catalog.schema.fields import TRAITS, Family

Row = Mapping[str, Any]


def sql_literal(value: str | int | bool) -> str:
    """``value`` as SQLite writes it; booleans are 0 and 1."""
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return str(int(value))


class Part(Protocol):
    """A piece of a name."""

    def text(self, row: Row) -> str:
        """The piece for a row of traits."""

    def sql(self) -> str:
        """SQL expression of the same piece over the kernel columns."""

    def printf(self) -> tuple[str, tuple[str, ...]]:
        """The same piece as a printf format and its arguments."""

    def regex(self) -> str:
        """Pattern, without capturing groups, of every text the piece can have."""

    def read(self, text: str) -> dict[str, Any]:
        """The traits that ``text`` states."""


@dataclass(frozen=True, eq=False)
class Literal:
    """Fixed text."""

    literal: str

    def text(self, row: Row) -> str:
        return self.literal

    def sql(self) -> str:
        return sql_literal(self.literal)

    def printf(self) -> tuple[str, tuple[str, ...]]:
        return self.literal.replace("%", "%%"), ()

    def regex(self) -> str:
        return re.escape(self.literal)

    def read(self, text: str) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, eq=False)
class Extents:
    """Numbers joined by ``x`` behind a prefix: ``b128x64``; left out when the first one equals ``absent``."""

    prefix: str
    fields: tuple[str, ...]
    absent: int | None = None

    def text(self, row: Row) -> str:
        if row[self.fields[0]] == self.absent:
            return ""
        return self.prefix + "x".join(str(row[field]) for field in self.fields)

    def sql(self) -> str:
        shown = sql_literal(self.prefix) + " || " + " || 'x' || ".join(self.fields)
        return shown if self.absent is None else f"iif({self.fields[0]} = {self.absent}, '', {shown})"

    def printf(self) -> tuple[str, tuple[str, ...]]:
        if self.absent is not None:
            return "%s", (self.sql(),)
        return self.prefix + "x".join(["%d"] * len(self.fields)), self.fields

    def regex(self) -> str:
        shown = re.escape(self.prefix) + "x".join([r"-?\d+"] * len(self.fields))
        return shown if self.absent is None else f"(?:{shown})?"

    def read(self, text: str) -> dict[str, Any]:
        if not text:
            return {self.fields[0]: self.absent}
        numbers = text[len(self.prefix) :].split("x")
        return {field: int(number) for field, number in zip(self.fields, numbers, strict=True)}


@dataclass(frozen=True, eq=False)
class Word:
    """The value of one enumerated trait, behind a prefix."""

    prefix: str
    field: str

    def text(self, row: Row) -> str:
        return f"{self.prefix}{row[self.field]}"

    def sql(self) -> str:
        return f"{sql_literal(self.prefix)} || {self.field}"

    def printf(self) -> tuple[str, tuple[str, ...]]:
        return f"{self.prefix}%s", (self.field,)

    def regex(self) -> str:
        return re.escape(self.prefix) + _any_of(map(str, TRAITS[self.field].values))

    def read(self, text: str) -> dict[str, Any]:
        return {self.field: text[len(self.prefix) :]}


@dataclass(frozen=True, eq=False)
class Choice:
    """One text for every combination of values of some traits."""

    fields: tuple[str, ...]
    texts: Mapping[tuple[Any, ...], str]

    def text(self, row: Row) -> str:
        return self.texts[tuple(row[field] for field in self.fields)]

    def sql(self) -> str:
        whens = (
            "WHEN "
            + " AND ".join(f"{f} = {sql_literal(v)}" for f, v in zip(self.fields, values, strict=True))
            + f" THEN {sql_literal(text)}"
            for values, text in self.texts.items()
        )
        return f"CASE {' '.join(whens)} END"

    def printf(self) -> tuple[str, tuple[str, ...]]:
        return "%s", (self.sql(),)

    def regex(self) -> str:
        return _any_of(self.texts.values())

    def read(self, text: str) -> dict[str, Any]:
        values = next(values for values, shown in self.texts.items() if shown == text)
        return dict(zip(self.fields, values, strict=True))


@dataclass(frozen=True, eq=False)
class Pads:
    """The padded axes: ``_psskddv``, or ``none`` when no axis is padded.

    ``amounts`` says how an amount of padding shows behind its axis; backward names show every one: ``_pd8dv1``.
    """

    letters: Mapping[str, str]
    none: str = "_npad"
    amounts: Mapping[int, str] = field(default_factory=lambda: {1: "", 8: "8"})

    def text(self, row: Row) -> str:
        padded = "".join(f"{letter}{self.amounts[row[axis]]}" for axis, letter in self.letters.items() if row[axis])
        return f"_p{padded}" if padded else self.none

    def sql(self) -> str:
        shown = " || ".join(
            f"CASE {axis} {' '.join(f'WHEN {n} THEN {sql_literal(letter + t)}' for n, t in self.amounts.items())} "
            "ELSE '' END"
            for axis, letter in self.letters.items()
        )
        return f"iif({' OR '.join(self.letters)}, '_p' || {shown}, {sql_literal(self.none)})"

    def printf(self) -> tuple[str, tuple[str, ...]]:
        return "%s", (self.sql(),)

    def regex(self) -> str:
        return f"(?:_p{self._axes('(?:')}|{re.escape(self.none)})"

    def read(self, text: str) -> dict[str, Any]:
        if text == self.none:
            return dict.fromkeys(self.letters, 0)
        found = re.fullmatch("_p" + self._axes("("), text)
        assert found is not None, f"{text!r} matched {self.regex()!r} before"  # noqa: S101
        amounts = {shown: n for n, shown in self.amounts.items()}
        return {
            axis: 0 if group is None else amounts[group.removeprefix(letter)]
            for (axis, letter), group in zip(self.letters.items(), found.groups(), strict=True)
        }

    def _axes(self, opening: str) -> str:
        amounts = "|".join(sorted(self.amounts.values(), reverse=True))
        return "".join(f"{opening}{letter}(?:{amounts}))?" for letter in self.letters.values())


@dataclass(frozen=True, eq=False)
class Target:
    """The codegen target that upstream appends: ``_gfx950``; nothing for an empty one."""

    def text(self, row: Row) -> str:
        return f"_{row['target']}" if row["target"] else ""

    def sql(self) -> str:
        return "iif(target = '', '', '_' || target)"

    def printf(self) -> tuple[str, tuple[str, ...]]:
        return "%s", (self.sql(),)

    def regex(self) -> str:
        return r"(?:_(?:gfx\w+|x86_64_v\d|aarch64|sm_\d+))?"

    def read(self, text: str) -> dict[str, Any]:
        return {"target": text[1:]}


def _any_of(texts: Any) -> str:
    return "(?:" + "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) + ")"


def _flag(field: str, word: str) -> Choice:
    return Choice((field,), {(True,): f"_{word}", (False,): f"_n{word}"})


def words(field: str, **texts: str) -> Choice:
    """The part that says the value of ``field``: ``texts`` by value."""
    return Choice((field,), {(value,): text for value, text in texts.items()})


def _triple(kind: str, gemm: int) -> tuple[str, str, str]:
    return (f"{kind}_m{gemm}", f"{kind}_n{gemm}", f"{kind}_k{gemm}")


_HEAD: tuple[Part, ...] = (Extents("_d", ("hdim_q",)), Word("_", "dtype"))
_BLOCK = ("tile_m0", "tile_n0", "tile_k0", "tile_n1", "tile_k1", "tile_k0max")
_OCCUPANCY = Extents("_o", ("block_per_cu",), absent=-1)
_TILE: tuple[Part, ...] = (
    Extents("b", _BLOCK),
    Extents("_r", _triple("wave", 0)),
    Extents("_r", _triple("wave", 1)),
    Extents("_w", _triple("warp", 0)),
    Extents("_w", _triple("warp", 1)),
    _OCCUPANCY,
)
_TILE_BWD: tuple[Part, ...] = (
    Extents("b", (*_BLOCK, "tile_bwd6", "tile_bwd7", "tile_bwd8")),
    Extents("_r", _triple("wave", 0)),
    Extents("_r", _triple("wave", 1)),
    Extents("_r", _triple("wave", 2)),
    Extents("_w", _triple("warp", 0)),
    Extents("_w", _triple("warp", 1)),
    Extents("_o", ("block_per_cu",)),
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
_LOOP: tuple[Part, ...] = (Word("_", "pipeline"), _VLAYOUT, _PADS, _flag("logits", "logits"), _BIAS, _MASK)
_LSE = _flag("lse", "lse")
_SINK = _flag("sink", "sink")
_DROPOUT = _flag("dropout", "dropout")
_SKIP = _flag("skip_min_seqlen_q", "skip")
_DROPOUT_BWD = Choice(
    ("dropout", "dropout_variant", "store_randval"),
    {(False, "no", False): "_ndropout"}
    | {
        (True, variant, stores): f"_dropout_{variant}{'_storerandval' if stores else ''}"
        for variant in ("wg16", "wg32")
        for stores in (False, True)
    },
)

Implied = Callable[[Row], dict[str, Any]]


def _v_is_n1(row: Row) -> dict[str, Any]:
    return {"hdim_v": row["tile_n1"]}


def _v_is_q(row: Row) -> dict[str, Any]:
    return {"hdim_v": row["hdim_q"]}


def _paged(row: Row) -> dict[str, Any]:
    return {"hdim_v": row["tile_n1"], "paged_kv": True}


def _paged_by_token(row: Row) -> dict[str, Any]:
    """The one form of paging that batch_prefill had at first: pages of one token, in SGLang's table."""
    layout = {"kv_memory_layout": "linear", "kv_lookup_table": "sglang"}
    return _paged(row) | layout | {"page_size": 1, "kv_load_mode": "bload"}


def _third_gemm(row: Row) -> dict[str, int]:
    """The warp tile of dQ = dS K: CK takes the first one's, no deeper than the unroll."""
    return {
        "warp_m2": row["warp_m0"],
        "warp_n2": row["warp_n0"],
        "warp_k2": min(row["warp_k0"], row["tile_bwd6"]),
    }


def _bwd(row: Row) -> dict[str, Any]:
    return {"hdim_v": row["hdim_q"], **_third_gemm(row)}


def _rows_of_64(row: Row) -> dict[str, Any]:
    return {"hdim_v": row["hdim_q"], "tile_m0": 64}


def joined_sql(parts: Sequence[Part]) -> str:
    """SQL expression of some pieces together: one printf, several times faster than a chain of ``||``."""
    pieces = [part.printf() for part in parts]
    arguments = [argument for _, arguments in pieces for argument in arguments]
    return f"printf({', '.join([sql_literal(''.join(text for text, _ in pieces)), *arguments])})"


@cache
def _pattern(parts: tuple[Part, ...]) -> re.Pattern[str]:
    return re.compile("".join(f"({part.regex()})" for part in parts))


@dataclass(frozen=True, eq=False)
class Grammar:
    """How the kernels of one family are called, and which traits the name implies without showing them."""

    family: Family
    parts: tuple[Part, ...]
    implied: Implied

    def name(self, row: Row) -> str:
        """The canonical name of a row of traits plus ``target``."""
        return "".join(part.text(row) for part in self.parts)

    def sql(self) -> str:
        """SQL expression of the name over the kernel columns."""
        return joined_sql(self.parts)

    def parse(self, name: str) -> dict[str, Any] | None:
        """Every trait plus ``target``, or None when ``name`` is not of this family."""
        found = _pattern(self.parts).fullmatch(name)
        if found is None:
            return None
        traits: dict[str, Any] = {trait.name: trait.default for trait in TRAITS.values()}
        traits["family"] = self.family.value
        for part, text in zip(self.parts, found.groups(), strict=True):
            traits |= part.read(text)
        return traits | self.implied(traits)


def _grammar(family: Family, implied: Implied, *parts: Part | Sequence[Part]) -> Grammar:
    flat: list[Part] = [Literal(f"fmha_{'bwd' if family is Family.BWD_DQ_DK_DV else family}"), *_HEAD]
    for part in parts:
        flat.extend(part if isinstance(part, Sequence) else (part,))
    return Grammar(family, (*flat, Target()), implied)


_MODE = Word("_", "mode")
_1D: tuple[Part, ...] = (Extents("_b", ("tile_m0",)), _MODE, Extents("_o", ("block_per_cu",)))

GRAMMARS: Mapping[Family, Grammar] = MappingProxyType(
    {
        grammar.family: grammar
        for grammar in (
            _grammar(
                Family.FWD, _v_is_n1, _MODE, Literal("_"), _TILE, _LOOP, _LSE, _DROPOUT, _SKIP, _QSCALE,
                _flag("trload", "trload"), _SINK,
            ),
            _grammar(
                Family.FWD_SPLITKV, _v_is_q, _MODE, Literal("_"), _TILE, _LOOP, _LSE, _SQUANT,
                _flag("paged_kv", "pagedkv"), _SINK,
            ),
            _grammar(
                Family.FWD_SPLITKV_COMBINE, _v_is_q, _MODE, Extents("_b", ("tile_n1",)), _OCCUPANCY,
                Word("_", "pipeline"), Pads({"pad_s": "s", "pad_dv": "dv"}), _LSE, _SQUANT,
            ),
            _grammar(
                Family.FWD_PAGEDKV, _v_is_n1, _MODE, Literal("_"), _TILE, _LOOP, _LSE, _SKIP, _SQUANT,
                _flag("paged_kv", "pagedkv"), _SINK,
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
                Pads({"pad_d": "d", "pad_dv": "dv"}, amounts={1: "1", 8: "8"}), _BIAS, _flag("dbias", "dbias"), _MASK,
                _DROPOUT_BWD, _flag("deterministic", "deterministic"), _flag("trload", "trload"),
            ),
            _grammar(
                Family.BWD_CONVERT_DQ, _v_is_q, _1D, Pads({"pad_s": "s", "pad_d": "d"}),
                _flag("deterministic", "deterministic"),
            ),
        )
    }
)  # fmt: skip
"""The name grammar of every family, as the newest revision and our own kernels have it."""

_OLDER: Mapping[str, Mapping[Family, Grammar]] = MappingProxyType(
    {
        "2025-07": {
            grammar.family: grammar
            for grammar in (
                _grammar(Family.FWD, _v_is_n1, _MODE, Literal("_"), _TILE, _LOOP, _LSE, _DROPOUT, _SKIP, _SQUANT),
                _grammar(
                    Family.FWD_SPLITKV, _v_is_q, _MODE, Literal("_"), _TILE, _LOOP, _LSE, _SQUANT,
                    _flag("paged_kv", "pagedkv"),
                ),
                _grammar(
                    Family.FWD_PAGEDKV, _v_is_n1, _MODE, Literal("_"), _TILE, _LOOP, _LSE, _SKIP, _SQUANT,
                    _flag("paged_kv", "pagedkv"),
                ),
                _grammar(
                    Family.BATCH_PREFILL, _paged_by_token, _MODE, Literal("_"), _TILE, _LOOP, _LSE, _DROPOUT, _SQUANT
                ),
                _grammar(
                    Family.BWD_DOT_DO_O, _rows_of_64, _MODE, Extents("_o", ("block_per_cu",)),
                    Pads({"pad_s": "s", "pad_dv": "dv"}),
                ),
                _grammar(
                    Family.BWD_DQ_DK_DV, _bwd, _MODE, Literal("_"), _TILE_BWD[:-1], Word("_", "pipeline"), _PADS, _BIAS,
                    _flag("dbias", "dbias"), _MASK, _DROPOUT_BWD, _flag("deterministic", "deterministic"),
                ),
                _grammar(
                    Family.BWD_CONVERT_DQ, _v_is_q, Extents("_b", ("tile_m0", "tile_n0")), _MODE,
                    Extents("_o", ("block_per_cu",)), Pads({"pad_s": "s", "pad_d": "d"}),
                    _flag("deterministic", "deterministic"),
                ),
            )
        }
    }
)  # fmt: skip
"""The families that older revisions call differently."""


def grammar_of(family: Family, revision: str) -> Grammar:
    """How ``revision`` calls the kernels of ``family``."""
    return _OLDER.get(revision, {}).get(family, GRAMMARS[family])


_TILE_APPENDKV: tuple[Part, ...] = (Extents("b", ("tile_m0", "tile_n0", "tile_k0", "tile_n1")), _OCCUPANCY)
_TILE_COMBINE: tuple[Part, ...] = (Extents("b", ("tile_n1",)), _OCCUPANCY)


def parse_tile(text: str) -> dict[str, int]:
    """The tile traits that CK's tile notation states: ``b128x128x32x128x32x128_r4x1x1_r4x1x1_w32x32x16_w32x32x16``.

    Raises:
        UsageError: ``text`` is none of the tile notations.
    """
    for parts in (_TILE_BWD, _TILE, _TILE_APPENDKV, _TILE_COMBINE):
        found = _pattern(parts).fullmatch(text)
        if found is not None:
            traits: dict[str, int] = {}
            for part, piece in zip(parts, found.groups(), strict=True):
                traits |= part.read(piece)
            return traits | (_third_gemm(traits) if parts is _TILE_BWD else {})
    raise UsageError(
        f"{text!r} is not a tile.",
        hint="Tiles are written as in kernel names: b64x64x32x64x32x64_r4x1x1_r4x1x1_w16x16x16_w16x16x16.",
    )


def parse_name(name: str) -> dict[str, Any]:
    """Every trait of the kernel that ``name`` denotes at whichever revision, plus ``target``.

    Raises:
        UsageError: no family has such a name.
    """
    older = (grammar for grammars in _OLDER.values() for grammar in grammars.values())
    for grammar in (*GRAMMARS.values(), *older):
        traits = grammar.parse(name)
        if traits is not None:
            return traits
    raise UsageError(f"{name!r} is not a kernel name", hint="`catalog query` prints names; see the column `name`.")
