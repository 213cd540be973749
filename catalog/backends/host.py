"""Host CPUs, with our own kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from catalog.backends.protocol import Backend

if TYPE_CHECKING:
    from catalog.build.export.toolset import Toolset
    from catalog.build.targets import Target


class _Host(Backend):
    """The CPU of this machine."""

    @property
    def isas(self) -> Mapping[str, str]:
        from catalog.build.toolchains import host_facts

        return {arch: facts.isa for arch, facts in host_facts().arches.items()}

    def owns(self, arch: str) -> bool:
        from catalog.build.toolchains import host_facts

        return arch == "host" or arch in host_facts().arches

    def target(self, arch: str) -> Target:
        from catalog.build.targets import HOST

        return HOST

    @property
    def features(self) -> frozenset[str]:
        from catalog.runtime.devices.host.device import cpu_features

        return cpu_features()

    def why_unavailable(self, arch: str) -> str | None:
        from catalog.runtime.devices.host.device import why_unavailable

        return why_unavailable(arch)

    def toolset(self, arch: str) -> Toolset:
        from catalog.build.export.toolset import host_toolset, toolset_here

        return toolset_here(arch, self.target(arch)) or host_toolset(arch)


HOST = _Host()
