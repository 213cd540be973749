"""AMD GPUs, used through the HIP runtime."""

from __future__ import annotations

from typing import Any

from catalog.runtime.devices.gpu.device import GpuDevice
from catalog.runtime.devices.hip.runtime import HipRuntime


class HipDevice(GpuDevice):
    """An AMD GPU; arguments as for :class:`GpuDevice`, with this machine's HIP as the default runtime."""

    def __init__(self, index: int = 0, stream: Any = None, runtime: HipRuntime | None = None) -> None:
        super().__init__(runtime or HipRuntime(), index, stream)
