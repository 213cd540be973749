"""PyTorch tensors in GPU memory: used in place without DLPack capsules, and created for outputs and scratch memory.

A serving loop binds new tensors at each call, and a capsule costs as much time in Python as everything else together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from catalog.runtime.devices.dlpack import dtype_of_torch
from catalog.runtime.devices.gpu.arrays import DeviceArray
from catalog.runtime.devices.gpu.streams import torch_on
from catalog.runtime.devices.gpu.vendors import Vendor
from catalog.runtime.tensors import zeroed_outputs
from catalog.schema.problem import Problem


@dataclass(frozen=True, slots=True)
class TorchMemory:
    """Memory from PyTorch's allocator at the address ``handle``; freed in stream order, without waiting."""

    handle: int
    tensor: Any = field(repr=False)


def torch_array(value: Any, vendor: Vendor) -> DeviceArray | None:
    """``value`` as an array, if it is a plain dense PyTorch tensor on one of the vendor's GPUs; else None.

    It is ordered on PyTorch's current stream, whereas DLPack can order an array on any stream.
    """
    torch = torch_on(vendor)
    if torch is None or type(value) is not torch.Tensor or not value.is_cuda:
        return None
    dtype = dtype_of_torch(value.dtype)
    if dtype is None or value.requires_grad or value.layout is not torch.strided or value.is_neg():
        return None
    itemsize = dtype.itemsize
    return DeviceArray(
        value.data_ptr(),
        tuple(value.shape),
        tuple([step * itemsize for step in value.stride()]),
        dtype,
        value.get_device(),
        True,
        None,
        value,
    )


def gpu_of(values: Iterable[Any], vendor: Vendor) -> int | None:
    """The number of the vendor's GPU that holds the first PyTorch tensor among ``values``; None if there is none."""
    torch = torch_on(vendor)
    if torch is None:
        return None
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            return int(value.get_device())
    return None


def torch_outputs(
    problem: Problem, inputs: Mapping[str, Any], given: Mapping[str, Any], vendor: Vendor, index: int
) -> dict[str, Any] | None:
    """Make tensors for the outputs, as :func:`~catalog.runtime.tensors.make_outputs` makes arrays.

    None if no input is a PyTorch tensor on one of the vendor's GPUs.
    """
    if gpu_of(given.values(), vendor) is None:
        return None
    zeroed = zeroed_outputs(problem.form, inputs)
    outputs = {name: problem.tensors[name] for name in problem.made}
    return {
        name: maker(tensor.element, name in zeroed, vendor, index)(tensor.shape) for name, tensor in outputs.items()
    }


def maker(element: str, zeroed: bool, vendor: Vendor, index: int) -> Callable[..., Any]:
    """A function that makes PyTorch tensors of a given shape, or of extents; zeros if ``zeroed``."""
    torch = torch_on(vendor)
    make = torch.zeros if zeroed else torch.empty
    return partial(make, dtype=getattr(torch, element), device=place_of(torch, index))


def scratch(size: int, vendor: Vendor, index: int) -> Any:
    """An uninitialised PyTorch tensor of ``size`` bytes."""
    torch = torch_on(vendor)
    return torch.empty(max(1, size), dtype=torch.uint8, device=place_of(torch, index))


def torch_memory(size: int, vendor: Vendor, index: int) -> TorchMemory | None:
    """``size`` uninitialised bytes for work on PyTorch's current stream; None if PyTorch is not imported."""
    if torch_on(vendor) is None:
        return None
    tensor = scratch(size, vendor, index)
    return TorchMemory(tensor.data_ptr(), tensor)


@lru_cache(maxsize=64)
def place_of(torch: Any, index: int) -> Any:
    """PyTorch's device object of a GPU."""
    return torch.device("cuda", index)  # PyTorch uses this name for AMD GPUs too
