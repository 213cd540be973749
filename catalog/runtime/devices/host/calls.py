"""Calls on the host, and layouts of PyTorch's CPU tensors."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from catalog.forks import SPAWN, forks, openmp_lost
from catalog.runtime.devices.arguments import Call, first_tokens
from catalog.runtime.devices.host.arrays import imported_torch
from catalog.runtime.devices.repeats import Frame, Means, Repeat

if TYPE_CHECKING:
    from catalog.runtime.devices.loading import LoadedKernel
    from catalog.schema.problem import Problem
    from catalog.schema.workspace import Workspace

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostCall(Call):
    """A call on the host; ``starts`` are the first tokens of packed sequences, which follow from the problem."""

    starts: tuple[Any, ...] = field(repr=False)


class HostLayout(tuple[Any, ...]):
    """Name, dtype, shape and strides of each of a call's tensors."""

    __slots__ = ()

    @property
    def pattern(self) -> Hashable:
        """As :attr:`Layout.pattern`."""
        return tuple([each[:2] for each in self])

    def repeat(
        self, device: Any, problem: Problem, kernels: Sequence[LoadedKernel], call: HostCall, workspace: Workspace
    ) -> Repeat:
        """As :meth:`Layout.repeat`."""

        means = Means(_maker, _scratch, _starts, lambda pointer, _: start(kernels, pointer))
        frame = Frame(problem.form, [name for name, *_ in self], means)
        return Repeat.of_call(frame, problem, call.args, call.starts, workspace)


def _starts(problem: Problem) -> tuple[Mapping[str, int], tuple[Any, ...]]:
    arrays = first_tokens(problem)
    return {name: tokens.buffer_info()[0] for name, tokens in arrays.items()}, tuple(arrays.values())


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


def host_layout(given: Mapping[str, Any]) -> HostLayout | None:
    """The layout of the tensors; None where one is no plain, aligned CPU tensor of PyTorch's.

    None also for a tensor without elements, which may be without an address, and for lengths and page numbers, whose
    values are checked each time.
    """
    torch = imported_torch()
    if torch is None:
        return None
    plain, strided, index = torch.Tensor, torch.strided, torch.int32
    layout = []
    for name, value in given.items():
        if (
            type(value) is not plain
            or not value.is_cpu
            or value.requires_grad
            or value.layout is not strided
            or value.dtype is index
            or value.is_neg()
            or not value.numel()
            or value.data_ptr() % value.element_size()
        ):
            return None
        layout.append((name, value.dtype, value.shape, value.stride()))
    return HostLayout(layout)


@cache
def _maker(element: str, zeroed: bool) -> Callable[[tuple[int, ...]], Any]:
    torch = imported_torch()
    return partial(torch.zeros if zeroed else torch.empty, dtype=getattr(torch, element), device=torch.device("cpu"))


def _scratch(size: int) -> Any:
    return _maker("uint8", False)((max(1, size),))
