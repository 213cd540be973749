"""Quality of selection on measured problems: compared with the static order, and with each problem left out.

catalog tune --shapes smoke && python benchmarks/selection_quality.py [--db FILE] [--arch ARCH]
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from catalog import Catalog, Problem
from catalog.backends import backend_of
from catalog.registry.timings import SOUND, most_measured, nearest
from catalog.runtime.here import resolve_arch
from catalog.runtime.race import choice
from catalog.schema.policy import CONDITION, GRAPH

NEAR = 1.10
"""A choice counts as good if its time is at most this multiple of the best."""


@dataclass(frozen=True)
class Verdict:
    """Times of choices relative to the best kernel of a problem; None if the choice was not measured there."""

    problem: Problem
    static: float | None
    measured: float
    neighbour: float | None


def verdicts(catalog: Catalog, arch: str) -> list[Verdict]:
    """One verdict per measured problem, on the device of ``arch`` with the most timings."""
    device, noise = most_measured(catalog.connection, arch), backend_of(arch).noise
    rows = catalog.connection.execute(
        "SELECT problem.id, key, kernel_id, min(median_ms) FROM timing JOIN problem ON problem.id = problem_id "
        f"WHERE device_id = :device AND {CONDITION} AND {SOUND} GROUP BY problem.id, kernel_id",
        {"device": device, **GRAPH.parameters},
    )
    medians: dict[int, dict[str, float]] = {}
    keys: dict[int, str] = {}
    for number, key, kernel_id, median_ms in rows:
        medians.setdefault(number, {})[kernel_id] = median_ms
        keys[number] = key
    found = []
    for number, times in medians.items():
        problem = Problem(**json.loads(keys[number]))
        best = min(times.values())
        first = catalog.candidates(problem, arch=arch, limit=1, static=True)[0].kernel.id
        other = nearest(catalog.connection, problem, device, GRAPH, others=True)
        there = {} if other is None else {name: ms for name, ms in medians[other.id].items() if name in times}
        left_out = times[choice(there, noise)] if there else None
        found.append(
            Verdict(
                problem,
                static=times[first] / best if first in times else None,
                measured=times[choice(times, noise)] / best,
                neighbour=None if left_out is None else left_out / best,
            )
        )
    return found


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan


def _line(title: str, ratios: Sequence[float]) -> str:
    good = sum(ratio <= NEAR for ratio in ratios)
    worst = max(ratios, default=math.nan)
    return (
        f"{title}: {len(ratios)} problems, {_mean(ratios):.3f} times the best on geometric mean, worst {worst:.2f}; "
        f"{good} within {NEAR - 1:.0%} ({good / max(1, len(ratios)):.1%})"
    )


def main() -> None:
    """Print a line for each way to choose, and the problems where the nearest one misleads most."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--db", type=Path, default=None)
    parser.add_argument("--arch", default="host")
    options = parser.parse_args()
    catalog = Catalog(options.db)
    found = verdicts(catalog, resolve_arch(options.arch))
    print(_line("static order     ", [one.static for one in found if one.static is not None]))
    print(_line("measured choice  ", [one.measured for one in found]))
    near = [(one.neighbour, one.problem.key) for one in found if one.neighbour is not None]
    print(_line("nearest, left out", [ratio for ratio, _ in near]))
    for ratio, key in sorted(near, reverse=True)[:5]:
        print(f"  {ratio:.2f}  {key}")
    catalog.close()


if __name__ == "__main__":
    main()
