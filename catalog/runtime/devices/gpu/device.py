"""GPU devices: kernels are shared libraries that launch on a stream; tensors are in GPU memory or are copied there."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from catalog.errors import DeviceError, TensorError
from catalog.runtime.devices import DeviceInfo
from catalog.runtime.devices.arguments import Call, arguments_of, template
from catalog.runtime.devices.fast_path import Means
from catalog.runtime.devices.gpu.arrays import DeviceArray, device_array
from catalog.runtime.devices.gpu.copies import Copy, Placed, fetch, send
from catalog.runtime.devices.gpu.resources import Graph, Memory
from catalog.runtime.devices.gpu.runtime import Gpu, GpuRuntime
from catalog.runtime.devices.gpu.streams import current_stream, handle_of
from catalog.runtime.devices.gpu.timer import Timer
from catalog.runtime.devices.gpu.torch_calls import means_of
from catalog.runtime.devices.gpu.torch_tensors import TorchMemory, gpu_of, torch_array, torch_memory, torch_outputs
from catalog.runtime.devices.loading import REBUILD, Libraries, LoadedKernel
from catalog.runtime.tensors import Array, make_outputs
from catalog.schema.problem import Problem
from catalog.schema.problem_form import Form
from catalog.schema.workspace import NO_WORKSPACE, Workspace

_MOST_LISTS = 1024
"""Maximum number of problems whose lists a device keeps in its memory; beyond it, all are dropped."""


@dataclass(frozen=True, slots=True)
class GpuCall(Call):
    """A call with pointers to a GPU's memory; keep it until its launches are done.

    ``own`` is memory allocated by the call or the device, and freed with them.
    """

    copies: tuple[Copy, ...] = field(repr=False)
    own: tuple[Memory, ...] = field(repr=False)


class GpuDevice:
    """Loads, launches and times kernels of a GPU.

    Args:
        runtime: the vendor's runtime.
        index: the GPU's number among those that the process may use.
        stream: the stream for kernels and copies, or its handle, as :func:`~.streams.handle_of` accepts them; None: the
            caller's current stream at the time of each launch, see :func:`~.streams.current_stream`.
    """

    def __init__(self, runtime: GpuRuntime, index: int = 0, stream: Any = None) -> None:
        self.index = index
        self.runtime = runtime
        self._given = stream  # keeps the stream alive as long as the device
        self._libraries = Libraries()
        self._lists: dict[Problem, dict[str, Memory]] = {}
        self._captured: set[Memory] = set()
        self._siblings: dict[int, GpuDevice] = {index: self}

    @property
    def stream(self) -> int:
        """The handle of the stream that new work goes to.

        Raises:
            DeviceError: the process was forked since the GPU was used.
        """
        self.runtime.check_process()
        return current_stream(self.runtime.vendor, self.index) if self._given is None else handle_of(self._given)

    @cached_property
    def gpu(self) -> Gpu:
        """The GPU, with its memory.

        Raises:
            DeviceError: there is no runtime, no GPU, or no GPU with this number.
        """
        gpus = self.runtime.gpus
        if not 0 <= self.index < len(gpus):
            raise DeviceError(f"there is no GPU {self.index}", hint=self._gpus())
        return gpus[self.index]

    @property
    def device(self) -> DeviceInfo:
        """The GPU, with its compute units or multiprocessors.

        Raises:
            DeviceError: as :attr:`gpu`.
        """
        return self.gpu.info

    @property
    def identity(self) -> Mapping[str, Any] | None:
        """The GPU's arch and UUID; None if the runtime does not know the UUID.

        Raises:
            DeviceError: as :attr:`gpu`.
        """
        return None if self.gpu.uuid is None else {"arch": self.device.arch, "uuid": self.gpu.uuid}

    @property
    def place(self) -> str:
        """PyTorch's name of the GPU, which is ``cuda`` for AMD's too."""
        return f"cuda:{self.index}"

    @property
    def threads(self) -> int:
        """The number of compute units or multiprocessors that a kernel's work is divided among."""
        return self.device.cores

    @property
    def queues(self) -> bool:
        """Always: a GPU's stream is a queue."""
        return True

    def on_host(self, array: Array | DeviceArray) -> Array | None:
        """The contents of ``array`` after the stream's work is done; None if the stream is being captured.

        Raises:
            DeviceError: the stream's work or the copy failed.
        """
        if isinstance(array, np.ndarray):
            return array
        stream, itemsize = self.stream, array.dtype.itemsize
        steps = zip(array.shape, array.strides, strict=True)
        size = 0 if 0 in array.shape else sum((extent - 1) * step for extent, step in steps) + itemsize
        memory = np.empty(size, np.uint8)
        with self.runtime.on(self.index):
            if self.runtime.capturing(stream):
                return None
            if size:
                self.runtime.copy_out(memory.ctypes.data, array.address, size, stream)
            self.runtime.synchronize(stream)
        strided: Array = np.ndarray(array.shape, array.dtype, memory, strides=array.strides)
        return strided

    def beside(self, tensors: Mapping[str, Any]) -> GpuDevice:
        """The device for these tensors: this one, or the GPU of its arch that holds the first PyTorch tensor.

        A device with its own stream always returns itself.
        """
        index = gpu_of(tensors.values(), self.runtime.vendor)
        if index is None or index == self.index or self._given is not None:
            return self
        gpus = self.runtime.gpus
        if index >= len(gpus) or gpus[index].info.arch != self.device.arch:
            return self
        if index not in self._siblings:
            sibling = type(self)(index=index, runtime=self.runtime)
            sibling._siblings = self._siblings
            self._siblings.setdefault(index, sibling)
        return self._siblings[index]

    def array(self, problem: Problem, name: str, value: Any) -> Array | DeviceArray:
        """``value``, given as the tensor ``name``: a NumPy array, or an array in this GPU's memory.

        Later work on the stream waits for the work that the array's owner has queued on it.

        Raises:
            TensorError: it is neither, is in other memory, cannot be shared, or has elements that no kernel accepts.
            DeviceError: as :attr:`gpu`, or that work failed.
        """
        if isinstance(value, np.ndarray):
            return value
        vendor = self.runtime.vendor
        array = torch_array(value, vendor) if self._given is None else None
        if array is None:
            array = device_array(name, value, self.stream, vendor)
        if 0 in array.shape:  # its address may be null, which would mean an absent tensor
            memory = Memory(self.runtime, self.index, 0)
            return replace(array, address=memory.handle, owner=memory)
        self._check_here(name, array)
        if array.stream is not None and array.stream != self.stream:
            with self.runtime.on(self.index):  # handle 0 means the default stream of the current GPU
                self.runtime.order(array.stream, self.stream)
        return array

    def outputs(self, problem: Problem, inputs: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make arrays for the outputs: PyTorch tensors in this GPU's memory if an input is one, else NumPy arrays.

        Raises:
            ProblemError: NumPy arrays would be larger than this machine's memory.
        """
        made = torch_outputs(problem, inputs, given, self.runtime.vendor, self.index)
        return make_outputs(problem, inputs) if made is None else made

    def means(self, form: Form, given: Mapping[str, Any]) -> Means | None:
        """As :meth:`Device.means`; None also if the device has its own stream."""
        return None if self._given is not None else means_of(self, given)

    def load(self, path: Path, sha256: str, kernel_id: str) -> LoadedKernel:
        """As :meth:`Libraries.load`.

        Raises:
            DeviceError: as :meth:`Libraries.load`, or the kernel is for another arch; or as :attr:`gpu`.
        """
        arch = self.device.arch  # first, because the library may not load without the runtime
        kernel = self._libraries.load(path, sha256, kernel_id)
        if kernel.arch is None:
            raise DeviceError(f"{path} does not say which arch it was built for", hint=REBUILD)
        if kernel.arch != arch:
            raise DeviceError(
                f"kernel {kernel.id} is for {kernel.arch}, and GPU {self.index} is of arch {arch}",
                hint=f"Select with arch='{arch}', or use another GPU: {self._gpus()}",
            )
        return kernel

    def call(self, problem: Problem, tensors: Mapping[str, Any], workspace: Workspace = NO_WORKSPACE) -> GpuCall:
        """The argument struct of a problem with its tensors, inputs and outputs together.

        Arrays in the GPU's memory are used in place. Each NumPy array gets a copy in GPU memory; an input whose rows
        are the beginning of another one's shares that copy. All stages of a plan share the call. It keeps tensors and
        copies alive and can be launched any number of times.

        Args:
            problem: the problem.
            tensors: the checked arrays from :meth:`array`, inputs and outputs together.
            workspace: the workspace that the stages share.

        Raises:
            DeviceError: the GPU has too little memory, a copy failed, or as :attr:`gpu`.
        """
        return self._call(problem, tensors, workspace, self._memory)

    def once(self, problem: Problem, tensors: Mapping[str, Any], workspace: Workspace = NO_WORKSPACE) -> GpuCall:
        """Like :meth:`call`, to be queued on the caller's stream at once; it may be dropped while the work still runs.

        Raises:
            DeviceError: as :meth:`call`.
        """
        return self._call(problem, tensors, workspace, self._memory if self._given is not None else self._passing)

    def _memory(self, size: int) -> Memory:
        return Memory(self.runtime, self.index, size)

    def _passing(self, size: int) -> Memory | TorchMemory:
        """Memory that later work on the current stream may reuse once its last reference is gone."""
        return torch_memory(size, self.runtime.vendor, self.index) or self._memory(size)

    def _call(
        self,
        problem: Problem,
        tensors: Mapping[str, Any],
        workspace: Workspace,
        memory: Callable[[int], Memory | TorchMemory],
    ) -> GpuCall:
        self.gpu  # noqa: B018 - raises if there is no GPU, before anything is allocated
        copies: list[Copy] = []
        placed = [self._place(problem, name, array, copies) for name, array in tensors.items()]
        filled = template(problem, tuple([(name, at.strides) for name, at in zip(tensors, placed, strict=True)]))
        lists = self._memory_of_lists(problem)
        partials = [(slot, memory(partial.bytes), partial.strides) for slot, partial in workspace.partials.items()]
        args = filled.fill(
            tensors,
            [at.address for at in placed],
            [(slot, room.handle, strides) for slot, room, strides in partials],
            workspace.num_splits,
            {name: room.handle for name, room in lists.items()},
        )
        rooms = [room for _, room, _ in partials]
        own = (*lists.values(), *(room for room in rooms if isinstance(room, Memory)))
        return GpuCall(args, ctypes.byref(args), (placed, rooms), tuple(copies), own)

    def _place(
        self, problem: Problem, name: str, array: Array | DeviceArray, copies: list[Copy]
    ) -> Placed | DeviceArray:
        if isinstance(array, DeviceArray):
            return array
        written = problem.tensors[name].role != "input"
        copy = None if written else next((copy for copy in copies if copy.begins_with(array)), None)
        if copy is None:
            copy = Copy(array, self._memory(array.nbytes), written)
            copies.append(copy)
        return copy.placed

    def lists_of(self, problem: Problem) -> tuple[list[int], tuple[Memory, ...]]:
        """:attr:`Problem.lists` where they are read: addresses, in the order of the argument struct, and the memory.

        Raises:
            DeviceError: the GPU has too little memory, or a copy failed.
        """
        if arguments_of(problem).host_lists:
            return list(problem.lists.addresses), ()
        lists = self._memory_of_lists(problem)
        addresses = [lists[name].handle if name in lists else 0 for name in arguments_of(problem).lists]
        return addresses, tuple(lists.values())

    def _memory_of_lists(self, problem: Problem) -> dict[str, Memory]:
        """This GPU's memory with the lists that kernels read, kept for later calls."""
        if not problem.lists or arguments_of(problem).host_lists:
            return {}
        lists = self._lists.get(problem)
        if lists is None:
            arrays = {name: np.array(values, np.int32) for name, values in problem.lists.arrays.items()}
            lists = {name: self._memory(array.nbytes) for name, array in arrays.items()}
            send(
                self.runtime,
                self.index,
                [Copy(arrays[name], memory, False) for name, memory in lists.items()],
                self.stream,
            )
            if len(self._lists) >= _MOST_LISTS:
                self._lists.clear()
            self._lists[problem] = lists
        return lists

    def _start(self, kernels: Sequence[LoadedKernel], pointer: Any, stream: int) -> None:
        runtime = self.runtime
        if runtime.current() != self.index:
            with runtime.on(self.index):
                self._start(kernels, pointer, stream)
            return
        for kernel in kernels:
            runtime.launch(kernel, pointer, stream)

    def enqueue(self, kernels: Sequence[LoadedKernel], call: GpuCall, stream: Any = None) -> None:
        """Queue the kernels in order on ``stream``, by default :attr:`stream`, and return immediately.

        Nothing is allocated, copied or waited for. If the stream is being captured, the launches become part of the
        graph, and memory allocated by the call lives as long as this device.

        Raises:
            TensorError: a tensor is a NumPy array, which would have to be copied.
            UsageError: ``stream`` is not a stream.
            DeviceError: a kernel rejects the call or runs out of memory, or the GPU does not accept the launch.
        """
        if call.copies:
            raise TensorError(
                f"{len(call.copies)} of the tensors are NumPy arrays, which are copied: queued work needs arrays in "
                "GPU memory",
                hint="Pass outputs in GPU memory too; or use launch(), which copies and waits.",
            )
        self.queue(kernels, call.pointer, call.own, self.stream if stream is None else handle_of(stream))

    def queue(self, kernels: Sequence[LoadedKernel], pointer: Any, own: Sequence[Memory], stream: int) -> None:
        """Like :meth:`enqueue`, with a pointer to arguments that use the memory ``own``, and a stream's handle.

        Raises:
            DeviceError: as :meth:`enqueue`.
        """
        if own and self.runtime.capturing(stream):
            self._captured.update(own)
        self._start(kernels, pointer, stream)

    def run(self, kernels: Sequence[LoadedKernel], call: GpuCall) -> None:
        """Copy NumPy arrays to the GPU, run the kernels in order, and copy results back; waits until all is done.

        If the stream is being captured, this works like :meth:`enqueue`.

        Raises:
            DeviceError: as :meth:`enqueue`, or a kernel or a copy failed.
            TensorError: as :meth:`enqueue`, if the stream is being captured.
        """
        stream = self.stream
        with self.runtime.on(self.index):
            if self.runtime.capturing(stream):
                self.enqueue(kernels, call, stream)
                return
            send(self.runtime, self.index, call.copies, stream)
            self._start(kernels, call.pointer, stream)
            fetch(self.runtime, self.index, call.copies, stream)

    def time(self, kernels: Sequence[LoadedKernel], call: GpuCall, launches: int, *, cold: bool = False) -> list[int]:
        """Launch the kernels ``launches`` times; return the nanoseconds of each by the GPU's clock.

        Copies of NumPy arrays, before the first and after the last launch, do not count. ``cold`` empties the caches
        before each launch, by writing to more memory than they hold.

        Raises:
            DeviceError: as :meth:`run`, or the stream is being captured.
        """
        stream = self._uncaptured()
        with self.runtime.on(self.index):
            send(self.runtime, self.index, call.copies, stream)
            durations = self.timed(partial(self._start, kernels, call.pointer, stream), launches, cold=cold)
            fetch(self.runtime, self.index, call.copies, stream)
        return durations

    def replayed(self, kernels: Sequence[LoadedKernel], call: GpuCall) -> Callable[[], object]:
        """As :meth:`Device.replayed`: the replay of a graph that is captured now, after one launch outside of it.

        Raises:
            DeviceError: as :meth:`run`, or the kernels cannot be captured.
        """
        stream = self._uncaptured()
        with self.runtime.on(self.index):
            send(self.runtime, self.index, call.copies, stream)
            self._start(kernels, call.pointer, stream)  # the first launch loads code, which a capture does not allow
            self.runtime.synchronize(stream)
            graph = Graph(self.runtime, self.index, partial(self._start, kernels, call.pointer))

        def launch(_: GpuCall = call) -> None:  # the call keeps alive what the graph uses
            graph.replay(self.stream)

        return launch

    def timed(self, start: Callable[[], object], launches: int, *, cold: bool = False) -> list[int]:
        """As :meth:`Device.timed`, by events of the GPU."""
        return self._timer.by_events(self._uncaptured(), start, launches, cold=cold)

    def awaited(self, start: Callable[[], object], launches: int, *, cold: bool = False) -> list[int]:
        """As :meth:`Device.awaited`: wall time until the stream is done."""
        return self._timer.by_waiting(self._uncaptured(), start, launches, cold=cold)

    @property
    def capturing(self) -> bool:
        """As :meth:`Device.capturing`.

        Raises:
            DeviceError: as :attr:`stream`.
        """
        return self.runtime.capturing(self.stream)

    def _uncaptured(self) -> int:
        """The stream, which must not be captured.

        Raises:
            DeviceError: it is.
        """
        stream = self.stream
        with self.runtime.on(self.index):
            if self.runtime.capturing(stream):
                raise DeviceError("launches in a graph cannot be timed", hint="Capture launch() or enqueue().")
        return stream

    @cached_property
    def _timer(self) -> Timer:
        return Timer(self.runtime, self.index)

    def waits(self) -> Mapping[str, int]:
        """Always empty: the GPU's own clock times launches."""
        return {}

    def clock_mhz(self) -> float | None:
        """The current clock rate in MHz, if the runtime or the driver reports it."""
        return self.runtime.clock_mhz(self.index)

    def _gpus(self) -> str:
        return "; ".join(f"GPU {gpu.index} is {gpu.info.name}, {gpu.info.arch}" for gpu in self.runtime.gpus)

    def _check_here(self, name: str, array: DeviceArray) -> None:
        index = self.runtime.owner(array.address) if array.index is None else array.index
        if index != self.index:
            where = (
                f"in memory that the {self.runtime.vendor.runtime} runtime does not know"
                if index is None
                else f"on GPU {index}"
            )
            raise TensorError(f"{name} is {where}: the kernel runs on GPU {self.index}")
