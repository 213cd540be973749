"""Fast paths for calls on PyTorch tensors in GPU memory.

A caller's tensors are new at each call, but their types and sizes hardly change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from catalog.runtime.devices.fast_path import Means, plain_tensors
from catalog.runtime.devices.gpu.streams import torch_on
from catalog.runtime.devices.gpu.torch_tensors import maker, place_of, scratch

if TYPE_CHECKING:
    from catalog.runtime.devices.gpu.device import GpuDevice


def means_of(device: GpuDevice, given: Mapping[str, Any]) -> Means | None:
    """A GPU's part of a fast path; None if one of the tensors is not a plain PyTorch tensor."""
    vendor, index = device.runtime.vendor, device.index
    torch = torch_on(vendor)
    if not plain_tensors(torch, given):
        return None
    return Means(
        torch=torch,
        where=("device", place_of(torch, index)),
        output=lambda element, zeroed: maker(element, zeroed, vendor, index),
        scratch=lambda size: scratch(size, vendor, index),
        lists=device.lists_of,
        start=lambda kernels, pointer, own: device.queue(kernels, pointer, own, device.stream),
    )
