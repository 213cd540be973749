"""Run a problem and, when asked, hold the result against the float64 reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from catalog.runtime.catalog import Catalog
from catalog.runtime.inputs import make_inputs
from catalog.runtime.plan import Result
from catalog.runtime.reference import reference
from catalog.runtime.tensors import Array
from catalog.runtime.tolerance import max_error, tolerances
from catalog.schema.problem import Problem


@dataclass(frozen=True, slots=True)
class Check:
    """One output against the reference.

    ``max_error`` is the largest absolute error; ``tolerance_used`` the largest error as a share of what rounding may
    make of that element, see :mod:`catalog.runtime.tolerance`.
    """

    tensor: str
    max_error: float
    tolerance_used: float

    @property
    def passed(self) -> bool:
        """Whether every element is within tolerance."""
        return self.tolerance_used <= 1


def check_result(problem: Problem, inputs: Mapping[str, Array], result: Result) -> list[Check]:
    """Every output of ``result`` against the float64 reference for ``inputs``, as they were before the run."""
    expected, allowed = reference(problem, inputs), tolerances(problem, inputs)
    return [
        Check(name, max_error(actual, expected[name]), allowed[name].used(actual, expected[name]))
        for name, actual in result.outputs.items()
    ]


def run_problem(
    catalog: Catalog, problem: Problem, *, arch: str, seed: int, repeats: int, validate: bool
) -> tuple[dict[str, Any], bool]:
    """Select, build and run ``problem`` on seeded random inputs: what to tell of it, and whether it passed.

    Raises:
        CatalogError: as :meth:`Catalog.select` and :meth:`Plan.run`.
    """
    plan = catalog.select(problem, arch=arch)
    inputs = make_inputs(problem, seed)
    # A run writes an updated tensor where it is: the check needs to know what was there.
    updated = {name: inputs[name].copy() for name in inputs if problem.tensors[name].role == "updated"}
    result = plan.run({**inputs, **updated}, repeats=repeats)
    facts: dict[str, Any] = {
        "kernel": " -> ".join(result.kernels),
        "arch": plan.arch,
        "compile_s": round(result.compile_seconds, 2),
        "time_ms": round(result.time_ms, 4),
        "gflops": round(result.tflops * 1e3, 1),
    }
    checks = check_result(problem, inputs, result) if validate else []
    for check in checks:
        facts[f"max_error_{check.tensor}"] = float(f"{check.max_error:.3g}")
        facts[f"tolerance_used_{check.tensor}"] = f"{check.tolerance_used:.1%}"
    passed = all(check.passed for check in checks)
    if validate:
        facts["validation"] = "passed" if passed else "FAILED"
    return facts, passed
