"""Calls on the host, and what it does for those on PyTorch's tensors."""

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


_told = 0
"""How many forks away the process is that the user was told about last."""


def start(kernels: Sequence[LoadedKernel], pointer: Any) -> None:
    """Run the kernels, one after the other, with a pointer to the argument struct, as :func:`ctypes.byref` gives it.

    Where a fork has taken the threads of OpenMP away they run on one thread, also on arguments of the parent.

    Raises:
        DeviceError: a kernel refuses the call or has no memory.
    """
    if openmp_lost():
        pointer._obj.num_threads = threads_left(pointer._obj.num_threads)
    for kernel in kernels:
        kernel.launch(pointer)


def threads_left(wanted: int) -> int:
    """The threads that a kernel may use of those that are wanted: one where a fork has taken OpenMP's away."""
    global _told  # noqa: PLW0603 - once a process
    if wanted == 1 or not openmp_lost():
        return wanted
    if _told != forks():
        _told = forks()
        _log.info("process %d was forked: its host kernels run on one thread. %s", os.getpid(), SPAWN)
    return 1


@cache
def host_means() -> Means:
    """What the host does for fast paths, with PyTorch, which the process has."""
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
