"""NVIDIA GPUs, by NVIDIA's CUDA runtime."""

from __future__ import annotations

from typing import Any

from catalog.runtime.devices.cuda_runtime import CudaRuntime
from catalog.runtime.devices.gpu import GpuDevice


class CudaDevice(GpuDevice):
    """An NVIDIA GPU; arguments as of :class:`GpuDevice`, the runtime by default the one of cuda-bindings."""

    def __init__(self, index: int = 0, stream: Any = None, runtime: CudaRuntime | None = None) -> None:
        super().__init__(runtime or CudaRuntime(), index, stream)


def first_gpu(arch: str) -> CudaDevice:
    """The first GPU of ``arch`` that the process may use.

    Raises:
        DeviceError: cuda-bindings or the driver is missing, or there is no such GPU.
    """
    runtime = CudaRuntime()
    return CudaDevice(runtime.first(arch), runtime=runtime)
