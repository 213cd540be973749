"""cuda.bindings.runtime's functions over host memory: the same call forms, strict about pointers, streams, captures.

A copy is done when its stream or an event is synchronised, not before. ``log`` has every call as (name, arguments).
A kernel fails by setting the environment variable CUDA_FAULT of its process to the number of the error.
"""

from __future__ import annotations

import ctypes
import time
from types import SimpleNamespace

from cuda.bindings.runtime import cudaError_t, cudaMemcpyKind, cudaStreamCaptureMode

OK = cudaError_t.cudaSuccess
INVALID = cudaError_t.cudaErrorInvalidValue
LOST = cudaError_t.cudaErrorIllegalAddress
UNSUPPORTED = cudaError_t.cudaErrorStreamCaptureUnsupported

IN_CAPTURE = {
    "cudaGetLastError", "cudaGetErrorName", "cudaGetErrorString", "cudaGetDevice", "cudaStreamIsCapturing",
    "cudaRuntimeGetVersion", "cudaDriverGetVersion", "cudaPointerGetAttributes", "cudaStreamEndCapture",
}  # fmt: skip
"""What may be called while a graph is being captured; all else invalidates the capture."""

NO_RESULT = {
    "cudaSetDevice", "cudaFree", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaStreamDestroy", "cudaEventDestroy",
    "cudaStreamSynchronize", "cudaEventSynchronize", "cudaStreamQuery", "cudaStreamWaitEvent", "cudaEventRecord",
    "cudaGetLastError", "cudaStreamBeginCapture", "cudaGraphLaunch", "cudaGraphDestroy", "cudaGraphExecDestroy",
}  # fmt: skip
"""Functions that return a status alone."""


_getenv = ctypes.CDLL(None).getenv
_getenv.restype = ctypes.c_char_p


