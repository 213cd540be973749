"""Comparison of results with the float64 reference, and runs of a problem with or without it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from catalog.backends import backend_of
from catalog.ops import operation_of
from catalog.runtime.inputs import make_inputs
from catalog.runtime.memory import check_memory, check_reference
from catalog.runtime.tensors import Array
from catalog.runtime.tolerance import Tolerance, max_error
from catalog.schema.arithmetic import FLOAT32, Arithmetic
from catalog.schema.problem import Problem

if TYPE_CHECKING:
    from catalog.runtime.catalog import Catalog
    from catalog.runtime.plan import Plan, Result


@dataclass(frozen=True, slots=True)
class Check:
    """The comparison of one output with the reference.

    ``max_error`` is the largest absolute error; ``tolerance_used`` is the largest error of an element as a fraction of
    its tolerance, see :meth:`~catalog.ops.protocol.Operation.tolerances`.
    """

    tensor: str
    max_error: float
    tolerance_used: float

    @property
    def passed(self) -> bool:
        """Whether every element is within tolerance."""
        return self.tolerance_used <= 1


class Expected:
    """The correct outputs of ``problem`` for ``inputs``, computed on first use and then kept.

    Args:
        problem: the problem.
        inputs: the inputs before a run.
        arch: the kernels' arch: the tolerance depends on its arithmetic.
    """

    def __init__(self, problem: Problem, inputs: Mapping[str, Array], arch: str = "host") -> None:
        self.problem = problem
        self.inputs = inputs
        self._operation = operation_of(problem)
        self._arithmetic = backend_of(arch).arithmetic(arch)
        self._allowed: dict[Arithmetic, Mapping[str, Tolerance]] = {}

    @cached_property
    def _outputs(self) -> Mapping[str, Array]:
        return self._operation.reference(self.problem, self.inputs)

    def _tolerances(self, arithmetic: Arithmetic) -> Mapping[str, Tolerance]:
        if arithmetic not in self._allowed:
            self._allowed[arithmetic] = self._operation.tolerances(self.problem, self.inputs, arithmetic)
        return self._allowed[arithmetic]

    def given(self) -> dict[str, Array]:
        """The inputs for one run; inputs that a run updates are copies, since the check needs the originals."""
        tensors = self.problem.tensors
        updated = {name: array.copy() for name, array in self.inputs.items() if tensors[name].role == "updated"}
        return {**self.inputs, **updated}

    def run(self, plan: Plan) -> Result:
        """Run ``plan``, of the same problem, once on the inputs, which stay unchanged.

        Raises:
            CatalogError: as :meth:`Plan.run`.
        """
        return plan.run(self.given())

    def check(self, result: Result) -> list[Check]:
        """Compare every output of ``result`` with the float64 reference."""
        return self.check_outputs(result.outputs, result.arithmetic)

    def check_outputs(self, outputs: Mapping[str, Array], arithmetic: Arithmetic = FLOAT32) -> list[Check]:
        """Compare each of ``outputs``, by result name, with the float64 reference.

        ``arithmetic``: how the kernels round, where not all kernels of the arch do so.
        """
        allowed = self._tolerances(self._arithmetic | arithmetic)
        return [
            Check(
                name,
                max_error(actual, self._outputs[name]),
                allowed[name].used(actual, self._outputs[name]),
            )
            for name, actual in outputs.items()
        ]


def check_result(problem: Problem, inputs: Mapping[str, Array], result: Result) -> list[Check]:
    """Compare every output of ``result`` with the float64 reference for ``inputs``, their values before the run."""
    return Expected(problem, inputs).check(result)


def run_problem(
    catalog: Catalog,
    problem: Problem,
    *,
    arch: str,
    revision: str | None = None,
    seed: int,
    repeats: int,
    validate: bool,
) -> tuple[dict[str, Any], bool]:
    """Select, build and run ``problem`` on seeded random inputs; return what to print, and whether it passed.

    Raises:
        CatalogError: as :meth:`Catalog.select` and :meth:`Plan.run`; or there is too little memory.
    """
    check_memory(problem)
    if validate:
        check_reference(problem)
    plan = catalog.select(problem, arch=arch, revision=revision)
    expected = Expected(problem, make_inputs(problem, seed), plan.arch)
    result = plan.run(expected.given(), repeats=repeats)
    facts: dict[str, Any] = {
        "kernel": " -> ".join(result.kernels),
        "arch": plan.arch,
        "compile_s": round(result.compile_seconds, 2),
        "time_ms": round(result.time_ms, 4),
        "gflops": round(result.tflops * 1e3, 1),
    }
    # A launch of its own: several would update an input several times.
    checks = expected.check(expected.run(plan)) if validate else []
    for check in checks:
        facts[f"max_error_{check.tensor}"] = float(f"{check.max_error:.3g}")
        facts[f"tolerance_used_{check.tensor}"] = f"{check.tolerance_used:.1%}"
    passed = all(check.passed for check in checks)
    if validate:
        facts["validation"] = "passed" if passed else "FAILED"
    return facts, passed
