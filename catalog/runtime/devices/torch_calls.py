"""Calls on PyTorch's tensors in a GPU's memory.

A caller's tensors are other ones at each call, of types and sizes that hardly change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from catalog.runtime.devices.fast_path import Means
from catalog.runtime.devices.streams import torch_on
from catalog.runtime.devices.torch_tensors import maker, place_of, scratch

if TYPE_CHECKING:
    from catalog.runtime.devices.gpu import GpuDevice


def means_of(device: GpuDevice) -> Means | None:
    """What a GPU does for fast paths; None where the process does not use it by PyTorch."""
    vendor, index = device.runtime.vendor, device.index
    torch = torch_on(vendor)
    if torch is None:
        return None
    return Means(
        torch=torch,
        where=("device", place_of(torch, index)),
        output=lambda element, zeroed: maker(element, zeroed, vendor, index),
        scratch=lambda size: scratch(size, vendor, index),
        starts=device.starts_of,
        start=lambda kernels, pointer, own: device.queue(kernels, pointer, own, device.stream),
    )
