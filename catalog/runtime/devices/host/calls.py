"""Calls on the host, and fast paths for calls on PyTorch tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from catalog.runtime.devices.arguments import Call
from catalog.runtime.devices.fast_path import Means
from catalog.runtime.devices.host.arrays import imported_torch

if TYPE_CHECKING:
    from catalog.runtime.devices.loading import LoadedKernel
    from catalog.schema.problem import Problem


@dataclass(frozen=True, slots=True)
class HostCall(Call):
    """A call on the host; ``lists`` are :attr:`Problem.lists`."""

    lists: tuple[Any, ...] = field(repr=False)


def start(kernels: Sequence[LoadedKernel], pointer: Any) -> None:
    """Run the kernels in order with a pointer to the argument struct, as :func:`ctypes.byref` returns it.

    Raises:
        DeviceError: a kernel rejects the call or runs out of memory.
    """
    for kernel in kernels:
        kernel.launch(pointer)


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
        entries=lambda kernels, _: [kernel.address for kernel in kernels],
        repeats=True,
    )


def _lists(problem: Problem) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    lists = problem.lists
    return lists.addresses, (lists,)


@cache
def _maker(element: str, zeroed: bool) -> Callable[..., Any]:
    torch = imported_torch()
    return partial(torch.zeros if zeroed else torch.empty, dtype=getattr(torch, element), device=torch.device("cpu"))


def _scratch(size: int) -> Any:
    return _maker("uint8", False)(max(1, size))
