"""The parts of kernel names: each part writes, reads and compiles to SQL the text of some traits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from catalog.schema.traits import Traits

Row = Mapping[str, Any]


def sql_literal(value: str | int | bool) -> str:
    """``value`` as an SQL literal; booleans are 0 and 1."""
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return str(int(value))


class Part(Protocol):
    """A piece of a name."""

    def __hash__(self) -> int:
        """By identity: what a piece reads is cached."""

    @property
    def traits(self) -> tuple[str, ...]:
        """The traits that the piece states."""

    def text(self, row: Row) -> str:
        """The text of the piece for a row of traits."""

    def sql(self) -> str:
        """SQL expression of the same piece over the kernel columns."""

    def printf(self) -> tuple[str, tuple[str, ...]]:
        """The same piece as a printf format and the SQL of its arguments."""

    def regex(self, traits: Traits) -> str:
        """Pattern, without capturing groups, that matches every text of the piece; ``traits`` are the operation's."""

    def read(self, text: str) -> dict[str, Any]:
        """The traits that ``text`` states."""


@dataclass(frozen=True, eq=False)
class Literal:
    """Fixed text."""

    literal: str
    traits = ()

    def text(self, row: Row) -> str:
        return self.literal

    def sql(self) -> str:
        return sql_literal(self.literal)

    def printf(self) -> tuple[str, tuple[str, ...]]:
        return self.literal.replace("%", "%%"), ()

    def regex(self, traits: Traits) -> str:
        return re.escape(self.literal)

    def read(self, text: str) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, eq=False)
class Extents:
    """Numbers joined by ``x`` behind a prefix: ``b128x64``. Left out when the first one equals ``absent``."""

    prefix: str
    fields: tuple[str, ...]
    absent: int | None = None

    @property
    def traits(self) -> tuple[str, ...]:
        return self.fields

    def text(self, row: Row) -> str:
        if row[self.fields[0]] == self.absent:
            return ""
        return self.prefix + "x".join([str(row[field]) for field in self.fields])

    def sql(self) -> str:
        shown = sql_literal(self.prefix) + " || " + " || 'x' || ".join(self.fields)
        return shown if self.absent is None else f"iif({self.fields[0]} = {self.absent}, '', {shown})"

    def printf(self) -> tuple[str, tuple[str, ...]]:
        if self.absent is not None:
            return "%s", (self.sql(),)
        return self.prefix + "x".join(["%d"] * len(self.fields)), self.fields

    def regex(self, traits: Traits) -> str:
        shown = re.escape(self.prefix) + "x".join([r"-?\d+"] * len(self.fields))
        return shown if self.absent is None else f"(?:{shown})?"

    def read(self, text: str) -> dict[str, Any]:
        if not text:
            return {self.fields[0]: self.absent}
        numbers = text[len(self.prefix) :].split("x")
        return {field: int(number) for field, number in zip(self.fields, numbers, strict=True)}


@dataclass(frozen=True, eq=False)
class Word:
    """The value of one enumerated trait, behind a prefix. Left out when it equals ``absent``."""

    prefix: str
    field: str
    absent: str | None = None

    @property
    def traits(self) -> tuple[str, ...]:
        return (self.field,)

    def text(self, row: Row) -> str:
        return "" if row[self.field] == self.absent else f"{self.prefix}{row[self.field]}"

    def sql(self) -> str:
        shown = f"{sql_literal(self.prefix)} || {self.field}"
        return shown if self.absent is None else f"iif({self.field} = {sql_literal(self.absent)}, '', {shown})"

    def printf(self) -> tuple[str, tuple[str, ...]]:
        return (f"{self.prefix}%s", (self.field,)) if self.absent is None else ("%s", (self.sql(),))

    def regex(self, traits: Traits) -> str:
        shown = re.escape(self.prefix) + _any_of(map(str, traits[self.field].values))
        return shown if self.absent is None else f"(?:{shown})?"

    def read(self, text: str) -> dict[str, Any]:
        return {self.field: text[len(self.prefix) :] if text else self.absent}


@dataclass(frozen=True, eq=False)
class Choice:
    """One text for each combination of values of some traits."""

    fields: tuple[str, ...]
    texts: Mapping[tuple[Any, ...], str]

    @property
    def traits(self) -> tuple[str, ...]:
        return self.fields

    def text(self, row: Row) -> str:
        return self.texts[tuple([row[field] for field in self.fields])]

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

    def regex(self, traits: Traits) -> str:
        return _any_of(self.texts.values())

    def read(self, text: str) -> dict[str, Any]:
        values = next(values for values, shown in self.texts.items() if shown == text)
        return dict(zip(self.fields, values, strict=True))


@dataclass(frozen=True, eq=False)
class Pads:
    """The padded axes: ``_psskddv``, or ``none`` when no axis is padded.

    ``amounts`` maps an amount of padding to its text behind the axis; backward names show each one: ``_pd8dv1``.
    """

    letters: Mapping[str, str]
    none: str = "_npad"
    amounts: Mapping[int, str] = field(default_factory=lambda: {1: "", 8: "8"})

    @property
    def traits(self) -> tuple[str, ...]:
        return tuple(self.letters)

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

    def regex(self, traits: Traits) -> str:
        return f"(?:_p{self._axes('(?:')}|{re.escape(self.none)})"

    def read(self, text: str) -> dict[str, Any]:
        if text == self.none:
            return dict.fromkeys(self.letters, 0)
        found = re.fullmatch("_p" + self._axes("("), text)
        assert found is not None, f"{text!r} is padding as the name has it"  # noqa: S101
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
    """The codegen target at the end of a name: ``_gfx950``; nothing when empty. ``pattern`` matches valid targets."""

    pattern: str
    traits = ()

    def text(self, row: Row) -> str:
        return f"_{row['target']}" if row["target"] else ""

    def sql(self) -> str:
        return "iif(target = '', '', '_' || target)"

    def printf(self) -> tuple[str, tuple[str, ...]]:
        return "%s", (self.sql(),)

    def regex(self, traits: Traits) -> str:
        return self.pattern

    def read(self, text: str) -> dict[str, Any]:
        return {"target": text[1:]}


def _any_of(texts: Any) -> str:
    return "(?:" + "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) + ")"


def flag(field: str, word: str) -> Choice:
    """The part that states whether ``field`` is true: ``_word`` or ``_nword``."""
    return Choice((field,), {(True,): f"_{word}", (False,): f"_n{word}"})


def words(field: str, **texts: str) -> Choice:
    """The part that states the value of ``field``; ``texts`` maps a value to its text."""
    return Choice((field,), {(value,): text for value, text in texts.items()})


def joined_sql(parts: Sequence[Part]) -> str:
    """SQL expression of several pieces together: one printf, several times faster than a chain of ``||``."""
    pieces = [part.printf() for part in parts]
    arguments = [argument for _, arguments in pieces for argument in arguments]
    return f"printf({', '.join([sql_literal(''.join(text for text, _ in pieces)), *arguments])})"
