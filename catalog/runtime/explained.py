"""Explanations as an answer and tables: why a kernel exists or not, and which kernels answer a problem and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from catalog.ops.families import mains, possible_stages
from catalog.schema.lineage import Wanted
from catalog.schema.problem import Problem

if TYPE_CHECKING:
    from catalog.registry.foreign import Rival
    from catalog.rules.explain import Explanation
    from catalog.runtime.catalog import Catalog

Row = Mapping[str, Any]

_FINDINGS = ("kind", "id", "verdict", "traits", "reason", "source", "quirk")
_MATCHES = ("changes", "kernels", "receipts", "name", "id")
_STEPS = ("stage", "kind", "id", "rejects", "left", "reason", "source")
_KEPT = ("stage", "rank", "median_ms", "predicted_ms", "name", "id")


@dataclass(frozen=True)
class Table:
    """Rows that have values for some of the columns."""

    columns: tuple[str, ...]
    rows: Sequence[Row]

    @property
    def values(self) -> list[list[Any]]:
        """The value of each column, None for missing ones, for each row."""
        return [[row.get(column) for column in self.columns] for row in self.rows]


@dataclass(frozen=True)
class Explained:
    """An answer in words, the kernels, the rules behind it, and timings of other projects' kernels."""

    answer: str
    kernels: Table
    rules: Table
    foreign: Table = Table((), ())


def explained_traits(explanation: Explanation) -> Explained:
    """Why kernels with some traits exist or not, as of :meth:`catalog.Catalog.explain`."""
    rules = [
        {**asdict(one), "verdict": one.verdict.value, "traits": " ".join(one.traits)} for one in explanation.findings
    ]
    kernels = [{**asdict(one), "changes": " ".join(one.changes)} for one in explanation.matches]
    nearest = "" if explanation.kernels or not kernels else "\nThe nearest kernels, and what to change for them:"
    return Explained(explanation.summary + nearest, Table(_MATCHES, kernels), Table(_FINDINGS, rules))


def explained_problem(
    catalog: Catalog,
    problem: Problem,
    wanted: Wanted,
    limit: int = 5,
) -> Explained:
    """How many kernels each trait and each rule drops for ``problem``, and the best ``limit`` of those that are left.

    Raises:
        SelectionError, UsageError, SpecError, RegistryError, DeviceError: as :meth:`catalog.Catalog.select`.
    """
    where = wanted.keywords
    counts, steps, kept, base = list[str](), list[Row](), list[Row](), ""
    for family in possible_stages(problem):
        narrowed, candidates = catalog.narrowing(problem, **where, family=family, limit=limit)
        counts.append(f"{narrowed[-1].left:,} {family}")
        steps += [{"stage": family, **asdict(step)} for step in narrowed]
        listed = []
        for one in candidates:
            base = one.kernel.base
            row = {"median_ms": one.median_ms, "predicted_ms": one.predicted_ms}
            listed.append({**row, "name": one.kernel.name, "id": one.kernel.id})
        if candidates and family == mains(problem)[0]:
            listed = _ranked(listed, catalog.choice(problem, **where, limit=limit).rivals)
        kept += [{"stage": family, "rank": rank, **row} for rank, row in enumerate(listed, start=1)]
    answer = f"{', '.join(counts)} kernels answer the problem" + ("; the best, in order:" if kept else ".")
    if base:
        answer = f"The rules and the static order are those of {base}, the nearest known revision.\n{answer}"
    choice = catalog.choice(problem, **where, limit=limit) if kept else None
    if choice is not None and (choice.evidence == "sibling" or choice.learned is not None):
        answer = f"{choice.about}\n{answer}"
    predicted = any(row.get("predicted_ms") is not None for row in kept)
    columns = tuple(name for name in _KEPT if predicted or name != "predicted_ms")
    others = catalog.foreign_timings(problem, wanted.arch)
    foreign = Table(tuple(others[0]) if others else (), others)
    return Explained(answer, Table(columns, kept), Table(_STEPS, steps), foreign)


def _ranked(ours: Sequence[dict[str, Any]], rivals: Sequence[Rival]) -> list[dict[str, Any]]:
    """Our kernels, best first, with the rivals that were timed beside them in their places."""
    ranked = list(ours)
    for rival in reversed(rivals):
        slower = (place for place, row in enumerate(ranked) if (row["median_ms"] or math.inf) > rival.median_ms)
        row = {"median_ms": rival.median_ms, "name": rival.title, "id": rival.id}
        ranked.insert(next(slower, len(ranked)), row)
    return ranked
