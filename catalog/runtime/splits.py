"""The number of parts that a plan's work is divided into."""

from __future__ import annotations

from collections.abc import Sequence

from catalog.backends import backend_of
from catalog.ops import operation_of
from catalog.schema.kernel import Kernel
from catalog.schema.problem import Problem


def wanted_splits(problem: Problem, kernels: Sequence[Kernel], threads: int) -> int:
    """The best number of parts for the work of a plan's ``kernels``; the kernels decide the actual number.

    ``threads`` is the number of threads of the device.
    """
    whole_waves = backend_of(kernels[0].arch).whole_waves
    return operation_of(problem).splits(problem, kernels, threads, whole_waves=whole_waves)
