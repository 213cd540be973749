"""Fast paths for calls on PyTorch tensors in GPU memory.

A caller's tensors are new at each call, but their types and sizes hardly change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from catalog.runtime.devices.fast_path import Means, plain_tensors
from catalog.runtime.devices.gpu.streams import torch_on
from catalog.runtime.devices.gpu.torch_tensors import maker, place_of, scratch

if TYPE_CHECKING:
    from catalog.runtime.devices.gpu.device import GpuDevice
    from catalog.runtime.devices.gpu.resources import Memory
    from catalog.runtime.devices.loading import LoadedKernel


def means_of(device: GpuDevice, given: Mapping[str, Any]) -> Means | None:
    """A GPU's part of a fast path; None if one of the tensors is not a plain PyTorch tensor."""
    runtime, index = device.runtime, device.index
    vendor = runtime.vendor
    torch = torch_on(vendor)
    if not plain_tensors(torch, given):
        return None
    current_stream = torch._C._cuda_getCurrentRawStream

    def start(kernels: Sequence[LoadedKernel], pointer: Any, own: Sequence[Memory]) -> None:
        if own or runtime.current() != index:
            device.queue(kernels, pointer, own, device.stream)
            return
        stream = current_stream(index)
        for kernel in kernels:
            runtime.launch(kernel, pointer, stream)

    return Means(
        torch=torch,
        where=("device", place_of(torch, index)),
        output=lambda element, zeroed: maker(element, zeroed, vendor, index),
        scratch=lambda size: scratch(size, vendor, index),
        lists=device.lists_of,
        start=start,
        entries=lambda kernels, own: () if own else [kernel.address for kernel in kernels],
    )
