"""PyTorch's tensors in GPU memory: read where they are without DLPack's capsules, and made for outputs and scratch.

A serving loop binds new tensors at each call, and a capsule costs as much Python as all the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np

from catalog.runtime.devices.dlpack import ELEMENT_NAMES
from catalog.runtime.devices.gpu.arrays import DeviceArray
from catalog.runtime.devices.gpu.streams import torch_on
from catalog.runtime.devices.gpu.vendors import Vendor
from catalog.runtime.elements import numpy_dtype
from catalog.runtime.tensors import zeroed_outputs
from catalog.schema.problem import Problem


@dataclass(frozen=True, slots=True)
class TorchMemory:
    """Bytes of PyTorch's allocator at the address ``handle``: given back in the order of the stream, without a wait."""

    handle: int
    tensor: Any = field(repr=False)


def torch_array(value: Any, vendor: Vendor) -> DeviceArray | None:
    """The array that ``value`` is, if it is a plain dense tensor of PyTorch's on a GPU of the vendor; else None.

    It is in the order of PyTorch's current stream, whereas DLPack can order it for another.
    """
    torch = torch_on(vendor)
    if torch is None or type(value) is not torch.Tensor or not value.is_cuda:
        return None
    dtype = _dtype(value.dtype)
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
    """The number of the GPU of the vendor that the first of these values which is a PyTorch tensor on one is on."""
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
    """Tensors for the outputs, as :func:`~catalog.runtime.tensors.make_outputs` makes arrays.

    None where no input is a tensor of PyTorch's on a GPU of the vendor.
    """
    if gpu_of(given.values(), vendor) is None:
        return None
    zeroed = zeroed_outputs(problem.form, inputs)
    outputs = {name: problem.tensors[name] for name in problem.made}
    return {
        name: maker(tensor.element, name in zeroed, vendor, index)(tensor.shape) for name, tensor in outputs.items()
    }


def maker(element: str, zeroed: bool, vendor: Vendor, index: int) -> Callable[[tuple[int, ...]], Any]:
    """Makes tensors of a shape with PyTorch, which the process has, of elements of that name; ``zeroed``: of zeros."""
    torch = torch_on(vendor)
    make = torch.zeros if zeroed else torch.empty
    return partial(make, dtype=getattr(torch, element), device=place_of(torch, index))


def scratch(size: int, vendor: Vendor, index: int) -> Any:
    """A tensor of so many bytes, uninitialised, made with PyTorch, which the process has."""
    torch = torch_on(vendor)
    return torch.empty(max(1, size), dtype=torch.uint8, device=place_of(torch, index))


def torch_memory(size: int, vendor: Vendor, index: int) -> TorchMemory | None:
    """So many bytes, uninitialised, for work of PyTorch's current stream; None where the process has no PyTorch."""
    if torch_on(vendor) is None:
        return None
    tensor = scratch(size, vendor, index)
    return TorchMemory(tensor.data_ptr(), tensor)


@lru_cache(maxsize=64)
def place_of(torch: Any, index: int) -> Any:
    """PyTorch's name of a GPU."""
    return torch.device("cuda", index)  # PyTorch calls AMD's GPUs so too


@lru_cache(maxsize=64)
def _dtype(dtype: Any) -> np.dtype[Any] | None:
    """NumPy's or ml_dtypes' dtype of PyTorch's; None for one that no kernel takes."""
    name = str(dtype).removeprefix("torch.")
    return numpy_dtype(name) if name in ELEMENT_NAMES else None
