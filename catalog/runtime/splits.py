"""The number of parts that a plan's work is divided into, the memory for their results, and whether it is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from catalog.backends import backend_of
from catalog.ops import operation
from catalog.runtime import memory
from catalog.schema.kernel import Kernel
from catalog.schema.problem import Problem
from catalog.schema.workspace import NO_WORKSPACE, Workspace

if TYPE_CHECKING:
    from catalog.runtime.devices.host.device import HostDevice
    from catalog.runtime.devices.loading import LoadedKernel


def wanted_splits(problem: Problem, kernels: Sequence[Kernel], threads: int) -> int:
    """The best number of parts for the work of a plan's ``kernels``; the kernels decide the actual number.

    ``threads`` is the number of threads of the device.
    """
    whole_waves = backend_of(kernels[0].arch).whole_waves
    return operation(problem.operation).splits(problem, kernels, threads, whole_waves=whole_waves)


def agreed_workspace(problem: Problem, kernels: Sequence[LoadedKernel], num_splits: int, args: Any = None) -> Workspace:
    """The workspace that all stages of a plan accept, given the wanted ``num_splits``.

    ``args`` are arguments with the sizes of the problem, if there are some already; their ``num_splits`` is changed.

    Raises:
        DeviceError: the workspace would be larger than any memory.
    """
    if not problem.form.divided:
        return NO_WORKSPACE
    needed: list[Any] = []
    if args is None:
        from catalog.runtime.devices.arguments import without_tensors

        args = without_tensors(problem)
    for kernel in kernels:
        args.num_splits = num_splits
        needed.append(kernel.workspace(args))
        num_splits = needed[-1].num_splits
    return operation(problem.operation).workspace(problem, num_splits, needed)


def check_fits(problem: Problem, kernels: Sequence[Kernel], host: HostDevice | None) -> None:
    """Check that a run of ``kernels`` fits into the memory of the ``host``; None: they run elsewhere, unchecked.

    Raises:
        ProblemError: as :func:`~catalog.runtime.memory.check_room`.
    """
    if host is None:
        return
    form = problem.form
    most = form.bytes_at(problem.extents)
    if form.divided:
        of = operation(problem.operation)
        most += sum(of.partial_bytes(problem, of.most_splits(problem)).values())
    if most > memory.ALWAYS_THERE and most > memory.memory_bytes():
        memory.check_room(problem, wanted_splits(problem, kernels, host.threads))
