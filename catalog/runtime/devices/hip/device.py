"""AMD GPUs, by AMD's HIP runtime."""

from __future__ import annotations

from typing import Any

from catalog.runtime.devices.gpu.device import GpuDevice
from catalog.runtime.devices.hip.runtime import HipRuntime


class HipDevice(GpuDevice):
    """An AMD GPU; arguments as of :class:`GpuDevice`, the runtime by default the one of this machine."""

    def __init__(self, index: int = 0, stream: Any = None, runtime: HipRuntime | None = None) -> None:
        super().__init__(runtime or HipRuntime(), index, stream)
