"""Name grammars: the names of a family's kernels are written, read and compiled to SQL from the same parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from catalog.schema.name_parts import Part, Row, joined_sql
from catalog.schema.traits import Traits

Implied = Callable[[Row], dict[str, Any]]
"""Computes the traits that a name implies from the traits that it shows."""


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
        traits = defaults | {"family": str(self.family), "target": ""} | shown
        return traits | self.implied(traits)


def read_parts(parts: Sequence[Part], text: str, traits: Traits) -> dict[str, Any] | None:
    """The traits that ``text`` states if it consists of ``parts``, otherwise None."""
    found = _pattern(tuple(parts), traits).fullmatch(text)
    if found is None:
        return None
    stated: dict[str, Any] = {}
    for part, piece in zip(parts, found.groups(), strict=True):
        stated |= part.read(piece)
    return stated


@cache
def _pattern(parts: tuple[Part, ...], traits: Traits) -> re.Pattern[str]:
    return re.compile("".join(f"({part.regex(traits)})" for part in parts))
