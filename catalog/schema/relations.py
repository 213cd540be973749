"""Relations: tables of facts that an enumeration joins, and quantities: expressions that its rules may name.

A relation has some traits as columns. Enumerations join their relations naturally: columns of the same name must be
equal, and null in a row matches any value. So an axis of a sweep, the table of an arch's matrix instructions and a
table of pipelines are all relations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from catalog.schema.traits import Traits, TraitValue

Cell = TraitValue | None

_TOKEN = re.compile(r"'(?:[^']|'')*'|\b[A-Za-z_]\w*\b")
"""A string, or a name, in an SQL expression."""


class Group(BaseModel):
    """Rows that share the values of the first column: each of ``of`` with each of ``rows`` of the other columns."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    of: list[TraitValue]
    rows: list[Group | Cell | list[Cell]]


class Relation(BaseModel):
    """A table of facts.

    A row is a list of values in the order of ``columns``, in which numbers of neighbouring columns may be joined by x
    (``32x32x8``). It may also be written as one such value, as null (any values), or together with others as a
    :class:`Group`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    about: str | None = None
    source: str | None = None
    columns: list[str] = Field([], description="traits; a spec that adds rows to a base's relation leaves them out")
    rows: list[Group | Cell | list[Cell]] = []
    quirk: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> Relation:
        for row in self.cells() if self.columns else ():
            if len(row) != len(self.columns):
                raise ValueError(f"row {list(row)} has {len(row)} values for {len(self.columns)} columns")
        return self

    def cells(self) -> Iterator[tuple[Cell, ...]]:
        """Every row as one value per column; None matches any value."""
        return _rows(self.rows, len(self.columns))

    def problem(self, traits: Traits) -> str:
        """What is wrong with the columns or values for an operation with these ``traits``; empty if nothing is."""
        if not self.columns:
            return "columns are missing"
        for column in self.columns:
            if column not in traits:
                return f"no trait is called {column!r}"
        for row in self.cells():
            for column, value in zip(self.columns, row, strict=True):
                if value is not None and not traits[column].admits(value):
                    return f"{column} cannot be {value!r}; allowed: {traits[column].domain}"
        return ""


def _rows(rows: Iterable[Group | Cell | list[Cell]], width: int) -> Iterator[tuple[Cell, ...]]:
    for row in rows:
        if isinstance(row, Group):
            others = tuple(_rows(row.rows, width - 1))
            yield from ((first, *other) for first in row.of for other in others)
        elif row is None:
            yield (None,) * width
        else:
            listed = row if isinstance(row, list) else [row]
            yield tuple(listed) if len(listed) == width else tuple(chain.from_iterable(map(_numbers, listed)))


def _numbers(cell: Cell) -> tuple[Cell, ...]:
    joined = isinstance(cell, str) and re.fullmatch(r"\d+(x\d+)+", cell)
    return tuple(map(int, cell.split("x"))) if isinstance(cell, str) and joined else (cell,)


def expanded(expression: str, quantities: Mapping[str, str]) -> str:
    """``expression`` over columns alone: each quantity is replaced by its own expression, in parentheses.

    A quantity may name those before it.
    """
    known: dict[str, str] = {}
    for name, own in quantities.items():
        known[name] = f"({_replaced(own, known)})"
    return _replaced(expression, known)


def _replaced(expression: str, known: Mapping[str, Any]) -> str:
    return _TOKEN.sub(lambda token: known.get(token[0], token[0]), expression) if known else expression
