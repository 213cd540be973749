"""Name grammars: the names of a family's kernels are written, read and compiled to SQL from the same parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from catalog.schema.name_parts import Part, Row, joined_sql
from catalog.schema.traits import Traits

_MOST = 2**31
"""Limit of the numbers in a name."""

Implied = Callable[[Row], dict[str, Any]]
"""Computes the traits that a name implies from the traits that it shows."""


class Unread(NamedTuple):
    """Where a grammar fails to read a name: the first part that is new, and where a trait for it would go."""

    part: str
    place: str


@dataclass(frozen=True, eq=False)
class Grammar:
    """The names of the kernels of one family, and the traits that a name implies without showing them.

    Kernels that differ only in ``hidden`` traits share a name, which is read as the kernel with the defaults.
    """

    all_traits: Traits
    family: str
    parts: tuple[Part, ...]
    implied: Implied = lambda _row: {}
    hidden: frozenset[str] = frozenset()

    @cached_property
    def shown(self) -> frozenset[str]:
        """The traits that a name shows."""
        return frozenset(trait for part in self.parts for trait in part.traits)

    @cached_property
    def traits(self) -> frozenset[str]:
        """The traits of the family's kernels: those shown in the name, and those implied by it."""
        return self.shown.union(self.implied(dict.fromkeys(self.all_traits, 0)))

    def name(self, row: Row) -> str:
        """The canonical name for a row of traits plus ``target``."""
        return "".join([part.text(row) for part in self.parts])

    def sql(self) -> str:
        """SQL expression of the name over the kernel columns."""
        return joined_sql(self.parts)

    def matches(self, name: str) -> bool:
        """Whether ``name`` consists of the grammar's parts; their values may still be out of range."""
        return _pattern(self.parts, self.all_traits).fullmatch(name) is not None

    def parse(self, name: str) -> dict[str, Any] | None:
        """Every trait plus ``target``, or None when ``name`` does not belong to this family."""
        shown = read_parts(self.parts, name, self.all_traits)
        if shown is None:
            return None
        traits = self._defaults | shown
        return traits | self.implied(traits)

    @cached_property
    def _defaults(self) -> dict[str, Any]:
        return {trait.name: trait.default for trait in self.all_traits.values()} | {
            "family": str(self.family),
            "target": "",
        }

    def reads(self, name: str) -> int:
        """The number of characters at the beginning of ``name`` that the grammar knows."""
        return self._read(name)[1]

    def unread(self, name: str) -> Unread:
        """The first part of ``name`` that the grammar does not know, for a name that :meth:`parse` cannot read."""
        place, read = self._read(name)
        rest = name[read:]
        part, end = self._new_part(rest, place)
        return Unread(part, self._place(place, end, part))

    @cached_property
    def _regexes(self) -> tuple[str, ...]:
        return tuple(part.regex(self.all_traits) for part in self.parts)

    def _read(self, name: str) -> tuple[int, int]:
        """The number of parts that ``name`` begins with, without empty ones at the end, and their characters."""
        begun = self._beginning.match(name)
        pieces = begun.groups() if begun is not None else ()
        number = max((place for place, piece in enumerate(pieces, start=1) if piece), default=0)
        return number, sum(len(piece) for piece in pieces[:number])

    @cached_property
    def _beginning(self) -> re.Pattern[str]:
        """The pattern of as many parts as possible."""
        nested = ""
        for regex in reversed(self._regexes):
            nested = f"({regex})(?:{nested})?" if nested else f"({regex})"
        return re.compile(nested)

    def _new_part(self, rest: str, place: int) -> tuple[str, int]:
        """The new part at the beginning of ``rest``, and the number of the known part that follows it.

        ``place`` is the number of the known part expected there. The new part ends where all that follows is known, or
        else where the nearest known part begins.
        """
        found: list[tuple[str, int]] = []
        for end in range(place, len(self.parts) + 1):
            known = _compiled(("(?:.*?)", *self._regexes[end:])).fullmatch(rest)
            if known is None and end < len(self.parts):
                known = _compiled(("(?:.*?)", self._regexes[end])).match(rest)
                known = known if known is not None and known.group(2) else None
            if known is not None:
                found.append((known.group(1), end))
        return min(found, key=lambda one: len(one[0]), default=(rest, len(self.parts)))

    def _place(self, place: int, end: int, part: str) -> str:
        if place < 2:  # only the literal that stands for the family, if that
            return "a family"
        if place == len(self.parts):
            return "after its end" if part else "a number"
        replaced = " and ".join(filter(None, map(_about, self.parts[place:end])))
        if replaced and not part:
            return f"{replaced}: missing"
        if replaced and end == place + 1:
            return f"a value of {replaced}"
        before = next(filter(None, map(_about, reversed(self.parts[:place]))))
        after = next(filter(None, map(_about, self.parts[end:])), "")
        return f"between {before} and {after}" if after else f"after {before}"


def read_parts(parts: Sequence[Part], text: str, traits: Traits) -> dict[str, Any] | None:
    """The traits that ``text`` states if it consists of ``parts``, otherwise None."""
    found = _pattern(tuple(parts), traits).fullmatch(text)
    if found is None:
        return None
    stated: dict[str, Any] = {}
    for part, piece in zip(parts, found.groups(), strict=True):
        read = _read_piece(part, piece)
        if read is None:
            return None
        stated.update(read)
    return stated


@lru_cache(maxsize=65_536)
def _read_piece(part: Part, piece: str) -> Mapping[str, Any] | None:
    """The traits that ``piece`` states, or None if they are written differently or a number is out of range."""
    read = part.read(piece)
    in_range = all(abs(value) <= _MOST for value in read.values() if isinstance(value, int))
    return MappingProxyType(read) if in_range and part.text(read) == piece else None


def _about(part: Part) -> str:
    """The traits of a part in words; empty for fixed text."""
    traits = part.traits
    return f"{traits[0]} to {traits[-1]}" if len(traits) > 2 else " and ".join(traits)


@cache
def _pattern(parts: tuple[Part, ...], traits: Traits) -> re.Pattern[str]:
    return _compiled(tuple(part.regex(traits) for part in parts))


@cache
def _compiled(regexes: tuple[str, ...]) -> re.Pattern[str]:
    """The pattern of several parts, one group for each."""
    return re.compile("".join(f"({regex})" for regex in regexes))
