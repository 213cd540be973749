"""The HIP runtime, libamdhip64, through ctypes: GPUs, memory, streams, events. All statuses are checked."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import byref, c_float, c_int, c_size_t, c_void_p
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from catalog.errors import DeviceError
from catalog.runtime.devices import DeviceInfo
from catalog.runtime.devices.gpu.runtime import SUCCESS, Gpu, GpuRuntime
from catalog.runtime.devices.gpu.vendors import AMD
from catalog.runtime.devices.hip.bindings import open_library

if TYPE_CHECKING:
    from catalog.runtime.devices.loading import LoadedKernel

_PROPERTIES: Mapping[str, int] = MappingProxyType({"hipGetDevicePropertiesR0600": 1160, "hipGetDeviceProperties": 396})
"""Byte offsets of gcnArchName in the struct that each function fills. ROCm 6 renamed the function for its new layout
and keeps the old one for old programs, so the first of them that a library has is its own."""

_PROPERTIES_BYTES = 4096  # of both structs, with room to grow: 1472 and 792 so far
_ARCH_BYTES = 256
_MULTIPROCESSOR_COUNT = 63  # hipDeviceAttributeMultiprocessorCount
_POINTER_DEVICE = 4  # offset of `device` in hipPointerAttribute_t, behind an enum that ROCm 6 renumbered
_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2
_CAPTURE_THREAD_LOCAL = 1

_INVALID_VALUE, _INVALID_POINTER = 1, 17

NO_GPU = (
    "HIP needs an AMD GPU, the amdgpu driver, and a user who may open /dev/kfd and /dev/dri (groups render and video); "
    f"{AMD.hidden_by} may hide GPUs"
)
_LOST = "The GPU stopped a kernel: this process cannot use it any more. Check lengths and page tables, and start anew."
_NOT_ITS = "The memory, stream or event was released, or belongs to another GPU or another copy of the HIP runtime."
_OTHER_CODE = "The library has no code for this GPU: build the kernel for its arch."

REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        "hipErrorInvalidValue": _NOT_ITS,
        "hipErrorOutOfMemory": "Free memory of this GPU, or take a smaller problem.",
        "hipErrorNotInitialized": NO_GPU,
        "hipErrorInvalidDevicePointer": _NOT_ITS,
        "hipErrorInsufficientDriver": "The amdgpu driver is older than this ROCm: update it.",
        "hipErrorInvalidDeviceFunction": _OTHER_CODE,
        "hipErrorNoDevice": NO_GPU,
        "hipErrorInvalidDevice": "There is no GPU of this number, or HIP_VISIBLE_DEVICES hides it.",
        "hipErrorInvalidImage": _OTHER_CODE,
        "hipErrorNoBinaryForGpu": _OTHER_CODE,
        "hipErrorInvalidHandle": _NOT_ITS,
        "hipErrorIllegalAddress": _LOST,
        "hipErrorLaunchOutOfResources": "The kernel needs more registers or LDS than there are: choose another.",
        "hipErrorLaunchTimeOut": _LOST,
        "hipErrorAssert": _LOST,
        "hipErrorLaunchFailure": _LOST,
    }
)
"""What to do about an error, by the runtime's name for it."""

_OTHERWISE = "AMD_LOG_LEVEL=3 in the environment makes the HIP runtime say more."


