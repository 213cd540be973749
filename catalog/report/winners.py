"""Which implementation is the fastest under which circumstances: the catalog's kernels or another project's."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catalog.ops import operation_of, problem_of_key
from catalog.registry import query
from catalog.registry.foreign import HERE
from catalog.registry.sandbox import Limits, Row
from catalog.registry.timings import SOUND
from catalog.schema.policy import Policy
from catalog.settings import settings

OURS = "catalog"
"""The name of the catalog's own kernels in a list of winners."""

Rows = Callable[[str, Mapping[str, Any]], list[Row]]
"""Runs a statement with parameters."""

_PLACE = "problem_id, device_id, measured_as, cold"

_COMPARED = (
    f"SELECT problem.key, device.arch, {_PLACE}, entrant, ms FROM ("
    f"SELECT {_PLACE}, table_name AS entrant, median_ms AS ms, max(measured) FROM foreign_timing "
    f"WHERE format = '{HERE}' AND median_ms IS NOT NULL GROUP BY {_PLACE}, table_name "
    f"UNION ALL SELECT {_PLACE}, '{OURS}', min(median_ms), NULL FROM timing WHERE {SOUND} GROUP BY {_PLACE}"
    ") JOIN problem ON problem.id = problem_id JOIN device ON device.id = device_id "
    f"WHERE ({_PLACE}) IN (SELECT {_PLACE} FROM foreign_timing WHERE format = '{HERE}') "
    "AND device.arch = coalesce(:arch, device.arch) "
    "AND instr(:left_out, ' ' || problem.operation || ' ') = 0 ORDER BY device.arch, problem_id"
)
"""The time of each entrant on each problem where another project's implementation was timed: of ours the fastest."""


@dataclass(frozen=True, slots=True)
class Winner:
    """The fastest implementation under some circumstances, by the geometric mean over the problems measured there.

    ``margin`` is how much longer the runner-up takes, as a share; both are None if nothing else was measured on all of
    these problems.
    """

    arch: str
    policy: Policy
    circumstances: Mapping[str, Any]
    problems: int
    winner: str
    margin: float | None
    runner_up: str | None

    @property
    def row(self) -> Mapping[str, Any]:
        """The values by column."""
        return {
            "arch": self.arch,
            "as": str(self.policy),
            **self.circumstances,
            "problems": self.problems,
            "winner": self.winner,
            "margin": None if self.margin is None else round(self.margin, 3),
            "runner_up": self.runner_up,
        }


def table_of(winners: Sequence[Winner]) -> tuple[list[str], list[list[Any]]]:
    """The columns of all winners, and a row for each."""
    rows = [winner.row for winner in winners]
    ends = ("problems", "winner", "margin", "runner_up")
    begins = dict.fromkeys(("arch", "as", *(name for row in rows for name in row if name not in ends)))
    columns = [*begins, *ends]
    return columns, [[row.get(name) for name in columns] for row in rows]


def winners(rows: Rows, arch: str | None, left_out: Sequence[str] = ()) -> tuple[Winner, ...]:
    """The winners on an arch, or on every arch, by arch, policy and circumstances.

    Args:
        rows: reads the catalog.
        arch: the arch; None: every one.
        left_out: operations that no installed package has.

    Raises:
        QueryError, RegistryError: as :class:`~catalog.registry.query.Session`.
    """
    times: dict[tuple[Any, ...], dict[tuple[int, int], dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    found = rows(_COMPARED, {"arch": arch, "left_out": f" {' '.join(left_out)} "})
    for key, its_arch, problem_id, device_id, measured_as, cold, entrant, ms in found:
        problem = problem_of_key(key)
        circumstances = tuple(operation_of(problem).circumstances(problem).items())
        place = (its_arch, problem.operation, Policy(measured_as, bool(cold)), circumstances)
        times[place][problem_id, device_id][entrant] = ms
    return tuple(
        Winner(place[0], place[2], dict(place[3]), len(problems), *_first(list(problems.values())))
        for place, problems in sorted(times.items())
    )


def _first(problems: Sequence[Mapping[str, float]]) -> tuple[str, float | None, str | None]:
    """The winner of some problems, the share by which the runner-up is slower, and the runner-up."""
    everywhere = set.intersection(*(set(times) for times in problems))
    if not everywhere:
        return _first(problems[:1])
    means = {name: sum(math.log(times[name]) for times in problems) for name in everywhere}
    ranked = sorted(means, key=lambda name: (means[name], name != OURS, name))
    if len(ranked) == 1:
        return ranked[0], None, None
    return ranked[0], math.exp((means[ranked[1]] - means[ranked[0]]) / len(problems)) - 1, ranked[1]


def winners_in(path: Path, arch: str | None, seconds: float) -> tuple[Winner, ...]:
    """As :func:`winners`, of the catalog at ``path``, within ``seconds``.

    Raises:
        QueryError, RegistryError: as :func:`winners`.
    """
    with query.Session(path, Limits(max(seconds, settings().query_timeout), settings().query_memory)) as session:
        return winners(session.rows, arch)


def sections(found: Sequence[Winner]) -> Iterator[tuple[str, list[str], list[list[Any]]]]:
    """The winners of each arch: its name, columns and rows."""
    by_arch: dict[str, list[Winner]] = defaultdict(list)
    for winner in found:
        by_arch[winner.arch].append(winner)
    for arch, its in by_arch.items():
        columns, rows = table_of(its)
        yield arch, columns[1:], [row[1:] for row in rows]
