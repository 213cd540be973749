"""The number of parts that a plan's work is divided into, and whether their results fit into memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from catalog.backends import backend_of
from catalog.ops import operation_of
from catalog.runtime.memory import check_room, surely_fits
from catalog.schema.kernel import Kernel
from catalog.schema.problem import Problem

if TYPE_CHECKING:
    from catalog.runtime.devices.host.device import HostDevice


def wanted_splits(problem: Problem, kernels: Sequence[Kernel], threads: int) -> int:
    """The best number of parts for the work of a plan's ``kernels``; the kernels decide the actual number.

    ``threads`` is the number of threads of the device.
    """
    whole_waves = backend_of(kernels[0].arch).whole_waves
    return operation_of(problem).splits(problem, kernels, threads, whole_waves=whole_waves)


def check_fits(problem: Problem, kernels: Sequence[Kernel], host: HostDevice | None) -> None:
    """Check that a run of ``kernels`` fits into the memory of the ``host``; None: they run elsewhere, unchecked.

    Raises:
        ProblemError: as :func:`~catalog.runtime.memory.check_room`.
    """
    if host is not None and not surely_fits(problem):
        check_room(problem, wanted_splits(problem, kernels, host.threads))
