"""Name grammars: the names of a family's kernels are written, read and compiled to SQL from the same parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

from catalog.schema.name_parts import Part, Row, joined_sql
from catalog.schema.traits import Traits

Implied = Callable[[Row], dict[str, Any]]
"""Computes the traits that a name implies from the traits that it shows."""


class Unread(NamedTuple):
    """Where a grammar fails to read a name: the first new part, where its trait would go, the characters before it."""

    part: str
    place: str
    read: int


@dataclass(frozen=True, eq=False)
class Grammar:
    """The names of the kernels of one family, and the traits that a name implies without showing them."""

    all_traits: Traits
    family: str
    parts: tuple[Part, ...]
    implied: Implied = lambda _row: {}

    @cached_property
    def traits(self) -> frozenset[str]:
        """The traits of the family's kernels: those shown in the name, and those implied by it."""
        shown = {trait for part in self.parts for trait in part.traits}
        return frozenset(shown | set(self.implied(dict.fromkeys(self.all_traits, 0))))

    def name(self, row: Row) -> str:
        """The canonical name for a row of traits plus ``target``."""
        return "".join(part.text(row) for part in self.parts)

    def sql(self) -> str:
        """SQL expression of the name over the kernel columns."""
        return joined_sql(self.parts)

    def parse(self, name: str) -> dict[str, Any] | None:
        """Every trait plus ``target``, or None when ``name`` does not belong to this family."""
        shown = read_parts(self.parts, name, self.all_traits)
        if shown is None:
            return None
        defaults = {trait.name: trait.default for trait in self.all_traits.values()}
        traits = defaults | {"family": str(self.family)} | shown
        return traits | self.implied(traits)

    def unread(self, name: str) -> Unread:
        """The first part of ``name`` that the grammar does not know, for a name that :meth:`parse` cannot read."""
        place, read = self._read(name)
        rest = name[read:]
        part, end = self._new_part(rest, place)
        return Unread(part, self._place(place, end, part), read)

    @cached_property
    def _regexes(self) -> tuple[str, ...]:
        return tuple(part.regex(self.all_traits) for part in self.parts)

    def _read(self, name: str) -> tuple[int, int]:
        """The number of parts that ``name`` begins with, without empty ones at the end, and their characters."""
        for number in range(len(self.parts), 0, -1):
            begun = _compiled(self._regexes[:number]).match(name)
            if begun is not None and begun.group(number):
                return number, begun.end()
        return 0, 0

    def _new_part(self, rest: str, place: int) -> tuple[str, int]:
        """The new part at the beginning of ``rest``, and the number of the known part that follows it.

        ``place`` is the number of the known part expected there. The new part ends where all that follows is known, or
        else where the nearest known part begins.
        """
        ends = range(place, len(self.parts) + 1)
        for end in ends:
            known = _compiled(("(?:.*?)", *self._regexes[end:])).fullmatch(rest)
            if known is not None:
                return known.group(1), end
        found = [
            (known.group(1), end)
            for end in ends[:-1]
            if (known := _compiled(("(?:.*?)", self._regexes[end])).match(rest)) and known.group(2)
        ]
        return min(found, key=lambda one: len(one[0]), default=(rest, len(self.parts)))

    def _place(self, place: int, end: int, part: str) -> str:
        if place < 2:  # only the literal that stands for the family, if that
            return "a family"
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
        stated |= part.read(piece)
    return stated


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
