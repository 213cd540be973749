"""Copies of NumPy arrays in the memory of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from catalog.runtime.devices.dlpack import dense_strides
from catalog.runtime.devices.gpu.resources import Memory
from catalog.runtime.devices.gpu.runtime import GpuRuntime
from catalog.runtime.tensors import Array


@dataclass(frozen=True, slots=True)
class Placed:
    """The address of a copy in GPU memory and its strides in bytes."""

    address: int
    strides: tuple[int, ...]
    memory: Memory


@dataclass(frozen=True, slots=True)
class Copy:
    """A NumPy array with its copy in the GPU's memory; ``back`` if kernels write it."""

    array: Array
    memory: Memory
    back: bool

    @property
    def placed(self) -> Placed:
        """Where the copy is, which is dense."""
        return Placed(self.memory.handle, dense_strides(self.array.shape, self.array.itemsize), self.memory)

    def begins_with(self, array: Array) -> bool:
        """Whether the rows of ``array`` are the beginning of this array's rows, as V of K's in latent attention."""
        own = self.array
        return (
            not self.back
            and (array.ctypes.data, array.strides, array.dtype) == (own.ctypes.data, own.strides, own.dtype)
            and array.shape[:-1] == own.shape[:-1]
            and 0 < array.size <= own.size
        )


def send(runtime: GpuRuntime, index: int, copies: Sequence[Copy], stream: int) -> None:
    """Copy the current contents of the NumPy arrays to GPU ``index``; when it returns, the copies are complete.

    Raises:
        DeviceError: a copy failed.
    """
    if not copies:
        return
    dense = [np.ascontiguousarray(copy.array) for copy in copies]
    with runtime.on(index):
        try:
            for copy, array in zip(copies, dense, strict=True):
                runtime.copy_in(copy.memory.handle, array.ctypes.data, array.nbytes, stream)
        finally:  # a started copy reads the array until it is done
            runtime.synchronize(stream)


def fetch(runtime: GpuRuntime, index: int, copies: Sequence[Copy], stream: int) -> None:
    """Wait for the stream, then copy the results back to the NumPy arrays.

    Raises:
        DeviceError: a copy, or work before it, failed.
    """
    if not copies:
        runtime.synchronize(stream)
        return
    written = [copy for copy in copies if copy.back]
    dense = [
        copy.array if copy.array.flags.c_contiguous else np.empty(copy.array.shape, copy.array.dtype)
        for copy in written
    ]
    with runtime.on(index):
        try:
            for copy, array in zip(written, dense, strict=True):
                runtime.copy_out(array.ctypes.data, copy.memory.handle, array.nbytes, stream)
        finally:
            runtime.synchronize(stream)
    for copy, array in zip(written, dense, strict=True):
        if array is not copy.array:
            copy.array[...] = array