class HipRuntime(GpuRuntime):
    """The HIP runtime, whose library is opened when it is first used.

    Args:
        path: the library; by default the one that this process has already loaded, else the one in ``$ROCM_PATH``, in
            the loader's folders, or in /opt/rocm.
    """

    vendor, remedies, otherwise, no_gpu = AMD, REMEDIES, _OTHERWISE, NO_GPU

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    @cached_property
    def _functions(self) -> dict[str, Any]:
        return open_library(self._path)

    def call(self, name: str, *arguments: Any, about: str = "") -> None:
        """Call a function of the runtime; ``about`` adds details to the message of a failed call.

        Raises:
            DeviceError: the function fails, and the message has its name, the error, its meaning and a remedy; or there
                is no runtime.
        """
        status = self._functions[name](*arguments)
        if status != SUCCESS:
            raise self.failure(f"{name}{about}", status)

    def _number(self, name: str, *arguments: Any) -> int:
        number = c_int()
        self.call(name, byref(number), *arguments)
        return number.value

    def _handle(self, name: str, argument: int, about: str) -> int:
        handle = c_void_p()
        self.call(name, byref(handle), argument, about=about)
        return handle.value or 0

    def error_name(self, status: int) -> str:
        """The runtime's name for a hipError_t."""
        return str(self._functions["hipGetErrorName"](status).decode())

    def error_text(self, status: int) -> str:
        """The runtime's description of a hipError_t."""
        return str(self._functions["hipGetErrorString"](status).decode())

    def take_last_error(self) -> int:
        """Return and reset the last hipError_t of this thread's calls, 0 for none."""
        return int(self._functions["hipGetLastError"]())

    @cached_property
    def version(self) -> str:
        """The runtime's version, such as ``6.2.41133``.

        Raises:
            DeviceError: there is no runtime.
        """
        number = self._number("hipRuntimeGetVersion")
        return f"{number // 10_000_000}.{number // 100_000 % 100}.{number % 100_000}"

    def _count(self) -> tuple[int, int]:
        count = c_int()
        return self._functions["hipGetDeviceCount"](byref(count)), count.value

    def _gpu(self, index: int) -> Gpu:
        name, memory = ctypes.create_string_buffer(256), c_size_t()
        self.call("hipDeviceGetName", name, len(name), index)
        self.call("hipDeviceTotalMem", byref(memory), index)
        cores = self._number("hipDeviceGetAttribute", _MULTIPROCESSOR_COUNT, index)
        arch = self._arch(index)
        # The marketing name comes from a file that some machines lack.
        return Gpu(index, DeviceInfo(arch, name.value.decode() or arch, cores), memory.value)

    def _arch(self, index: int) -> str:
        properties = ctypes.create_string_buffer(_PROPERTIES_BYTES)
        function = next((name for name in _PROPERTIES if name in self._functions), None)
        if function is not None:
            self.call(function, properties, index)
            start = _PROPERTIES[function]
            name = properties.raw[start : start + _ARCH_BYTES].partition(b"\0")[0].decode(errors="replace")
            if name.startswith("gfx"):
                return name.partition(":")[0]  # gfx90a:sramecc+:xnack-
        raise DeviceError(
            f"the HIP runtime {self.version} does not say which arch GPU {index} is",
            hint="This version of the catalog does not know the layout of its hipDeviceProp_t.",
        )

    def _current(self) -> int:
        return self._number("hipGetDevice")

    def _make_current(self, index: int) -> None:
        self.call("hipSetDevice", index)

    def allocate(self, size: int, about: str = "") -> int:
        """As :meth:`GpuRuntime.allocate`."""
        return self._handle("hipMalloc", size, about)

    def free(self, address: int) -> None:
        """As :meth:`GpuRuntime.free`."""
        self.call("hipFree", address)

    def make_stream(self, about: str = "") -> int:
        """As :meth:`GpuRuntime.make_stream`: a hipStream_t."""
        return self._handle("hipStreamCreateWithFlags", 0, about)

    def drop_stream(self, stream: int) -> None:
        """As :meth:`GpuRuntime.drop_stream`."""
        self.call("hipStreamDestroy", stream)

    def make_event(self, about: str = "") -> int:
        """As :meth:`GpuRuntime.make_event`: a hipEvent_t."""
        return self._handle("hipEventCreateWithFlags", 0, about)

    def drop_event(self, event: int) -> None:
        """As :meth:`GpuRuntime.drop_event`."""
        self.call("hipEventDestroy", event)

    def record(self, event: int, stream: int) -> None:
        """As :meth:`GpuRuntime.record`."""
        self.call("hipEventRecord", event, stream)

    def await_event(self, event: int) -> None:
        """As :meth:`GpuRuntime.await_event`."""
        self.call("hipEventSynchronize", event)

    def milliseconds(self, start: int, stop: int) -> float:
        """As :meth:`GpuRuntime.milliseconds`."""
        elapsed = c_float()
        self.call("hipEventElapsedTime", byref(elapsed), start, stop)
        return elapsed.value

    def copy_in(self, target: int, source: int, size: int, stream: int) -> None:
        """As :meth:`GpuRuntime.copy_in`."""
        self.call("hipMemcpyAsync", target, source, size, _HOST_TO_DEVICE, stream, about=f" of {size:,} bytes")

    def copy_out(self, target: int, source: int, size: int, stream: int) -> None:
        """As :meth:`GpuRuntime.copy_out`."""
        self.call("hipMemcpyAsync", target, source, size, _DEVICE_TO_HOST, stream, about=f" of {size:,} bytes")

    def fill(self, target: int, value: int, size: int, stream: int) -> None:
        """As :meth:`GpuRuntime.fill`."""
        self.call("hipMemsetAsync", target, value, size, stream, about=f" of {size:,} bytes")

    def synchronize(self, stream: int) -> None:
        """As :meth:`GpuRuntime.synchronize`."""
        self.call("hipStreamSynchronize", stream)

    def capturing(self, stream: int) -> bool:
        """As :meth:`GpuRuntime.capturing`; False if the runtime cannot say."""
        return "hipStreamIsCapturing" in self._functions and self._captures(stream)

    def _captures(self, stream: int) -> bool:
        status = c_int()
        self.call("hipStreamIsCapturing", stream, byref(status))
        return status.value != 0

    def begin_capture(self, stream: int) -> None:
        """As :meth:`GpuRuntime.begin_capture`."""
        self._graphs("hipStreamBeginCapture", stream, _CAPTURE_THREAD_LOCAL)

    def end_capture(self, stream: int) -> int:
        """As :meth:`GpuRuntime.end_capture`: a hipGraphExec_t."""
        graph, ready = c_void_p(), c_void_p()
        self._graphs("hipStreamEndCapture", stream, byref(graph))
        try:
            self._graphs("hipGraphInstantiate", byref(ready), graph, None, None, 0)
        finally:
            self._graphs("hipGraphDestroy", graph)
        return ready.value or 0

    def replay(self, graph: int, stream: int) -> None:
        """As :meth:`GpuRuntime.replay`."""
        self._graphs("hipGraphLaunch", graph, stream)

    def drop_graph(self, graph: int) -> None:
        """As :meth:`GpuRuntime.drop_graph`."""
        self._graphs("hipGraphExecDestroy", graph)

    def _graphs(self, name: str, *arguments: Any) -> None:
        """Call a function that old runtimes lack.

        Raises:
            DeviceError: as :meth:`call`, or this runtime lacks it.
        """
        if name not in self._functions:
            raise DeviceError(
                f"the HIP runtime {self.version} has no {name}, so no graph can be captured",
                hint="Install ROCm 5 or newer, or measure with --as eager.",
            )
        self.call(name, *arguments)

    def owner(self, address: int) -> int | None:
        """As :meth:`GpuRuntime.owner`."""
        attributes = ctypes.create_string_buffer(256)
        status = self._functions["hipPointerGetAttributes"](attributes, address)
        if status in (_INVALID_VALUE, _INVALID_POINTER):
            self.take_last_error()
            return None
        if status != SUCCESS:
            raise self.failure("hipPointerGetAttributes", status)
        index = c_int.from_buffer(attributes, _POINTER_DEVICE).value
        return index if index >= 0 else None

    def launch(self, kernel: LoadedKernel, pointer: Any, stream: int) -> None:
        """As :meth:`GpuRuntime.launch`; kernel libraries share this runtime and its last error."""
        self.take_last_error()  # discard errors of earlier calls
        kernel.launch(pointer, stream)
        status = self.take_last_error()
        if status:
            raise self.failure(f"the launch of kernel {kernel.id}", status)