class FakeCuda:
    """Two H200s, and a third GPU of another arch.

    ``failing`` has the error of a function by its name, ``captured`` the streams that are; ``broken``: a kernel has
    failed, which calls that wait say from then on.
    """

    cudaMemcpyKind = cudaMemcpyKind
    cudaStreamCaptureMode = cudaStreamCaptureMode
    archs = ((9, 0), (9, 0), (8, 0))

    def __init__(self, count=3):
        self.count, self.device, self.last = count, 0, OK
        self.memory, self.handles, self.times = {}, {}, {}
        self.pending, self.log = [], []
        self.failing, self.captured, self.broken = {}, set(), False
        self.next_handle = 0x100

    @property
    def live(self):
        """What was made and not released."""
        return len(self.memory) + len(self.handles)

    def names(self):
        return [name for name, _ in self.log]

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if not name.startswith("cuda") or name in ("cudaMemcpyKind", "cudaStreamCaptureMode"):
            return found

        def call(*arguments):
            self.log.append((name, arguments))
            error = UNSUPPORTED if self.captured and name not in IN_CAPTURE else self.failing.get(name)
            result = found(*arguments) if error is None else error
            if not isinstance(result, tuple):
                self.last = result
                return (result,) if name in NO_RESULT else (result, None)
            return result

        return call

    def gpu_of(self, address):
        return next((gpu for base, (room, gpu) in self.memory.items() if base <= address < base + len(room)), None)

    def _make(self, gpu):
        self.next_handle += 1
        self.handles[self.next_handle] = gpu
        return OK, self.next_handle

    def _settle(self):
        for target, source, size in self.pending:
            ctypes.memmove(target, source, size)
        self.pending = []

    @property
    def state(self):
        """What kernels have left of the GPU; os.environ does not know what they set."""
        fault = _getenv(b"CUDA_FAULT")
        return cudaError_t(int(fault)) if fault else LOST if self.broken else OK

    def cudaGetErrorName(self, status):
        return OK, cudaError_t(status).name.encode()

    def cudaGetErrorString(self, status):
        return OK, {2: b"out of memory"}.get(int(status), cudaError_t(status).name.encode())

    def cudaGetLastError(self):
        error, self.last = self.last, self.state
        return (error,)

    def cudaRuntimeGetVersion(self):
        return OK, 13050

    def cudaDriverGetVersion(self):
        return OK, 13000

    def cudaGetDeviceCount(self):
        return (OK, self.count) if self.count else cudaError_t.cudaErrorNoDevice

    def cudaGetDeviceProperties(self, index):
        major, minor = self.archs[index]
        return OK, SimpleNamespace(
            name=b"NVIDIA H200\0\0" if major == 9 else b"NVIDIA A100", major=major, minor=minor,
            multiProcessorCount=132, totalGlobalMem=141 << 30, uuid=SimpleNamespace(bytes=bytes([index]) * 16),
        )  # fmt: skip

    def cudaGetDevice(self):
        return OK, self.device

    def cudaSetDevice(self, index):
        if index >= self.count:
            return cudaError_t.cudaErrorInvalidDevice
        self.device = index
        return (OK,)

    def cudaDeviceGetPCIBusId(self, length, index):
        return OK, b"0000:%02x:00.0" % index

    def cudaMalloc(self, size):
        room = (ctypes.c_uint8 * size)(*b"\xee" * min(size, 64))
        self.memory[ctypes.addressof(room)] = room, self.device
        return OK, ctypes.addressof(room)

    def cudaFree(self, address):
        self._settle()
        return INVALID if self.memory.pop(address, None) is None else (OK,)

    def cudaMemcpyAsync(self, target, source, size, kind, stream):
        inside = target if kind == cudaMemcpyKind.cudaMemcpyHostToDevice else source
        if self.gpu_of(inside) is None or (stream == 0 and self.gpu_of(inside) != self.device):
            return INVALID
        self.pending.append((target, source, size))
        return (OK,)

    def cudaMemsetAsync(self, target, value, size, stream):
        if self.gpu_of(target) != self.device:
            return INVALID
        ctypes.memset(target, value, size)
        return (OK,)

    def cudaPointerGetAttributes(self, address):
        gpu = self.gpu_of(address)
        return OK, SimpleNamespace(type=0 if gpu is None else 2, device=-2 if gpu is None else gpu)

    def cudaStreamCreateWithFlags(self, flags):
        return self._make(self.device)

    def cudaEventCreateWithFlags(self, flags):
        return self._make(self.device)

    def cudaStreamDestroy(self, handle):
        return INVALID if self.handles.pop(handle, None) is None else (OK,)

    cudaEventDestroy = cudaGraphDestroy = cudaGraphExecDestroy = cudaStreamDestroy

    def cudaStreamSynchronize(self, stream):
        if stream and stream not in self.handles:
            return cudaError_t.cudaErrorInvalidResourceHandle
        self._settle()
        return (self.state,)

    cudaEventSynchronize = cudaStreamSynchronize

    def cudaStreamQuery(self, stream):
        return (self.state,)

    def cudaStreamIsCapturing(self, stream):
        return OK, int(stream in self.captured)

    def cudaStreamBeginCapture(self, stream, mode):
        if stream not in self.handles:
            return UNSUPPORTED  # the default stream cannot be captured
        self.captured.add(stream)
        return (OK,)

    def cudaStreamEndCapture(self, stream):
        self.captured.remove(stream)
        return self._make(self.device)

    def cudaGraphInstantiate(self, graph, flags):
        return self._make(self.device)

    def cudaGraphLaunch(self, graph, stream):
        return (OK,) if graph in self.handles else INVALID

    def cudaStreamWaitEvent(self, stream, event, flags):
        return (OK,) if event in self.handles else INVALID

    def cudaEventRecord(self, event, stream):
        if self.handles.get(event) != self.device:
            return INVALID
        self.times[event] = time.perf_counter_ns()
        return (OK,)

    def cudaEventElapsedTime(self, start, stop):
        return OK, (self.times[stop] - self.times[start]) / 1e6


def failing(**errors):
    """GPUs whose functions fail, by name, with errors by number."""
    fake = FakeCuda()
    fake.failing = {name: cudaError_t(number) for name, number in errors.items()}
    return fake
