"""libamdhip64, AMD's runtime, by ctypes: GPUs, memory, streams, events. Every status is checked."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ctypes import byref, c_int, c_size_t
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from catalog.errors import DeviceError
from catalog.runtime.devices import DeviceInfo
from catalog.runtime.devices.hip_library import open_library

_PROPERTIES: Mapping[str, int] = MappingProxyType({"hipGetDevicePropertiesR0600": 1160, "hipGetDeviceProperties": 396})
"""Where gcnArchName is in the struct that each fills, in bytes. ROCm 6 has another layout under another name, and keeps
the old one for old programs: the first that a library has is its own."""

_PROPERTIES_BYTES = 4096  # of both structs, with room to grow: 1472 and 792 so far
_ARCH_BYTES = 256
_MULTIPROCESSOR_COUNT = 63  # hipDeviceAttributeMultiprocessorCount
_POINTER_DEVICE = 4  # offset of `device` in hipPointerAttribute_t, behind an enum that ROCm 6 renumbered
_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2

_SUCCESS, _INVALID_VALUE, _INVALID_POINTER = 0, 1, 17

NO_GPU = (
    "HIP needs an AMD GPU, the amdgpu driver, and a user who may open /dev/kfd and /dev/dri (groups render and video); "
    "HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES may hide GPUs"
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
"""What to do about an error, by the name that the runtime gives it."""

_OTHERWISE = "AMD_LOG_LEVEL=3 in the environment makes the HIP runtime say more."


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that the runtime sees: its number, what it is, and its memory."""

    index: int
    info: DeviceInfo
    memory_bytes: int


class HipRuntime:
    """The runtime's library, opened when it is first used.

    Args:
        path: the library; by default the one that this process has already loaded, else the one of ``$ROCM_PATH``, of
            the loader's folders, or of /opt/rocm.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    @cached_property
    def _functions(self) -> dict[str, Any]:
        return open_library(self._path)

    def call(self, name: str, *arguments: Any, about: str = "") -> None:
        """Call a function of the runtime; ``about`` tells more of the call where it fails.

        Raises:
            DeviceError: the function fails: its name, the error's, what it means and what to do; or there is no
                runtime.
        """
        status = self._functions[name](*arguments)
        if status != _SUCCESS:
            raise self.failure(f"{name}{about}", status)

    def failure(self, what: str, status: int) -> DeviceError:
        """The error for ``what`` that gave the hipError_t ``status``."""
        # The runtime keeps the error for whoever asks next, PyTorch for one: it has been told here.
        self._functions["hipGetLastError"]()
        name, means = self.error_name(status), self._functions["hipGetErrorString"](status).decode()
        explained = name if means == name else f"{name}, {means}"
        return DeviceError(f"{what} failed: {explained} ({status})", hint=REMEDIES.get(name, _OTHERWISE))

    def error_name(self, status: int) -> str:
        """The runtime's name of a hipError_t."""
        return str(self._functions["hipGetErrorName"](status).decode())

    def take_last_error(self) -> int:
        """The hipError_t that this thread's calls have left, 0 for none; it is forgotten."""
        return int(self._functions["hipGetLastError"]())

    @cached_property
    def version(self) -> str:
        """The runtime's version, such as ``6.2.41133``.

        Raises:
            DeviceError: there is no runtime.
        """
        number = self._number("hipRuntimeGetVersion")
        return f"{number // 10_000_000}.{number // 100_000 % 100}.{number % 100_000}"

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs of this machine that the process may use, at least one.

        Raises:
            DeviceError: there is none, or there is no runtime.
        """
        count = c_int()
        status = self._functions["hipGetDeviceCount"](byref(count))
        if status != _SUCCESS or not count.value:
            reason = f" ({self.failure('hipGetDeviceCount', status).message})" if status != _SUCCESS else ""
            raise DeviceError(f"the HIP runtime {self.version} finds no GPU{reason}", hint=NO_GPU)
        return tuple(map(self._gpu, range(count.value)))

    def _gpu(self, index: int) -> Gpu:
        name, memory = ctypes.create_string_buffer(256), c_size_t()
        self.call("hipDeviceGetName", name, len(name), index)
        self.call("hipDeviceTotalMem", byref(memory), index)
        cores = self._number("hipDeviceGetAttribute", _MULTIPROCESSOR_COUNT, index)
        arch = self._arch(index)
        # The marketing name comes from a file that not every machine has.
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
            hint="Its hipDeviceProp_t has a layout that this version of the catalog does not know.",
        )

    def _number(self, name: str, *arguments: Any) -> int:
        number = c_int()
        self.call(name, byref(number), *arguments)
        return number.value

    @contextmanager
    def on(self, index: int) -> Iterator[None]:
        """Let this thread's calls be for GPU ``index``; afterwards for the one that they were for before.

        Raises:
            DeviceError: there is no such GPU.
        """
        before = self._number("hipGetDevice")
        if before == index:
            yield
            return
        self.call("hipSetDevice", index)
        try:
            yield
        finally:
            self.call("hipSetDevice", before)

    def copy_in(self, target: int, source: int, size: int, stream: int) -> None:
        """Start to copy ``size`` bytes of host memory to a GPU; both must live until the stream is synchronised.

        Raises:
            DeviceError: the copy fails.
        """
        self.call("hipMemcpyAsync", target, source, size, _HOST_TO_DEVICE, stream, about=f" of {size:,} bytes")

    def copy_out(self, target: int, source: int, size: int, stream: int) -> None:
        """Start to copy ``size`` bytes of a GPU's memory to the host; as :meth:`copy_in`.

        Raises:
            DeviceError: the copy fails.
        """
        self.call("hipMemcpyAsync", target, source, size, _DEVICE_TO_HOST, stream, about=f" of {size:,} bytes")

    def fill(self, target: int, value: int, size: int, stream: int) -> None:
        """Start to set ``size`` bytes of a GPU's memory to a byte.

        Raises:
            DeviceError: the call fails.
        """
        self.call("hipMemsetAsync", target, value, size, stream, about=f" of {size:,} bytes")

    def synchronize(self, stream: int) -> None:
        """Wait for all work of a stream, 0: the default one.

        Raises:
            DeviceError: some of that work failed.
        """
        self.call("hipStreamSynchronize", stream)

    def owner(self, address: int) -> int | None:
        """The GPU whose memory ``address`` is in; None for memory that the runtime does not know.

        Raises:
            DeviceError: the runtime cannot tell.
        """
        attributes = ctypes.create_string_buffer(256)
        status = self._functions["hipPointerGetAttributes"](attributes, address)
        if status in (_INVALID_VALUE, _INVALID_POINTER):
            self.take_last_error()
            return None
        if status != _SUCCESS:
            raise self.failure("hipPointerGetAttributes", status)
        index = c_int.from_buffer(attributes, _POINTER_DEVICE).value
        return index if index >= 0 else None
