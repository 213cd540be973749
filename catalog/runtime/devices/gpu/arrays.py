"""Arrays of other libraries in a GPU's memory, used without a copy.

Such an object has ``__dlpack__`` (DLPack, which supports bfloat16 and fp8) or ``__cuda_array_interface__``, whose name
libraries for AMD GPUs use too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from catalog.errors import TensorError
from catalog.runtime.devices.dlpack import CPU, ELEMENT_NAMES, dense_strides, shared
from catalog.runtime.devices.gpu.vendors import AMD, NVIDIA, Vendor

MEMORIES: Mapping[int, str] = MappingProxyType(
    {
        CPU: "the CPU",
        NVIDIA.memory: "an NVIDIA GPU",
        3: "the CPU, pinned by CUDA",
        AMD.memory: "an AMD GPU",
        11: "the CPU, pinned by HIP",
        13: "CUDA, which moves it between CPU and GPU",
    }
)
"""Memories by DLPack's device type."""


@dataclass(slots=True)
class DeviceFlags:
    """Flags like those of a NumPy array."""

    writeable: bool
    aligned: bool


@dataclass(slots=True)
class DeviceArray:
    """An array in a GPU's memory that checks treat like a NumPy array; it keeps the memory alive.

    ``strides`` are in bytes. ``index`` is the GPU's number if the object states it. ``stream`` is the handle of a
    stream whose work must be done before the array is used, if any. Never modified; it is not frozen because creating
    a frozen instance takes three times as long, for each tensor of a launch.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    index: int | None
    writable: bool
    stream: int | None
    owner: Any = field(repr=False)

    @property
    def flags(self) -> DeviceFlags:
        """Whether the array may be written, and whether its address is a multiple of its element size."""
        return DeviceFlags(self.writable, self.address % self.dtype.itemsize == 0)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """For :func:`numpy.shares_memory`, which only compares addresses; nothing may read or write there."""
        return {
            "shape": self.shape,
            "strides": self.strides,
            "typestr": f"|V{self.dtype.itemsize}",
            "data": (self.address, True),
            "version": 3,
        }


def device_array(name: str, value: Any, stream: int, vendor: Vendor) -> DeviceArray:
    """``value``, given as the tensor ``name``, as an array to be used on the stream with the handle ``stream``.

    Raises:
        TensorError: it is not an array in memory of the vendor's GPUs, cannot be shared, or has elements that no kernel
            accepts.
    """
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        return _from_dlpack(name, value, stream, vendor)
    try:
        interface = getattr(value, "__cuda_array_interface__", None)
    except Exception as error:  # PyTorch raises exceptions of several types
        raise _not_shared(name, error) from None
    if interface is None:
        raise TensorError(
            f"{name} is a {type(value).__name__}: expected a NumPy array, or an array in GPU memory",
            hint="An array in GPU memory has __dlpack__ and __dlpack_device__, or __cuda_array_interface__.",
        )
    return _from_interface(name, value, interface)


def _not_shared(name: str, error: Exception) -> TensorError:
    return TensorError(f"{name} cannot be shared: {error}", hint=f"PyTorch: use {name}.detach()")


def _from_dlpack(name: str, value: Any, stream: int, vendor: Vendor) -> DeviceArray:
    try:
        kind, index = map(int, value.__dlpack_device__())
        if kind != vendor.memory:
            where = MEMORIES.get(kind, f"device type {kind}")
            raise TensorError(
                f"{name} is in memory of {where}: expected an {vendor.company} GPU's",
                hint=f"Move it there, with PyTorch {name}.to('cuda'); or pass a NumPy array, which is copied.",
            )
        capsule = value.__dlpack__(stream=stream or vendor.default_stream)
    except TensorError:
        raise
    except Exception as error:  # each library raises its own exceptions
        raise _not_shared(name, error) from None
    array = shared(name, capsule)
    return DeviceArray(
        array.address,
        array.shape,
        array.strides,
        array.dtype,
        index,
        array.writable is not False,  # an unversioned capsule never holds a read-only array
        None,  # __dlpack__(stream=...) has ordered the library's work before ours
        array.owner,
    )


def _from_interface(name: str, value: Any, interface: Mapping[str, Any]) -> DeviceArray:
    try:
        dtype = np.dtype(interface["typestr"])
        shape = tuple(interface["shape"])
        address, read_only = interface["data"]
    except (KeyError, TypeError, ValueError) as error:
        raise TensorError(f"{name} has a __cuda_array_interface__ that cannot be read: {error!r}") from None
    if not dtype.isnative or dtype.name not in ELEMENT_NAMES:
        raise TensorError(
            f"{name} has elements that no kernel accepts: {interface['typestr']}",
            hint="__cuda_array_interface__ has no bfloat16 and no fp8; DLPack has them.",
        )
    if interface.get("mask") is not None:
        raise TensorError(f"{name} is a masked array, which no kernel accepts")
    stream = interface.get("stream")
    return DeviceArray(
        address or 0,
        shape,
        tuple(interface.get("strides") or dense_strides(shape, dtype.itemsize)),
        dtype,
        None,
        not read_only,
        0 if stream == 1 else stream,  # 1 means the default stream; HIP before ROCm 6 has no such handle
        value,
    )
