"""Launches on PyTorch's tensors of a layout that has been checked: what is left to do is to fill in the addresses.

A caller's tensors are other ones at each call, and hardly ever of another shape.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from catalog.runtime.devices.abi import CatalogArgs
from catalog.runtime.devices.arguments import OFFSETS, POINTER
from catalog.runtime.devices.streams import torch_on
from catalog.runtime.devices.torch_tensors import maker, scratch_maker
from catalog.runtime.devices.vendors import Vendor
from catalog.runtime.tensors import results, zeroed_outputs

if TYPE_CHECKING:
    from catalog.runtime.devices.gpu import GpuCall, GpuDevice
    from catalog.runtime.devices.loading import LoadedKernel
    from catalog.runtime.workspace import Workspace
    from catalog.schema.problem import Problem


class TorchLayout(tuple[Any, ...]):
    """Name, dtype, shape, strides and GPU of each of a call's tensors."""

    __slots__ = ()

    def repeat(
        self,
        device: GpuDevice,
        problem: Problem,
        kernels: Sequence[LoadedKernel],
        call: GpuCall,
        workspace: Workspace,
    ) -> TorchCalls:
        """As :meth:`Layout.repeat`."""
        names = [name for name, *_ in self]
        return TorchCalls(device, problem, kernels, call, given=names, workspace=workspace)


def layout_of(given: Mapping[str, Any], vendor: Vendor) -> TorchLayout | None:
    """The layout of the tensors; None where one is no plain tensor on a GPU.

    None also for a tensor without elements, which may be without an address.
    """
    torch = torch_on(vendor)
    if torch is None:
        return None
    plain, strided = torch.Tensor, torch.strided
    layout = []
    for name, value in given.items():
        if (
            type(value) is not plain
            or not value.is_cuda
            or value.requires_grad
            or value.layout is not strided
            or value.is_neg()
            or not value.numel()
        ):
            return None
        layout.append((name, value.dtype, value.shape, value.stride(), value.get_device()))
    return TorchLayout(layout)


class TorchCalls:
    """Queues the kernels of a call on tensors of the layout that it was made for, and makes outputs each time.

    Args:
        device: where the tensors are.
        problem: what the kernels compute.
        kernels: loaded.
        call: a call of theirs, on tensors of that layout, with outputs that were made.
        given: the names of these tensors.
        workspace: what stages share.
    """

    def __init__(
        self,
        device: GpuDevice,
        problem: Problem,
        kernels: Sequence[LoadedKernel],
        call: GpuCall,
        *,
        given: Iterable[str],
        workspace: Workspace,
    ) -> None:
        tensors, names = problem.tensors, tuple(given)
        zeroed, vendor = zeroed_outputs(problem, names), device.runtime.vendor
        self._device = device
        self._kernels = kernels
        self._args = CatalogArgs.from_buffer_copy(call.args)
        self._own = call.own
        self._inputs = [(name, OFFSETS[tensors[name].slot]) for name in names]
        self._made = [
            (name, OFFSETS[tensors[name].slot], maker(tensors[name], name in zeroed, vendor, device.index))
            for name in problem.made
        ]
        self._partials = [
            (OFFSETS[slot], scratch_maker(partial.bytes, vendor, device.index))
            for slot, partial in workspace.partials.items()
        ]
        self._results = results(problem, {name: name for name in (*names, *problem.made)})

    def __call__(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Queue the kernels on the tensors; the results, which they write.

        Raises:
            DeviceError: as :meth:`GpuDevice.enqueue`.
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
        self._device.queue(self._kernels, ctypes.byref(args), self._own, self._device.stream)
        return {result: tensors[name] for result, name in self._results.items()}
