"""How a problem narrows an arch's kernels down: what each trait and each rule leaves, with counts."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from catalog.ops import operation_of
from catalog.schema.problem import Problem
from catalog.schema.trait_text import shown

POPULATION = (
    "kernel.arch = :arch AND kernel.revision = :revision AND kernel.space = :space AND kernel.mask_impl = :mask_impl"
)
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
    """One step of the narrowing: ``left`` kernels survive it and all steps before it.

    ``rejects``: a trait's, of those that were left before it; any other's, alone, of all with the right signature.
    """

    kind: Literal["trait", "applicability", "hardware", "build"]
    id: str
    rejects: int
    left: int
    reason: str
    source: str


def signature_of(problem: Problem) -> str:
    """The condition that a kernel has the traits which ``problem`` requires, as parameters ``want_...``."""
    return " AND ".join(f"kernel.{name} = :want_{name}" for name in operation_of(problem).required)


def narrow(
    connection: sqlite3.Connection, problem: Problem, parameters: Mapping[str, Any], rules: Sequence[sqlite3.Row]
) -> tuple[Step, ...]:
    """The steps: signature traits one after the other, each applicability rule, the hardware, quarantine, builds.

    ``parameters`` are those of the selection query, ``rules`` the applicability rows of table ``rule``. A trait that
    leaves no kernel is the last step.
    """
    steps = list(_traits(connection, operation_of(problem).required, parameters))
    if steps[-1].left:
        steps += _rules(connection, signature_of(problem), parameters, rules)
    return tuple(steps)


def _traits(connection: sqlite3.Connection, required: Sequence[str], parameters: Mapping[str, Any]) -> Iterator[Step]:
    where = POPULATION
    for name in required:
        wanted = parameters[f"want_{name}"]
        counts = dict(
            connection.execute(f"SELECT {name}, count(*) FROM kernel WHERE {where} GROUP BY 1", parameters).fetchall()
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
    connection: sqlite3.Connection, signature: str, parameters: Mapping[str, Any], rules: Sequence[sqlite3.Row]
) -> Iterator[Step]:
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
    expressions = [f"({expr})" for _, _, expr, _, _ in tests]
    sequences = [" AND ".join(expressions[: i + 1]) for i in range(len(tests))]
    counts = ", ".join(f"count(*) FILTER (WHERE {condition})" for condition in expressions + sequences)
    total, *passing = connection.execute(
        f"SELECT count(*), {counts} FROM kernel WHERE {POPULATION} AND {signature}", parameters
    ).fetchone()
    for (kind, name, _, reason, source), alone, left in zip(
        tests, passing[: len(tests)], passing[len(tests) :], strict=True
    ):
        yield Step(kind, name, total - alone, left, reason, source)
