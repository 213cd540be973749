"""NVIDIA GPUs, with our own kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from catalog.backends.protocol import GpuBackend

if TYPE_CHECKING:
    from catalog.build.export.toolset import Toolset
    from catalog.build.targets import Target
    from catalog.runtime.devices.gpu.runtime import GpuRuntime
    from catalog.schema.arithmetic import Arithmetic


class _Cuda(GpuBackend):
    """NVIDIA GPUs, with our own kernels."""

    whole_waves = True

    @property
    def isas(self) -> Mapping[str, str]:
        from catalog.build.cuda.facts import cuda_facts

        return {arch: facts.isa for arch, facts in cuda_facts().arches.items()}

    def owns(self, arch: str) -> bool:
        return arch.startswith("sm_")

    def arithmetic(self, arch: str) -> Arithmetic:
        from catalog.build.cuda.facts import cuda_facts

        return replace(super().arithmetic(arch), fp8_sum_bits=cuda_facts().arches[arch].fp8_sum_bits)

    def target(self, arch: str) -> Target:
        from catalog.build.targets import cuda_target

        return cuda_target(arch)

    def why_unavailable(self, arch: str) -> str | None:
        from catalog.runtime.devices.cuda import driver  # without NumPy: selecting for a GPU on a laptop needs no more

        return driver.why_unavailable(arch) or super().why_unavailable(arch)

    def runtime(self) -> GpuRuntime:
        from catalog.runtime.devices.cuda.runtime import CudaRuntime

        return CudaRuntime()

    def toolset(self, arch: str) -> Toolset:
        from catalog.build.export.toolset import cuda_toolset

        return cuda_toolset(arch, self.target(arch))


CUDA = _Cuda()
