"""Run a problem and, when asked, hold the result against the float64 reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from catalog.runtime.catalog import Catalog
from catalog.runtime.plan import Result
from catalog.runtime.reference import attention_fwd, max_error, tolerance
from catalog.runtime.tensors import Array, make_inputs
from catalog.schema.problem import Problem


@dataclass(frozen=True, slots=True)
class Check:
    """One output against the reference: the largest absolute error, and whether every element is within tolerance."""

    tensor: str
    max_error: float
    atol: float
    rtol: float
    passed: bool


def check_result(problem: Problem, inputs: dict[str, Array], result: Result) -> list[Check]:
    """Every output of ``result`` against the float64 reference for ``inputs``."""
    o, lse = attention_fwd(problem, **inputs)
    checks = []
    for name, expected in (("o", o), ("lse", lse)):
        if name in result.outputs:
            allowed = tolerance(problem.dtype, name)  # type: ignore[arg-type]
            actual = result.outputs[name]
            checks.append(
                Check(name, max_error(actual, expected), allowed.atol, allowed.rtol, allowed.allows(actual, expected))
            )
    return checks


def run_problem(
    catalog: Catalog, problem: Problem, *, arch: str, seed: int, repeats: int, validate: bool
) -> tuple[dict[str, Any], bool]:
    """Select, build and run ``problem`` on seeded random inputs: what to tell of it, and whether it passed.

    Raises:
        CatalogError: as :meth:`Catalog.select` and :meth:`Plan.run`.
    """
    plan = catalog.select(problem, arch=arch)
    inputs = make_inputs(problem, seed)
    result = plan.run(inputs, repeats=repeats)
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
        facts[f"tolerance_{check.tensor}"] = f"{check.atol:.3g} + {check.rtol:.3g} * |reference|"
    passed = all(check.passed for check in checks)
    if validate:
        facts["validation"] = "passed" if passed else "FAILED"
    return facts, passed
