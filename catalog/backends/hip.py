"""AMD GPUs, with kernels of CK Tile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from catalog.backends.protocol import GpuBackend

if TYPE_CHECKING:
    from catalog.build.export.toolset import Toolset
    from catalog.build.targets import Target
    from catalog.runtime.devices.gpu.runtime import GpuRuntime


class _Hip(GpuBackend):
    """AMD GPUs, with kernels of CK Tile."""

    @property
    def isas(self) -> Mapping[str, str]:
        from catalog.build.hip.facts import hip_facts

        return {arch: arch for arch in hip_facts().arches}

    def owns(self, arch: str) -> bool:
        return arch.startswith("gfx")

    def target(self, arch: str) -> Target:
        from catalog.build.targets import CK

        return CK

    def why_unavailable(self, arch: str) -> str | None:
        from catalog.runtime.devices.hip import driver  # without NumPy: selecting for a GPU on a laptop needs no more

        return driver.why_unavailable(arch) or super().why_unavailable(arch)

    def runtime(self) -> GpuRuntime:
        from catalog.runtime.devices.hip.runtime import HipRuntime

        return HipRuntime()

    def toolset(self, arch: str) -> Toolset:
        from catalog.build.export.toolset import hip_toolset

        return hip_toolset(arch, self.target(arch))


HIP = _Hip()
