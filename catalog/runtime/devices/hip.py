"""AMD GPUs: kernels are shared libraries that launch on a stream, tensors are in the GPU's memory or copied there."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from catalog.errors import DeviceError, TensorError
from catalog.runtime.devices import DeviceInfo
from catalog.runtime.devices.arguments import Call, template
from catalog.runtime.devices.device_arrays import DeviceArray, dense_strides, device_array
from catalog.runtime.devices.hip_resources import Event, Memory, Stream
from catalog.runtime.devices.hip_runtime import Gpu, HipRuntime
from catalog.runtime.devices.loading import REBUILD, Libraries, LoadedKernel
from catalog.runtime.tensors import Array
from catalog.runtime.workspace import NO_WORKSPACE, Workspace
from catalog.schema.problem import Problem

_FLOOD_BYTES = 1 << 29
"""Twice the largest cache of an AMD GPU: 256 MB (AMD CDNA 3 white paper, Infinity Cache)."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A NumPy array with its copy in the GPU's memory; ``back``: kernels write it."""

    array: Array
    memory: Memory
    back: bool


@dataclass(frozen=True, slots=True)
class _Placed:
    """Where a kernel finds a tensor: address, strides in bytes, and what keeps it alive."""

    address: int
    strides: tuple[int, ...]
    owner: Memory | DeviceArray


@dataclass(frozen=True, slots=True)
class HipCall(Call):
    """A call whose pointers are those of a GPU; keep it until its launches are done."""

    copies: tuple[_Copy, ...] = field(repr=False)


