"""Calls on the host, and fast paths for calls on PyTorch tensors."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from catalog.forks import SPAWN, forks, openmp_lost
from catalog.runtime.devices.arguments import Call
from catalog.runtime.devices.fast_path import Means
from catalog.runtime.devices.host.arrays import imported_torch

if TYPE_CHECKING:
    from catalog.runtime.devices.loading import LoadedKernel
    from catalog.schema.problem import Problem

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostCall(Call):
    """A call on the host; ``lists`` are :attr:`Problem.lists`."""

    lists: tuple[Any, ...] = field(repr=False)


_reported = 0
"""The number of forks of the process that was last reported to run on one thread."""


def start(kernels: Sequence[LoadedKernel], pointer: Any) -> None:
    """Run the kernels in order with a pointer to the argument struct, as :func:`ctypes.byref` returns it.

    If OpenMP's threads were lost in a fork, kernels run on one thread, even with arguments made in the parent.

    Raises:
        DeviceError: a kernel rejects the call or runs out of memory.
    """
    if openmp_lost():
        pointer._obj.num_threads = threads_left(pointer._obj.num_threads)
    for kernel in kernels:
        kernel.launch(pointer)


def threads_left(wanted: int) -> int:
    """The number of threads for a kernel: ``wanted``, or one if OpenMP's threads were lost in a fork."""
    global _reported  # noqa: PLW0603 - report once per process
    if wanted == 1 or not openmp_lost():
        return wanted
    if _reported != forks():
        _reported = forks()
        _log.info("process %d was forked: its host kernels run on one thread. %s", os.getpid(), SPAWN)
    return 1


@cache
def host_means() -> Means:
    """The host's part of a fast path; PyTorch must be imported."""
    torch = imported_torch()
    return Means(
        torch=torch,
        where=("is_cpu", True),
        output=_maker,
        scratch=_scratch,
        lists=_lists,
        start=lambda kernels, pointer, _: start(kernels, pointer),
    )


def _lists(problem: Problem) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    lists = problem.lists
    return lists.addresses, (lists,)


@cache
def _maker(element: str, zeroed: bool) -> Callable[[tuple[int, ...]], Any]:
    torch = imported_torch()
    return partial(torch.zeros if zeroed else torch.empty, dtype=getattr(torch, element), device=torch.device("cpu"))


def _scratch(size: int) -> Any:
    return _maker("uint8", False)((max(1, size),))
