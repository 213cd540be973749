"""Selection: a problem's traits become one SQL query over the kernels of an arch.

The query asks for signature equality, for hardware validity, for no failed build, and for every applicability rule of
the arch's spec; it orders by the measured median for this very problem, then by the spec's static order, then by kernel
id, so two runs choose alike.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from catalog.errors import SelectionError
from catalog.runtime.narrow import NO_FAILED_BUILD, POPULATION, SIGNATURE, Step, narrow
from catalog.schema.expressions import SELECT_PARAMETERS
from catalog.schema.fields import Family
from catalog.schema.kernel import Kernel
from catalog.schema.problem import Problem
from catalog.schema.stages import required_traits

if TYPE_CHECKING:
    from catalog.rules.explain import Finding

Traits = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Candidate:
    """An applicable kernel, with its measured median for the problem in ms, if there is one."""

    kernel: Kernel
    median_ms: float | None


@dataclass(frozen=True)
class Population:
    """Which kernels may be selected, and facts of the device they are for.

    ``whole``: it was not restricted to receipts or by a sweep file.
    """

    arch: str
    revision: str
    space: str
    mask_impl: str
    compute_units: int | None = None
    whole: bool | int = True

    @property
    def identity(self) -> dict[str, str]:
        """The columns that tell these kernels from others."""
        return {
            "arch": self.arch,
            "revision": self.revision,
            "space": self.space,
            "mask_impl": self.mask_impl,
        }


class Selector:
    """The selection query of one population, made once from its rules in the registry.

    ``forbidding`` finds the constraints that allow no kernel of some traits.
    """

    def __init__(
        self, connection: sqlite3.Connection, population: Population, forbidding: Callable[[Traits], list[Finding]]
    ) -> None:
        self._forbidding = forbidding
        self._connection = connection
        self._population = population
        self._rules: dict[Family, list[sqlite3.Row]] = {}
        self._queries: dict[Family, str] = {}

    def candidates(self, problem: Problem, family: Family, limit: int = 1) -> list[Candidate]:
        """The best ``limit`` kernels of ``family`` for ``problem``, best first.

        Raises:
            SelectionError: no kernel answers the problem; says which trait or rule leaves none.
        """
        found = self.kept(problem, family, limit)
        if not found:
            raise self._nothing(problem, family)
        return found

    def kept(self, problem: Problem, family: Family, limit: int) -> list[Candidate]:
        """As :meth:`candidates`, but an empty list when no kernel answers the problem."""
        parameters = self._parameters(problem, family) | {"limit": limit}
        rows = self._connection.execute(self._query(family), parameters)
        return [Candidate(Kernel.from_row(row), row["median_ms"]) for row in rows]

    def steps(self, problem: Problem, family: Family) -> tuple[Step, ...]:
        """How the kernels of the population narrow down to those that answer the problem."""
        return narrow(self._connection, self._parameters(problem, family), self._rules_of(family, "applicability"))

    def _parameters(self, problem: Problem, family: Family) -> dict[str, Any]:
        population = self._population
        required = required_traits(problem, family, population.revision, population.mask_impl)
        return {
            **{f"want_{name}": value for name, value in required.items()},
            **population.identity,
            "problem": problem.key,
            **{name: getattr(problem, name) for name in SELECT_PARAMETERS if name != "compute_units"},
            "compute_units": population.compute_units,
        }

    def _query(self, family: Family) -> str:
        if family not in self._queries:
            rules = [f"({rule['expr']})" for rule in self._rules_of(family, "applicability")]
            order = [rule["expr"] for rule in self._rules_of(family, "order")]
            self._queries[family] = (
                "SELECT kernel.*, measured.median_ms FROM kernel LEFT JOIN ("
                "  SELECT kernel_id, min(median_ms) AS median_ms FROM timing"
                "  JOIN problem ON problem.id = problem_id JOIN device ON device.id = device_id"
                "  WHERE problem.key = :problem AND device.arch = :arch GROUP BY kernel_id"
                ") AS measured ON measured.kernel_id = kernel.id "
                f"WHERE {' AND '.join([POPULATION, SIGNATURE, 'hw_valid', NO_FAILED_BUILD, *rules])} "
                f"ORDER BY {', '.join(['median_ms IS NULL', 'median_ms', *order, 'kernel.id'])} LIMIT :limit"
            )
        return self._queries[family]

    def _rules_of(self, family: Family, kind: str) -> list[sqlite3.Row]:
        if family not in self._rules:
            self._rules[family] = self._connection.execute(
                "SELECT * FROM rule WHERE arch = ? AND revision = ? AND space = ? AND scope = ? ORDER BY position",
                (self._population.arch, self._population.revision, self._population.space, family.value),
            ).fetchall()
        return [rule for rule in self._rules[family] if rule["kind"] == kind]

    def _nothing(self, problem: Problem, family: Family) -> SelectionError:
        arch = self._population.arch
        steps = self.steps(problem, family)
        reason = _rejections(steps)
        if steps[-1].kind == "trait":
            required = required_traits(problem, family, self._population.revision, self._population.mask_impl)
            rules = {finding.id: finding for finding in self._forbidding(required)}
            told = [f"{rule.id} forbids {', '.join(rule.traits)}: {rule.reason}" for rule in rules.values()]
            reason = "; ".join([steps[-1].reason, *told])
        return SelectionError(
            f"No {family} kernel of {arch} answers the problem {problem.key}: {reason}.",
            hint=f"What there is: catalog query \"family='{family}'\" --arch {arch}",
        )


def _rejections(steps: Sequence[Step]) -> str:
    """The rules that reject kernels of the right signature, the strictest first."""
    total = next(step.left for step in reversed(steps) if step.kind == "trait")
    biting = sorted((step for step in steps if step.kind != "trait" and step.rejects), key=lambda step: -step.rejects)
    told = "; ".join(f"{step.id} rejects {step.rejects} ({step.reason})" for step in biting)
    return f"of {total} kernels with its signature, {told}"
