"""How many parts the work of a plan is divided into."""

from __future__ import annotations

from collections.abc import Sequence

from catalog.backends import backend_of
from catalog.ops import operation_of
from catalog.schema.kernel import Kernel
from catalog.schema.problem import Problem


def wanted_splits(problem: Problem, kernels: Sequence[Kernel], threads: int) -> int:
    """Parts that the work of ``kernels``, those of a plan, is best divided into; they say how many there will be.

    ``threads`` are those of the device that they run on.
    """
    whole_waves = backend_of(kernels[0].arch).whole_waves
    return operation_of(problem).splits(problem, kernels, threads, whole_waves=whole_waves)
