"""The funnel from a lineage's kernels to those that answer a problem, with counts for each trait and rule."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from catalog.ops import operation
from catalog.registry.views import rows_of
from catalog.schema.lineage import of_lineage
from catalog.schema.trait_text import shown

ROWS = of_lineage("kernel")
_NEWEST_STATUS = (
    "coalesce((SELECT status FROM artifact WHERE kernel_id = kernel.id AND NOT elsewhere "
    "ORDER BY created DESC, rowid DESC LIMIT 1), '')"
)
COMPILES = f"{_NEWEST_STATUS} <> 'failed'"
NOT_QUARANTINED = f"{_NEWEST_STATUS} <> 'quarantined'"
PASSED_OVER = f"{_NEWEST_STATUS} IN ('failed', 'quarantined')"
"""A kernel whose newest build here failed or is quarantined is passed over until its content key changes."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the funnel; ``left`` kernels pass this step and all previous ones.

    ``rejects`` counts, for a trait, the kernels it removes from those left before it; for any other step, all kernels
    of the right signature that the step alone rejects.
    """

    kind: Literal["trait", "applicability", "hardware", "build"]
    id: str
    rejects: int
    left: int
    reason: str
    source: str


@cache
def signature_of(name: str) -> str:
    """SQL condition that a kernel of an operation has the traits in the parameters ``want_...``."""
    return " AND ".join(f"kernel.{trait} = :want_{trait}" for trait in operation(name).required)


def funnel(
    connection: sqlite3.Connection, parameters: Mapping[str, Any], rules: Sequence[sqlite3.Row]
) -> tuple[Step, ...]:
    """The steps: the signature traits in turn, then each applicability rule, the hardware, quarantine, and builds.

    ``parameters`` are those of the selection query, ``rules`` the applicability rows of table ``rule``. If a trait
    leaves no kernel, it is the last step.
    """
    steps = list(_traits(connection, parameters))
    if steps[-1].left:
        steps += _rules(connection, parameters, rules)
    return tuple(steps)


_HARDWARE = "the hardware cannot run them, or they are known to be wrong: `catalog rules --kind hardware`"


def _traits(connection: sqlite3.Connection, parameters: Mapping[str, Any]) -> Iterator[Step]:
    of = str(parameters["operation"])
    table, where = f"{rows_of(of)} AS kernel", ROWS
    for name in operation(of).required:
        wanted = parameters[f"want_{name}"]
        # Grouped by value, so that one query gives the count and, where nothing is left, the values that exist.
        counts = dict(
            connection.execute(f"SELECT {name}, count(*) FROM {table} WHERE {where} GROUP BY 1", parameters).fetchall()
        )
        left = counts.get(wanted, 0)
        there = ", ".join(sorted(map(str, counts))) or "none"
        reason = f"it needs {name}={shown(wanted)}" + (
            f"; available: {there}" if left else f", but the kernels have only: {there}"
        )
        yield Step("trait", name, sum(counts.values()) - left, left, reason, "")
        if not left:
            return
        where = f"{where} AND {name} = :want_{name}"


def _rules(
    connection: sqlite3.Connection, parameters: Mapping[str, Any], rules: Sequence[sqlite3.Row]
) -> Iterator[Step]:
    of = str(parameters["operation"])
    tests: list[tuple[Literal["applicability", "hardware", "build"], str, str, str, str]] = [
        ("applicability", rule["id"], rule["expr"], rule["reason"], rule["source"]) for rule in rules
    ]
    tests += [
        ("hardware", "hw_valid", "hw_valid", _HARDWARE, ""),
        (
            "build",
            "not_quarantined",
            NOT_QUARANTINED,
            "they failed in their first run: catalog cache quarantined lists them, "
            "catalog cache unquarantine releases them",
            "",
        ),
        (
            "build",
            "compiles",
            COMPILES,
            "they did not compile: table artifact has the logs; catalog build tries again",
            "",
        ),
    ]
    # One pass over the rows counts, for each test, those that pass it alone and those that pass it and all before it.
    expressions = [f"({expr})" for _, _, expr, _, _ in tests]
    sequences = [" AND ".join(expressions[: i + 1]) for i in range(len(tests))]
    counts = ", ".join(f"count(*) FILTER (WHERE {condition})" for condition in expressions + sequences)
    total, *passing = connection.execute(
        f"SELECT count(*), {counts} FROM {rows_of(of)} AS kernel WHERE {ROWS} AND {signature_of(of)}", parameters
    ).fetchone()
    for (kind, name, _, reason, source), alone, left in zip(
        tests, passing[: len(tests)], passing[len(tests) :], strict=True
    ):
        yield Step(kind, name, total - alone, left, reason, source)
