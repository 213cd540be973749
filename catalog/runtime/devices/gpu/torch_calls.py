"""Layouts of PyTorch's tensors in a GPU's memory.

A caller's tensors are other ones at each call, and hardly ever of another shape.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from catalog.runtime.devices.gpu.streams import torch_on
from catalog.runtime.devices.gpu.torch_tensors import maker, scratch
from catalog.runtime.devices.gpu.vendors import Vendor
from catalog.runtime.devices.repeats import Frame, Means, Repeat

if TYPE_CHECKING:
    from catalog.runtime.devices.gpu.device import GpuCall, GpuDevice
    from catalog.runtime.devices.loading import LoadedKernel
    from catalog.schema.problem import Problem
    from catalog.schema.workspace import Workspace


class TorchLayout(tuple[Any, ...]):
    """Name, dtype, shape, strides and GPU of each of a call's tensors."""

    __slots__ = ()

    @property
    def pattern(self) -> Hashable:
        """As :attr:`Layout.pattern`."""
        return tuple([(name, dtype, index) for name, dtype, _, _, index in self])

    def repeat(
        self,
        device: GpuDevice,
        problem: Problem,
        kernels: Sequence[LoadedKernel],
        call: GpuCall,
        workspace: Workspace,
    ) -> Repeat:
        """As :meth:`Layout.repeat`."""
        vendor, index = device.runtime.vendor, device.index
        means = Means(
            output=lambda element, zeroed: maker(element, zeroed, vendor, index),
            scratch=lambda size: scratch(size, vendor, index),
            starts=device.starts_of,
            start=lambda pointer, own: device.queue(kernels, pointer, own, device.stream),
        )
        frame = Frame(problem.form, [name for name, *_ in self], means)
        return Repeat.of_call(frame, problem, call.args, call.own, workspace)


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
