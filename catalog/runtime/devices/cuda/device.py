"""NVIDIA GPUs, used through the CUDA runtime."""

from __future__ import annotations

from typing import Any

from catalog.runtime.devices.cuda.runtime import CudaRuntime
from catalog.runtime.devices.gpu.device import GpuDevice


class CudaDevice(GpuDevice):
    """An NVIDIA GPU; arguments as for :class:`GpuDevice`, with cuda-bindings as the default runtime."""

    def __init__(self, index: int = 0, stream: Any = None, runtime: CudaRuntime | None = None) -> None:
        super().__init__(runtime or CudaRuntime(), index, stream)
