"""What the tests on a real GPU share: make test-cuda."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from catalog.backends import why_unavailable
from catalog.runtime.catalog import Catalog
from catalog.runtime.plan import Plan
from catalog.runtime.tensors import Array
from catalog.runtime.validate import Check, Expected
from catalog.schema.kernel import Kernel

ARCH = "sm_90"


def need_gpu() -> None:
    """Skip the module where there is none."""
    reason = why_unavailable(ARCH)
    if reason is not None:
        pytest.skip(reason, allow_module_level=True)


def build(catalog: Catalog, kernels: Iterable[Kernel]) -> None:
    report = catalog.builder.build_many({kernel.id: kernel for kernel in kernels}.values())
    assert not report.failures, report.failures[0]


def wrong(plan: Plan, inputs: Mapping[str, Array]) -> list[Check]:
    """The outputs of a run that are not what the reference computes, with their errors."""
    expected = Expected(plan.problem, inputs, ARCH)
    return [check for check in expected.check(expected.run(plan)) if not check.passed]
