"""AMD GPUs: kernels are shared libraries that launch on a stream, tensors are in the GPU's memory or copied there."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
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
from catalog.runtime.index_tensors import check_indices
from catalog.runtime.tensors import Array, check_array, check_layout, check_names, check_writable, numpy_dtype
from catalog.runtime.workspace import workspace_of
from catalog.schema.problem import Problem

_DRIVER = Path("/dev/kfd")
_TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")


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
    owner: Any


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

    def call(self, problem: Problem, tensors: Mapping[str, Any], num_splits: int = 1) -> HipCall:
        """The argument struct of a problem with its tensors, inputs and outputs together.

        Arrays in the GPU's memory are used where they are; what their lengths and page numbers hold is not checked. Of
        NumPy arrays the GPU gets copies, made now and by :meth:`send`; :meth:`fetch` copies the results back. All
        stages of a plan take the call. It keeps tensors and copies alive and may be launched any number of times.

        Raises:
            TensorError: a tensor is missing, superfluous, of the wrong shape, dtype or strides, or in other memory; one
                that kernels write is read-only or a broadcast view; a NumPy array has a length or a page number that is
                outside of the tensors that it speaks of.
            DeviceError: the GPU has too little memory, a copy failed, or as :attr:`gpu`.
        """
        index = self.gpu.index
        given = {name: value for name, value in tensors.items() if value is not None}
        check_names(problem, (*problem.needed, *problem.made), given, tuple(problem.tensors))
        copies: list[_Copy] = []
        placed = {name: self._place(problem, name, value, copies) for name, value in given.items()}
        _check_indices(problem, given)
        filled = template(problem, tuple([(name, place.strides) for name, place in placed.items()]))
        starts = {name: Memory(self.runtime, index, array.nbytes) for name, array in filled.starts.items()}
        copies += [_Copy(filled.starts[name], memory, False) for name, memory in starts.items()]
        partials = [
            (slot, Memory(self.runtime, index, partial.bytes), partial.strides)
            for slot, partial in workspace_of(problem, num_splits).items()
        ]
        args = filled.fill(
            [place.address for place in placed.values()],
            [(slot, memory.handle, strides) for slot, memory, strides in partials],
            {name: memory.handle for name, memory in starts.items()},
        )
        args.num_splits = num_splits
        if "kv_page_indices" in given:
            args.num_page_indices = given["kv_page_indices"].shape[0]
        kept = (*(place.owner for place in placed.values()), *starts.values(), *(memory for _, memory, _ in partials))
        call = HipCall(args, ctypes.byref(args), kept, tuple(copies))
        self.send(call)
        return call

    def send(self, call: HipCall) -> None:
        """Copy what the call's NumPy arrays hold now to the GPU; on return it is there.

        Raises:
            DeviceError: a copy failed, or earlier work of the stream did.
        """
        dense = [np.ascontiguousarray(copy.array) for copy in call.copies]
        try:
            for copy, array in zip(call.copies, dense, strict=True):
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

    def time(self, kernels: Sequence[LoadedKernel], call: Call, launches: int) -> list[int]:
        """Nanoseconds of each of so many launches of the kernels, one after the other, by the GPU's clock.

        Raises:
            DeviceError: as :meth:`launch`, or a kernel failed while it ran.
        """
        with ExitStack() as stack:
            stack.enter_context(self.runtime.on(self.index))
            # Nothing waits between launches: where one takes longer than starting the next, the GPU never idles.
            points = [
                tuple(stack.enter_context(Event(self.runtime, self.index)) for _ in ("start", "stop"))
                for _ in range(launches)
            ]
            for start, stop in points:
                start.record(self.stream)
                for kernel in kernels:
                    self.launch(kernel, call)
                stop.record(self.stream)
            self.runtime.synchronize(self.stream)
            return [round(stop.since(start) * 1e6) for start, stop in points]

    def _gpus(self) -> str:
        return "; ".join(f"GPU {gpu.index} is {gpu.info.name}, {gpu.info.arch}" for gpu in self.runtime.gpus)

    def _place(self, problem: Problem, name: str, value: Any, copies: list[_Copy]) -> _Placed:
        written = problem.tensors[name].role != "input"
        if isinstance(value, np.ndarray):
            check_array(problem, name, value)
            if written:
                check_writable(name, value.flags.writeable, value.shape, value.strides)
            copies.append(_Copy(value, Memory(self.runtime, self.index, value.nbytes), written))
            memory = copies[-1].memory
            return _Placed(memory.handle, dense_strides(value.shape, value.itemsize), memory)
        array = device_array(name, value, self.stream)
        dtype = numpy_dtype(array.dtype)
        check_layout(problem, name, dtype, array.shape, array.strides)
        if written:
            check_writable(name, array.writable, array.shape, array.strides)
        if 0 in array.shape:  # some libraries give it no address, which reads as an absent tensor
            memory = Memory(self.runtime, self.index, 0)
            return _Placed(memory.handle, array.strides, memory)
        self._check_here(name, array)
        if array.address % dtype.itemsize:
            raise TensorError(f"{name} is not aligned to its {dtype.itemsize}-byte elements")
        if array.stream is not None and array.stream != self.stream:
            self.runtime.synchronize(array.stream)
        return _Placed(array.address, array.strides, array)

    def _check_here(self, name: str, array: DeviceArray) -> None:
        index = self.runtime.owner(array.address) if array.index is None else array.index
        if index != self.index:
            where = "in no memory that the HIP runtime knows" if index is None else f"on GPU {index}"
            raise TensorError(f"{name} is {where}: the kernel runs on GPU {self.index}")


def _check_indices(problem: Problem, tensors: Mapping[str, Any]) -> None:
    """As :func:`check_indices`, where the host can read all lengths and page numbers."""
    words = {name: value for name, value in tensors.items() if problem.tensors[name].element == "int32"}
    if all(isinstance(value, np.ndarray) for value in words.values()):
        check_indices(problem, words)


def why_unavailable(arch: str) -> str:
    """What a kernel of the AMD arch ``arch`` lacks here: driver, GPU, HIP runtime, or the runtime's own support."""
    if not _DRIVER.exists():
        return (
            f"it needs an AMD GPU of arch {arch}, and there is none ({_DRIVER}, the amdgpu driver's device, is missing)"
        )
    archs = sorted(_present_archs())
    if arch not in archs:
        return f"it needs an AMD GPU of arch {arch}; the GPUs here are {', '.join(archs) or 'of no known arch'}"
    try:
        HipRuntime().gpus  # noqa: B018  # asked for its errors
    except DeviceError as error:
        return error.message
    return "this version of the catalog lists and selects AMD kernels, but does not launch them"


def _present_archs() -> set[str]:
    """The archs of the GPUs that the driver lists; its gfx_target_version 90500 is gfx950."""
    archs = set()
    for node in _TOPOLOGY.glob("*/properties"):
        for line in node.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(" ")
            if name == "gfx_target_version" and int(value):
                major, minor, step = int(value) // 10000, int(value) // 100 % 100, int(value) % 100
                archs.add(f"gfx{major}{minor:x}{step:x}")
    return archs
