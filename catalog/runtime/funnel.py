"""The funnel from a lineage's kernels to those that answer a problem: what each trait and rule leaves, with counts."""

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
"""A kernel whose newest build here did not compile, or is quarantined, is passed over while that is its content key."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the funnel: ``left`` kernels survive it and all steps before it.

    ``rejects``: a trait's, of those that were left before it; any other's, alone, of all with the right signature.
    """

    kind: Literal["trait", "applicability", "hardware", "build"]
    id: str
    rejects: int
    left: int
    reason: str
    source: str


@cache
def signature_of(name: str) -> str:
    """The condition that a kernel of an operation has the traits that a problem requires, parameters ``want_...``."""
    return " AND ".join(f"kernel.{trait} = :want_{trait}" for trait in operation(name).required)


def funnel(
    connection: sqlite3.Connection, parameters: Mapping[str, Any], rules: Sequence[sqlite3.Row]
) -> tuple[Step, ...]:
    """The steps: signature traits one after the other, each applicability rule, the hardware, quarantine, builds.

    ``parameters`` are those of the selection query, ``rules`` the applicability rows of table ``rule``. A trait that
    leaves no kernel is the last step.
    """
    steps = list(_traits(connection, parameters))
    if steps[-1].left:
        steps += _rules(connection, parameters, rules)
    return tuple(steps)


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
            f"; there is: {there}" if left else f", and there is only: {there}"
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
        ("hardware", "hw_valid", "hw_valid", "the hardware cannot run them: `catalog rules --kind hardware`", ""),
        (
            "build",
            "not_quarantined",
            NOT_QUARANTINED,
            "they failed in their first run: catalog cache quarantined lists them, "
            "catalog cache unquarantine gives them another chance",
            "",
        ),
        (
            "build",
            "compiles",
            COMPILES,
            "they did not compile: table artifact has their logs; catalog build tries them again",
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