class HipDevice:
    """Loads, launches and times kernels of an AMD GPU.

    Args:
        index: the GPU's number, of those that the process may use.
        stream: what kernels and copies run on: a stream, or the handle of the caller's; 0: the default stream.
        runtime: the HIP runtime; by default the one of this machine.
    """

    def __init__(self, index: int = 0, stream: Stream | int = 0, runtime: HipRuntime | None = None) -> None:
        self.index = index
        self.runtime = runtime or HipRuntime()
        self._given = stream  # a stream of ours lives as long as the device
        self._libraries = Libraries()

    @property
    def stream(self) -> int:
        """The handle of the stream."""
        return self._given.handle if isinstance(self._given, Stream) else self._given

    @cached_property
    def gpu(self) -> Gpu:
        """The GPU, with its memory.

        Raises:
            DeviceError: there is no HIP runtime, no GPU, or none of this number.
        """
        gpus = self.runtime.gpus
        if not 0 <= self.index < len(gpus):
            raise DeviceError(f"there is no GPU {self.index}", hint=self._gpus())
        return gpus[self.index]

    @property
    def device(self) -> DeviceInfo:
        """The GPU, with its compute units.

        Raises:
            DeviceError: as :attr:`gpu`.
        """
        return self.gpu.info

    @property
    def threads(self) -> int:
        """What a kernel's work is divided among: compute units."""
        return self.device.cores

    def array(self, problem: Problem, name: str, value: Any) -> Array | DeviceArray:
        """``value``, given as the tensor ``name``: a NumPy array, or an array in this GPU's memory.

        What the stream does later waits for the work that the owner of the array has queued on it.

        Raises:
            TensorError: it is neither, is in other memory, cannot be shared, or has elements that no kernel takes.
            DeviceError: as :attr:`gpu`, or that work failed.
        """
        if isinstance(value, np.ndarray):
            return value
        array = device_array(name, value, self.stream)
        if 0 in array.shape:  # some libraries give it no address, which reads as an absent tensor
            memory = Memory(self.runtime, self.index, 0)
            return replace(array, address=memory.handle, owner=memory)
        self._check_here(name, array)
        if array.stream is not None and array.stream != self.stream:
            with self.runtime.on(self.index):  # handle 0 is the default stream of the current GPU, whichever that is
                self.runtime.synchronize(array.stream)
        return array

    def load(self, path: Path, sha256: str, kernel_id: str) -> LoadedKernel:
        """As :meth:`Libraries.load`.

        Raises:
            DeviceError: as :meth:`Libraries.load`, or the kernel is for another arch; or as :attr:`gpu`.
        """
        arch = self.device.arch  # before the library, which cannot load without the runtime
        kernel = self._libraries.load(path, sha256, kernel_id)
        if kernel.arch is None:
            raise DeviceError(f"{path} does not say which arch it was built for", hint=REBUILD)
        if kernel.arch != arch:
            raise DeviceError(
                f"kernel {kernel.id} is for {kernel.arch}, and GPU {self.index} is of arch {arch}",
                hint=f"Select with arch='{arch}', or take another GPU: {self._gpus()}",
            )
        return kernel

    def call(self, problem: Problem, tensors: Mapping[str, Any], workspace: Workspace = NO_WORKSPACE) -> HipCall:
        """The argument struct of a problem with its tensors, inputs and outputs together.

        Arrays in the GPU's memory are used where they are. NumPy arrays have memory of the GPU beside them, which
        :meth:`send` fills and :meth:`fetch` copies back. All stages of a plan take the call. It keeps tensors and
        copies alive and may be launched any number of times.

        Args:
            problem: what the kernels compute.
            tensors: what :meth:`array` gave, checked, inputs and outputs together.
            num_splits: parts that the keys are divided into.

        Raises:
            DeviceError: the GPU has too little memory, a copy failed, or as :attr:`gpu`.
        """
        index = self.gpu.index
        copies: list[_Copy] = []
        placed = {name: self._place(problem, name, array, copies) for name, array in tensors.items()}
        filled = template(problem, tuple([(name, place.strides) for name, place in placed.items()]))
        starts = {name: Memory(self.runtime, index, array.nbytes) for name, array in filled.starts.items()}
        self._send([_Copy(filled.starts[name], memory, False) for name, memory in starts.items()])
        partials = [
            (slot, Memory(self.runtime, index, partial.bytes), partial.strides)
            for slot, partial in workspace.partials.items()
        ]
        args = filled.fill(
            [place.address for place in placed.values()],
            [(slot, memory.handle, strides) for slot, memory, strides in partials],
            {name: memory.handle for name, memory in starts.items()},
        )
        args.num_splits = workspace.num_splits
        if "kv_page_indices" in tensors:
            args.num_page_indices = tensors["kv_page_indices"].shape[0]
        kept = (*(place.owner for place in placed.values()), *starts.values(), *(memory for _, memory, _ in partials))
        return HipCall(args, ctypes.byref(args), kept, tuple(copies))

    def send(self, call: HipCall) -> None:
        """Copy what the call's NumPy arrays hold now to the GPU; on return it is there.

        Raises:
            DeviceError: a copy failed, or earlier work of the stream did.
        """
        self._send(call.copies)

    def _send(self, copies: Sequence[_Copy]) -> None:
        dense = [np.ascontiguousarray(copy.array) for copy in copies]
        with self.runtime.on(self.index):
            try:
                for copy, array in zip(copies, dense, strict=True):
                    self.runtime.copy_in(copy.memory.handle, array.ctypes.data, array.nbytes, self.stream)
            finally:  # a copy that has started reads the array until it is done
                self.runtime.synchronize(self.stream)

    def fetch(self, call: HipCall) -> None:
        """Wait for the stream, and copy what kernels wrote back to the call's NumPy arrays.

        Raises:
            DeviceError: a launch or a copy failed.
        """
        written = [copy for copy in call.copies if copy.back]
        dense = [
            copy.array if copy.array.flags.c_contiguous else np.empty(copy.array.shape, copy.array.dtype)
            for copy in written
        ]
        with self.runtime.on(self.index):
            try:
                for copy, array in zip(written, dense, strict=True):
                    self.runtime.copy_out(array.ctypes.data, copy.memory.handle, array.nbytes, self.stream)
            finally:
                self.runtime.synchronize(self.stream)
        for copy, array in zip(written, dense, strict=True):
            if array is not copy.array:
                copy.array[...] = array

    def launch(self, kernel: LoadedKernel, call: Call) -> None:
        """Start the kernel; it is done when the stream is: :meth:`fetch`, or ``runtime.synchronize(stream)``.

        Raises:
            DeviceError: the kernel refuses the call or has no memory, or the GPU does not take the launch.
        """
        with self.runtime.on(self.index):
            self.runtime.take_last_error()  # what others left is not this launch's
            kernel.launch(call.pointer, self.stream)
            status = self.runtime.take_last_error()
        if status:
            raise self.runtime.failure(f"the launch of kernel {kernel.id}", status)

    def run(self, kernels: Sequence[LoadedKernel], call: HipCall) -> None:
        """Run the kernels, one after the other, between :meth:`send` and :meth:`fetch`; on return all is done.

        Raises:
            DeviceError: as :meth:`launch`, a kernel failed while it ran, or a copy failed.
        """
        self.send(call)
        for kernel in kernels:
            self.launch(kernel, call)
        self.fetch(call)

    def time(self, kernels: Sequence[LoadedKernel], call: HipCall, launches: int, *, cold: bool = False) -> list[int]:
        """Nanoseconds of each of so many launches of the kernels, one after the other, by the GPU's clock.

        The copies of NumPy arrays, to the GPU before the first and back after the last, do not count. ``cold``: before
        each the caches are emptied, by writing to more memory than they hold.

        Raises:
            DeviceError: as :meth:`run`.
        """
        self.send(call)
        with ExitStack() as stack:
            stack.enter_context(self.runtime.on(self.index))
            # Nothing waits between launches: where one takes longer than starting the next, the GPU never idles.
            points = [
                tuple(stack.enter_context(Event(self.runtime, self.index)) for _ in ("start", "stop"))
                for _ in range(launches)
            ]
            for start, stop in points:
                if cold:
                    self.runtime.fill(self._flood.handle, 0, _FLOOD_BYTES, self.stream)
                start.record(self.stream)
                for kernel in kernels:
                    self.launch(kernel, call)
                stop.record(self.stream)
            self.fetch(call)
            return [round(stop.since(start) * 1e6) for start, stop in points]

    @cached_property
    def _flood(self) -> Memory:
        return Memory(self.runtime, self.index, _FLOOD_BYTES)

    def clock_mhz(self) -> float | None:
        """None: the HIP runtime knows the highest clock only."""
        return None

    def _gpus(self) -> str:
        return "; ".join(f"GPU {gpu.index} is {gpu.info.name}, {gpu.info.arch}" for gpu in self.runtime.gpus)

    def _place(self, problem: Problem, name: str, array: Array | DeviceArray, copies: list[_Copy]) -> _Placed:
        if isinstance(array, DeviceArray):
            return _Placed(array.address, array.strides, array)
        memory = Memory(self.runtime, self.index, array.nbytes)
        copies.append(_Copy(array, memory, problem.tensors[name].role != "input"))
        return _Placed(memory.handle, dense_strides(array.shape, array.itemsize), memory)

    def _check_here(self, name: str, array: DeviceArray) -> None:
        index = self.runtime.owner(array.address) if array.index is None else array.index
        if index != self.index:
            where = "in no memory that the HIP runtime knows" if index is None else f"on GPU {index}"
            raise TensorError(f"{name} is {where}: the kernel runs on GPU {self.index}")


def first_gpu(arch: str) -> HipDevice:
    """The first GPU of ``arch`` that the process may use, with its default stream.

    Raises:
        DeviceError: there is no HIP runtime, or it finds no such GPU.
    """
    runtime = HipRuntime()
    for gpu in runtime.gpus:
        if gpu.info.arch == arch:
            return HipDevice(gpu.index, runtime=runtime)
    found = ", ".join(f"{gpu.info.name} of arch {gpu.info.arch}" for gpu in runtime.gpus)
    raise DeviceError(
        f"the HIP runtime {runtime.version} finds no GPU of arch {arch}, but {found} "
        "(HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES may hide GPUs)"
    )
