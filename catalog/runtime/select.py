"""Selection: a problem's traits become one SQL query over the kernels of an arch.

The query asks for signature equality, for hardware validity, for no failed build, and for every applicability rule of
the arch's spec; it orders by the measured median for this very problem, then by the spec's static order, then by kernel
id, so two runs choose alike.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from catalog.errors import SelectionError
from catalog.schema.fields import TRAITS, Family, Mask
from catalog.schema.kernel import Kernel
from catalog.schema.problem import Problem

_HEAD_DIMS = ("hdim_q", "hdim_v")
"""Compared by the applicability rules: a kernel may be compiled for larger head dims than the problem's."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An applicable kernel, with its measured median for the problem in ms, if there is one."""

    kernel: Kernel
    median_ms: float | None


@dataclass(frozen=True)
class Population:
    """Which kernels may be selected, and facts of the device they are for."""

    arch: str
    revision: str
    space: str
    mask_impl: str
    compute_units: int | None = None


def required_traits(problem: Problem, family: Family, mask_impl: str) -> dict[str, Any]:
    """The signature that a kernel of ``family`` must have to answer ``problem``, head dims aside."""
    traits = {t.name: t.default for t in TRAITS.values() if t.group == "signature" and t.name not in _HEAD_DIMS}
    mask = problem.kernel_mask
    if mask_impl == "simplified" and mask is not Mask.NO:
        mask = Mask.MASK
    return traits | {
        "family": family.value,
        "dtype": problem.dtype.value,
        "mode": problem.mode.value,
        "mask": mask.value,
        "lse": problem.lse,
    }


class Selector:
    """The selection query of one population, made once from its rules in the registry."""

    def __init__(self, connection: sqlite3.Connection, population: Population) -> None:
        self._connection = connection
        self._population = population
        self._rules: dict[Family, list[sqlite3.Row]] = {}
        self._queries: dict[Family, str] = {}

    def candidates(self, problem: Problem, family: Family, limit: int = 1) -> list[Candidate]:
        """The best ``limit`` kernels of ``family`` for ``problem``, best first.

        Raises:
            SelectionError: no kernel answers the problem; says which trait or rule leaves none.
        """
        parameters = self._parameters(problem, family)
        rows = self._connection.execute(self._query(family), parameters | {"limit": limit}).fetchall()
        if not rows:
            raise self._nothing(problem, family, parameters)
        return [Candidate(Kernel.from_row(row), row["median_ms"]) for row in rows]

    def _parameters(self, problem: Problem, family: Family) -> dict[str, Any]:
        population = self._population
        return {
            **{f"want_{name}": value for name, value in required_traits(problem, family, population.mask_impl).items()},
            "arch": population.arch,
            "revision": population.revision,
            "space": population.space,
            "mask_impl": population.mask_impl,
            "compute_units": population.compute_units,
            "problem": problem.key,
            "batch": problem.batch,
            "nhead_q": problem.nhead_q,
            "nhead_k": problem.nhead_k,
            "seqlen_q": problem.seqlen_q,
            "seqlen_k": problem.seqlen_k,
            "hdim_q": problem.hdim_q,
            "hdim_v": problem.hdim_v,
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
                f"WHERE {' AND '.join([_POPULATION, _signature(), 'hw_valid', _NO_FAILED_BUILD, *rules])} "
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

    def _nothing(self, problem: Problem, family: Family, parameters: Mapping[str, Any]) -> SelectionError:
        arch = self._population.arch
        message = f"No {family} kernel of {arch} answers the problem {problem.key}"
        reason = self._trait_without_kernels(family, parameters) or self._rule_without_kernels(family, parameters)
        return SelectionError(
            f"{message}: {reason}.", hint=f"What there is: catalog query \"family='{family}'\" --arch {arch}"
        )

    def _trait_without_kernels(self, family: Family, parameters: Mapping[str, Any]) -> str | None:
        """The first trait whose value no kernel has together with the traits before it."""
        where = _POPULATION
        for name in (name for name in required_traits_order() if f"want_{name}" in parameters):
            narrowed = f"{where} AND {name} = :want_{name}"
            if not self._count(narrowed, parameters):
                values = self._connection.execute(f"SELECT DISTINCT {name} FROM kernel WHERE {where}", parameters)
                there = ", ".join(sorted(str(value) for (value,) in values)) or "none"
                return f"it needs {name}={parameters[f'want_{name}']}, and there is only: {there}"
            where = narrowed
        return None

    def _rule_without_kernels(self, family: Family, parameters: Mapping[str, Any]) -> str:
        """The rules that reject kernels of the right signature, with counts."""
        where = f"{_POPULATION} AND {_signature()}"
        total = self._count(where, parameters)
        rejected = [
            (total - self._count(f"{where} AND ({rule['expr']})", parameters), rule["id"], rule["reason"])
            for rule in self._rules_of(family, "applicability")
        ]
        lines = [f"{rule} rejects {n} ({reason})" for n, rule, reason in sorted(rejected, reverse=True) if n]
        failed = total - self._count(f"{where} AND {_NO_FAILED_BUILD}", parameters)
        if failed:
            lines.append(f"{failed} did not compile (table artifact has their logs; catalog build tries them again)")
        invalid = total - self._count(f"{where} AND hw_valid", parameters)
        if invalid:
            lines.append(f"the hardware cannot run {invalid}")
        return f"of {total} kernels with its signature, " + "; ".join(lines)

    def _count(self, where: str, parameters: Mapping[str, Any]) -> int:
        return int(self._connection.execute(f"SELECT count(*) FROM kernel WHERE {where}", parameters).fetchone()[0])


_POPULATION = (
    "kernel.arch = :arch AND kernel.revision = :revision AND kernel.space = :space AND kernel.mask_impl = :mask_impl"
)
_NO_FAILED_BUILD = (
    "(NOT EXISTS (SELECT 1 FROM artifact WHERE kernel_id = kernel.id AND status = 'failed')"
    " OR EXISTS (SELECT 1 FROM artifact WHERE kernel_id = kernel.id AND status = 'built'))"
)
"""A kernel that did not compile is passed over until some build of it succeeds."""


def required_traits_order() -> tuple[str, ...]:
    """Signature traits in column order, head dims aside."""
    return tuple(t.name for t in TRAITS.values() if t.group == "signature" and t.name not in _HEAD_DIMS)


def _signature() -> str:
    return " AND ".join(f"kernel.{name} = :want_{name}" for name in required_traits_order())
