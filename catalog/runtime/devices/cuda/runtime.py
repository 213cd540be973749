"""The CUDA runtime through NVIDIA's package cuda-bindings: GPUs, memory, streams, events. All statuses are checked."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from catalog.errors import DeviceError
from catalog.runtime.devices import DeviceInfo
from catalog.runtime.devices.cuda.driver import INSTALL
from catalog.runtime.devices.gpu.runtime import SUCCESS, Gpu, GpuRuntime
from catalog.runtime.devices.gpu.vendors import NVIDIA

if TYPE_CHECKING:
    from catalog.runtime.devices.loading import LoadedKernel

_BINDINGS = "cuda.bindings.runtime"
_INVALID_VALUE, _NOT_READY = 1, 600
_GPU_MEMORY = (2, 3)  # cudaMemoryTypeDevice, cudaMemoryTypeManaged

NO_GPU = (
    "CUDA needs an NVIDIA GPU and NVIDIA's driver, of version 580 or newer for CUDA 13; in a container also "
    f"--gpus all or the like; {NVIDIA.hidden_by} may hide GPUs"
)
_LOST = "The GPU stopped a kernel: this process cannot use it any more. Check lengths and page tables, and start anew."
_NOT_ITS = "The memory, stream or event was released, or belongs to another GPU."
_OTHER_CODE = "The library has no code for this GPU: build the kernel for its arch."
_CAPTURE = (
    "A CUDA graph is being captured: bind, and launch once, before the capture; in it launch on arrays in GPU memory."
)

FAULTS: Mapping[str, str] = MappingProxyType(
    {
        "cudaErrorIllegalAddress": "used an illegal address",
        "cudaErrorMisalignedAddress": "used a misaligned address",
        "cudaErrorInvalidAddressSpace": "used an address of the wrong memory space",
        "cudaErrorInvalidPc": "jumped to an illegal address",
        "cudaErrorIllegalInstruction": "ran an illegal instruction",
        "cudaErrorHardwareStackError": "corrupted or overflowed its stack",
        "cudaErrorAssert": "failed an assertion",
        "cudaErrorLaunchFailure": "failed while it ran",
        "cudaErrorLaunchTimeout": "ran longer than the driver allows",
        "cudaErrorTensorMemoryLeak": "kept tensor memory when it ended",
    }
)
"""What a kernel did, by the name of the error it caused; after these the process can no longer use the GPU."""

REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(FAULTS, _LOST),
        "cudaErrorInvalidValue": _NOT_ITS,
        "cudaErrorMemoryAllocation": "Free memory of this GPU (PyTorch: torch.cuda.empty_cache()), or take a smaller "
        "problem.",
        "cudaErrorInitializationError": NO_GPU,
        "cudaErrorInsufficientDriver": f"NVIDIA's driver is missing, or older than this CUDA. {NO_GPU}",
        "cudaErrorDevicesUnavailable": "Another process has exclusive use of the GPU.",
        "cudaErrorInvalidDeviceFunction": _OTHER_CODE,
        "cudaErrorNoDevice": NO_GPU,
        "cudaErrorInvalidDevice": f"There is no GPU of this number, or {NVIDIA.hidden_by} hides it.",
        "cudaErrorInvalidKernelImage": _OTHER_CODE,
        "cudaErrorNoKernelImageForDevice": _OTHER_CODE,
        "cudaErrorInvalidResourceHandle": _NOT_ITS,
        "cudaErrorLaunchOutOfResources": "The kernel needs more registers or shared memory than there are: choose "
        "another.",
        "cudaErrorSystemDriverMismatch": "The kernel module and the libraries of NVIDIA's driver have different "
        "versions: reboot after an update.",
        "cudaErrorStreamCaptureUnsupported": _CAPTURE,
        "cudaErrorStreamCaptureInvalidated": _CAPTURE,
        "cudaErrorStreamCaptureImplicit": _CAPTURE,
    }
)
"""What to do about an error, by the runtime's name for it."""

_OTHERWISE = "CUDA_LAUNCH_BLOCKING=1 in the environment shows which launch failed; compute-sanitizer which access."


