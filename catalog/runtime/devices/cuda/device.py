"""NVIDIA GPUs, by NVIDIA's CUDA runtime."""

from __future__ import annotations

from typing import Any

from catalog.runtime.devices.cuda.runtime import CudaRuntime
from catalog.runtime.devices.gpu.device import GpuDevice


class CudaDevice(GpuDevice):
    """An NVIDIA GPU; arguments as of :class:`GpuDevice`, the runtime by default the one of cuda-bindings."""

    def __init__(self, index: int = 0, stream: Any = None, runtime: CudaRuntime | None = None) -> None:
        super().__init__(runtime or CudaRuntime(), index, stream)
