"""Results of a measurement: rows of labels and figures, compared with targets; a table, a summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Label = str | int

NO_LABELS: Mapping[str, tuple[Label, ...]] = {}
_MISSING = "-"
_LARGE = 100


@dataclass(frozen=True)
class Row:
    """One problem: its labels, and its figures by name, with the unit in the name.

    ``runs`` is the number of timed runs of each side. A figure that does not apply to a problem is absent.
    """

    scenario: str
    labels: Mapping[str, Label]
    figures: Mapping[str, float]
    runs: int
    kernels: str = ""


@dataclass(frozen=True)
class Target:
    """The limit of a figure, for labels among ``of``; a deviation of up to ``noise`` still counts as met."""

    figure: str
    relation: Literal[">=", "<="]
    limit: float
    of: Mapping[str, tuple[Label, ...]] = field(default_factory=lambda: NO_LABELS)
    noise: float = 0.0

    def __str__(self) -> str:
        where = "".join(f" ({', '.join(map(str, allowed))})" for allowed in self.of.values())
        noise = f", {self.noise:g} of noise" if self.noise else ""
        return f"{self.figure} {self.relation} {self.limit:g}{noise}{where}"

    def figure_of(self, row: Row) -> float | None:
        """The row's figure; None where the target does not concern it."""
        concerned = all(row.labels[name] in allowed for name, allowed in self.of.items())
        return row.figures.get(self.figure) if concerned else None

    def is_met(self, figure: float) -> bool:
        """Whether a figure reaches the limit, within noise."""
        return figure >= self.limit - self.noise if self.relation == ">=" else figure <= self.limit + self.noise

    def worst(self, rows: Sequence[Row]) -> Row:
        """The row with the worst figure, met or not."""
        return (min if self.relation == ">=" else max)(rows, key=lambda row: row.figures[self.figure])


def is_met(row: Row, targets: Sequence[Target]) -> bool:
    """Whether a row meets every target that concerns it."""
    figures = ((target, target.figure_of(row)) for target in targets)
    return all(target.is_met(figure) for target, figure in figures if figure is not None)


def print_table(columns: Sequence[str], targets: Sequence[Target], rows: Iterator[Row]) -> list[Row]:
    """Print the columns, labels and figures by name, of each row when it is measured; return the rows."""
    widths: list[int] = []
    done = []
    for row in rows:
        if not widths:
            widths = [max(len(column), 14 if column == "lengths" else 7) for column in columns]
            print(_line([*columns, "met"], [*widths, 3]))
        cells = [_cell(row, column) for column in columns]
        print(_line([*cells, "yes" if is_met(row, targets) else "NO"], [*widths, 3]), flush=True)
        done.append(row)
    return done


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _cell(row: Row, column: str) -> str:
    if column in row.labels:
        return str(row.labels[column])
    figure = row.figures.get(column)
    if figure is None:
        return _MISSING
    if column == "max diff":
        return f"{figure:.1e}"
    return f"{figure:.1f}" if figure >= _LARGE else f"{figure:.2f}"


def summary(targets: Sequence[Target], rows: Sequence[Row]) -> Iterator[str]:
    """One line per target: the number of rows that meet it, and the worst."""
    for target in targets:
        concerned = [row for row in rows if target.figure_of(row) is not None]
        if not concerned:
            continue
        met = sum(target.is_met(row.figures[target.figure]) for row in concerned)
        worst = target.worst(concerned)
        which = " ".join(f"{name}={label}" for name, label in worst.labels.items())
        yield f"{met}/{len(concerned)} met  {target}; worst {worst.figures[target.figure]:.2f}: {which}"