class CudaRuntime(GpuRuntime):
    """The CUDA runtime, imported when it is first used.

    Kernel libraries have their own CUDA runtimes linked in. All share the driver's contexts, so the current GPU and
    handles are the same, but none sees another's last error.

    Args:
        bindings: the module; by default ``cuda.bindings.runtime``.
    """

    vendor, faults, remedies, otherwise, no_gpu = NVIDIA, FAULTS, REMEDIES, _OTHERWISE, NO_GPU

    def __init__(self, bindings: Any = None) -> None:
        self._given = bindings

    @cached_property
    def bindings(self) -> Any:
        """The module, whose functions return a cudaError_t and then their results.

        Raises:
            DeviceError: the module is not installed or does not load.
        """
        if self._given is not None:
            return self._given
        try:
            return import_module(_BINDINGS)
        except ModuleNotFoundError:
            raise DeviceError("the Python package cuda-bindings is missing", hint=INSTALL) from None
        except (ImportError, OSError, RuntimeError) as error:
            raise DeviceError(f"the Python package cuda-bindings does not load: {error}", hint=INSTALL) from None

    def call(self, name: str, *arguments: Any, about: str = "") -> Any:
        """Call a function of the runtime; return its result: None if it has none, a tuple if it has several.

        Raises:
            DeviceError: the function fails, and the message has its name, the error, its meaning and a remedy; or there
                is no runtime.
        """
        function = getattr(self.bindings, name)
        try:
            status, *results = function(*arguments)
        except RuntimeError as error:  # the driver's library is missing, or lacks the function
            raise DeviceError(f"{name} cannot be called: {error}", hint=self.no_gpu) from None
        if status != SUCCESS:
            raise self.failure(f"{name}{about}", status)
        return results[0] if len(results) == 1 else tuple(results) or None

    def error_name(self, status: int) -> str:
        """The runtime's name for a cudaError_t."""
        return self._described("cudaGetErrorName", status)

    def error_text(self, status: int) -> str:
        """The runtime's description of a cudaError_t."""
        return self._described("cudaGetErrorString", status)

    def _described(self, name: str, status: int) -> str:
        return str(getattr(self.bindings, name)(status)[1].decode())

    def take_last_error(self) -> int:
        """As :meth:`GpuRuntime.take_last_error`."""
        return int(self.bindings.cudaGetLastError()[0])

    @cached_property
    def version(self) -> str:
        """The runtime's version and the newest that the driver supports, such as ``13.5 (driver: 13.0)``.

        Raises:
            DeviceError: there is no runtime.
        """
        known = self.call("cudaDriverGetVersion")
        driver = f"driver: {_version(known)}" if known else "no driver"
        return f"{_version(self.call('cudaRuntimeGetVersion'))} ({driver})"

    def _count(self) -> tuple[int, int]:
        status, count = self.bindings.cudaGetDeviceCount()
        return status, count or 0

    def _gpu(self, index: int) -> Gpu:
        about = self.call("cudaGetDeviceProperties", index)
        name = about.name.partition(b"\0")[0].decode(errors="replace")
        info = DeviceInfo(f"sm_{about.major}{about.minor}", name, about.multiProcessorCount)
        return Gpu(index, info, about.totalGlobalMem, about.uuid.bytes.hex())

    def _current(self) -> int:
        status, index = self.bindings.cudaGetDevice()
        if status != SUCCESS:
            raise self.failure("cudaGetDevice", status)
        return int(index)

    def _make_current(self, index: int) -> None:
        self.call("cudaSetDevice", index)

    def allocate(self, size: int, about: str = "") -> int:
        """As :meth:`GpuRuntime.allocate`."""
        return int(self.call("cudaMalloc", size, about=about))

    def free(self, address: int) -> None:
        """As :meth:`GpuRuntime.free`."""
        self.call("cudaFree", address)

    def make_stream(self, about: str = "") -> int:
        """As :meth:`GpuRuntime.make_stream`: a cudaStream_t."""
        return int(self.call("cudaStreamCreateWithFlags", 0, about=about))

    def drop_stream(self, stream: int) -> None:
        """As :meth:`GpuRuntime.drop_stream`."""
        self.call("cudaStreamDestroy", stream)

    def make_event(self, about: str = "") -> int:
        """As :meth:`GpuRuntime.make_event`: a cudaEvent_t."""
        return int(self.call("cudaEventCreateWithFlags", 0, about=about))

    def drop_event(self, event: int) -> None:
        """As :meth:`GpuRuntime.drop_event`."""
        self.call("cudaEventDestroy", event)

    def record(self, event: int, stream: int) -> None:
        """As :meth:`GpuRuntime.record`."""
        self.call("cudaEventRecord", event, stream)

    def await_event(self, event: int) -> None:
        """As :meth:`GpuRuntime.await_event`."""
        self.call("cudaEventSynchronize", event)

    def milliseconds(self, start: int, stop: int) -> float:
        """As :meth:`GpuRuntime.milliseconds`."""
        return float(self.call("cudaEventElapsedTime", start, stop))

    def copy_in(self, target: int, source: int, size: int, stream: int) -> None:
        """As :meth:`GpuRuntime.copy_in`."""
        self._copy(target, source, size, "cudaMemcpyHostToDevice", stream)

    def copy_out(self, target: int, source: int, size: int, stream: int) -> None:
        """As :meth:`GpuRuntime.copy_out`."""
        self._copy(target, source, size, "cudaMemcpyDeviceToHost", stream)

    def _copy(self, target: int, source: int, size: int, kind: str, stream: int) -> None:
        way = getattr(self.bindings.cudaMemcpyKind, kind)
        self.call("cudaMemcpyAsync", target, source, size, way, stream, about=f" of {size:,} bytes")

    def fill(self, target: int, value: int, size: int, stream: int) -> None:
        """As :meth:`GpuRuntime.fill`."""
        self.call("cudaMemsetAsync", target, value, size, stream, about=f" of {size:,} bytes")

    def synchronize(self, stream: int) -> None:
        """As :meth:`GpuRuntime.synchronize`."""
        self.call("cudaStreamSynchronize", stream)

    def capturing(self, stream: int) -> bool:
        """As :meth:`GpuRuntime.capturing`."""
        return bool(int(self.call("cudaStreamIsCapturing", stream)))

    def begin_capture(self, stream: int) -> None:
        """As :meth:`GpuRuntime.begin_capture`."""
        mode = self.bindings.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self.call("cudaStreamBeginCapture", stream, mode)

    def end_capture(self, stream: int) -> int:
        """As :meth:`GpuRuntime.end_capture`: a cudaGraphExec_t."""
        graph = self.call("cudaStreamEndCapture", stream)
        try:
            return int(self.call("cudaGraphInstantiate", graph, 0))
        finally:
            self.call("cudaGraphDestroy", graph)

    def replay(self, graph: int, stream: int) -> None:
        """As :meth:`GpuRuntime.replay`."""
        self.call("cudaGraphLaunch", graph, stream)

    def drop_graph(self, graph: int) -> None:
        """As :meth:`GpuRuntime.drop_graph`."""
        self.call("cudaGraphExecDestroy", graph)

    def order(self, before: int, after: int) -> None:
        """As :meth:`GpuRuntime.order`; this thread does not wait."""
        event = self.make_event()
        try:
            self.record(event, before)
            self.call("cudaStreamWaitEvent", after, event, 0)
        finally:  # the runtime keeps the event until it is reached
            self.drop_event(event)

    def owner(self, address: int) -> int | None:
        """As :meth:`GpuRuntime.owner`."""
        status, attributes = self.bindings.cudaPointerGetAttributes(address)
        if status == _INVALID_VALUE:
            self.take_last_error()
            return None
        if status != SUCCESS:
            raise self.failure("cudaPointerGetAttributes", status)
        return int(attributes.device) if int(attributes.type) in _GPU_MEMORY else None

    def launch(self, kernel: LoadedKernel, pointer: Any, stream: int) -> None:
        """As :meth:`GpuRuntime.launch`; only the library's own runtime knows the last error, so its status is checked.

        If an earlier kernel made the GPU unusable, every runtime reports that.
        """
        try:
            kernel.launch(pointer, stream)
        except DeviceError:
            status = self._state(stream)
            if status != SUCCESS:
                raise self.failure(f"the launch of kernel {kernel.id}", status) from None
            raise

    def _state(self, stream: int) -> int:
        """The error status of the stream, 0 if there is none; a stream being captured must not be queried further."""
        status, captured = self.bindings.cudaStreamIsCapturing(stream)
        if status == SUCCESS and not captured:
            (status,) = self.bindings.cudaStreamQuery(stream)
        return SUCCESS if status == _NOT_READY else int(status)

    def clock_mhz(self, index: int) -> float | None:
        """As :meth:`GpuRuntime.clock_mhz`: the multiprocessors' clock, from the driver's management library."""
        from catalog.runtime.devices.cuda.nvml import clock_mhz

        return clock_mhz(self.call("cudaDeviceGetPCIBusId", 32, index))


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
