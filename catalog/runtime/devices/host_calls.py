"""Host launches on PyTorch's tensors of a layout that has been checked: what is left is to fill in the addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from catalog.runtime.devices.abi import CatalogArgs
from catalog.runtime.devices.arguments import OFFSETS, POINTER, Call
from catalog.runtime.devices.host_arrays import imported_torch
from catalog.runtime.tensors import Array, results, zeroed_outputs

if TYPE_CHECKING:
    from catalog.runtime.devices.loading import LoadedKernel
    from catalog.runtime.workspace import Workspace
    from catalog.schema.problem import Problem


@dataclass(frozen=True, slots=True)
class HostCall(Call):
    """A call on the host; ``starts`` are the first tokens of packed sequences, which follow from the problem."""

    starts: tuple[Array, ...] = field(repr=False)


class HostLayout(tuple[Any, ...]):
    """Name, dtype, shape and strides of each of a call's tensors."""

    __slots__ = ()

    def repeat(
        self, device: Any, problem: Problem, kernels: Sequence[LoadedKernel], call: HostCall, workspace: Workspace
    ) -> HostCalls:
        """As :meth:`Layout.repeat`."""
        return HostCalls(problem, kernels, call, [name for name, *_ in self], workspace)


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


class HostCalls:
    """Runs the kernels of a call on tensors of the layout that it was made for, and makes outputs each time.

    Args:
        problem: what the kernels compute.
        kernels: loaded.
        call: a call of theirs, on tensors of that layout, with outputs that were made.
        given: the names of these tensors.
        workspace: what stages share.
    """

    def __init__(
        self,
        problem: Problem,
        kernels: Sequence[LoadedKernel],
        call: HostCall,
        given: Iterable[str],
        workspace: Workspace,
    ) -> None:
        tensors, names = problem.tensors, tuple(given)
        zeroed = zeroed_outputs(problem, names)
        self._kernels = kernels
        self._args = CatalogArgs.from_buffer_copy(call.args)
        self._starts = call.starts
        self._inputs = [(name, OFFSETS[tensors[name].slot]) for name in names]
        self._made = [
            (name, OFFSETS[tensors[name].slot], _maker(tensors[name].shape, tensors[name].element, name in zeroed))
            for name in problem.made
        ]
        self._partials = [
            (OFFSETS[slot], _maker((max(1, part.bytes),), "uint8", False)) for slot, part in workspace.partials.items()
        ]
        self._results = results(problem, {name: name for name in (*names, *problem.made)})

    def __call__(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Run the kernels on the tensors; the results.

        Raises:
            DeviceError: a kernel refuses the call or has no memory.
        """
        args, tensors = CatalogArgs.from_buffer_copy(self._args), dict(given)
        for name, offset in self._inputs:
            POINTER.pack_into(args, offset, tensors[name].data_ptr())
        for name, offset, make in self._made:
            tensor = tensors[name] = make()
            POINTER.pack_into(args, offset, tensor.data_ptr())
        rooms = []
        for offset, make in self._partials:
            rooms.append(make())
            POINTER.pack_into(args, offset, rooms[-1].data_ptr())
        pointer = ctypes.byref(args)
        for kernel in self._kernels:
            kernel.launch(pointer)
        return {result: tensors[name] for result, name in self._results.items()}


def _maker(shape: tuple[int, ...], element: str, zeroed: bool) -> Callable[[], Any]:
    torch = imported_torch()
    return partial(torch.zeros if zeroed else torch.empty, shape, dtype=getattr(torch, element), device="cpu")
