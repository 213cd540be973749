"""Backends: the kinds of devices that kernels are compiled for and run on, each the owner of some archs.

The built-in ones are :data:`HIP`, :data:`CUDA` and :data:`HOST`. Other distributions have theirs as entry points of the
group ``catalog.backends``, each an instance of :class:`Backend`; they are looked for only where an arch is no built-in
backend's, or where archs are listed. What a backend is made of is imported when it is first asked for.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from catalog.errors import BackendError
from catalog.settings import data_dir

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from catalog.build.export.toolset import Toolset
    from catalog.build.targets import Target
    from catalog.runtime.devices import Device
    from catalog.runtime.devices.gpu.runtime import GpuRuntime

_log = logging.getLogger(__name__)

GROUP = "catalog.backends"
"""The group of entry points."""

HOST_NOISE, GPU_NOISE = 0.05, 0.01
"""By how much medians of a kernel differ from one tuning to the next: 75 % of them by less on two cores of a shared
machine, a GPU's, by its own clock, hardly by more."""


class Backend(ABC):
    """A kind of device. This one's kernels run in this process, on the host CPU; those of others: :class:`GpuBackend`.

    Attributes:
        specs: a folder like ``data/arch_specs``, with the specs of its archs; None: they are in the data folder.
        noise: kernels that are nearer than that to the best are as good, as a share of its median.
        rounds_weights: the attention weights are rounded to the type of Q before they multiply V, as the matrix units
            of a GPU take them; what is allowed to differ from the reference depends on it.
        whole_waves: the keys are split so that blocks fill whole waves of the device.
    """

    specs: ClassVar[Path | None] = None
    noise: ClassVar[float] = HOST_NOISE
    rounds_weights: ClassVar[bool] = False
    whole_waves: ClassVar[bool] = False

    @property
    @abstractmethod
    def isas(self) -> Mapping[str, str]:
        """The archs that kernels are compiled for, each with its ISA: what the compiler is told, never ``native``.

        Raises:
            SpecError: a file of facts is missing or malformed.
        """

    def owns(self, arch: str) -> bool:
        """Whether ``arch`` is its own.

        Raises:
            SpecError: as :attr:`isas`.
        """
        return arch in self.isas

    @abstractmethod
    def target(self, arch: str) -> Target:
        """What turns rows of ``arch``, one of :attr:`isas`, into libraries."""

    @abstractmethod
    def why_unavailable(self, arch: str) -> str | None:
        """Why kernels of ``arch`` cannot run on this machine, as a part of a sentence; None where they can."""

    def toolset(self, arch: str) -> Toolset:
        """With what another build compiles for ``arch``: that of its toolchain.

        Raises:
            ToolchainError: there is none here, nor can there be a toolset without.
            SpecError: as :attr:`isas`.
        """
        from catalog.build.export.toolset import toolset_from

        return toolset_from(self.target(arch).toolchain(arch))


class GpuBackend(Backend):
    """A kind of GPUs: kernels run on their own memory and streams, by the runtime of who made them."""

    noise = GPU_NOISE
    rounds_weights = True

    @abstractmethod
    def runtime(self) -> GpuRuntime:
        """What such GPUs are used by; it may find none."""

    def device(self, arch: str) -> Device[Any]:
        """The first GPU of ``arch`` that the process may use.

        Raises:
            DeviceError: there is no runtime, or it finds no such GPU.
        """
        from catalog.runtime.devices.gpu.device import GpuDevice

        runtime = self.runtime()
        return GpuDevice(runtime, runtime.first(arch))


class _Host(Backend):
    """CPUs, with kernels of our own."""

    @property
    def isas(self) -> Mapping[str, str]:
        from catalog.build.toolchains import host_facts

        return {arch: facts.isa for arch, facts in host_facts().arches.items()}

    def owns(self, arch: str) -> bool:
        return arch == "host" or super().owns(arch)

    def target(self, arch: str) -> Target:
        from catalog.build import targets

        return targets.HOST

    def why_unavailable(self, arch: str) -> str | None:
        from catalog.runtime.devices.host import device as host

        return host.why_unavailable(arch)

    def toolset(self, arch: str) -> Toolset:
        from catalog.build.export.toolset import host_toolset, toolset_here

        return toolset_here(arch, self.target(arch)) or host_toolset(arch)


class _Hip(GpuBackend):
    """AMD GPUs, with kernels of CK Tile."""

    @property
    def isas(self) -> Mapping[str, str]:
        from catalog.build.hip.facts import hip_facts

        return {arch: arch for arch in hip_facts().arches}

    def owns(self, arch: str) -> bool:
        return arch.startswith("gfx")

    def target(self, arch: str) -> Target:
        from catalog.build import targets

        return targets.CK

    def why_unavailable(self, arch: str) -> str | None:
        from catalog.runtime.devices.hip import (
            driver as hip_driver,  # without NumPy: a laptop that selects for a GPU asks this
        )

        return hip_driver.why_unavailable(arch)

    def runtime(self) -> GpuRuntime:
        from catalog.runtime.devices.hip.runtime import HipRuntime

        return HipRuntime()

    def toolset(self, arch: str) -> Toolset:
        from catalog.build.export.toolset import hip_toolset

        return hip_toolset(arch, self.target(arch))


class _Cuda(GpuBackend):
    """NVIDIA GPUs, with kernels of our own."""

    whole_waves = True

    @property
    def isas(self) -> Mapping[str, str]:
        from catalog.build.cuda.facts import cuda_facts

        return {arch: facts.isa for arch, facts in cuda_facts().arches.items()}

    def owns(self, arch: str) -> bool:
        return arch.startswith("sm_")

    def target(self, arch: str) -> Target:
        from catalog.build import targets

        return targets.cuda_target(arch)

    def why_unavailable(self, arch: str) -> str | None:
        from catalog.runtime.devices.cuda import driver as cuda_driver  # without NumPy, as above

        return cuda_driver.why_unavailable(arch)

    def runtime(self) -> GpuRuntime:
        from catalog.runtime.devices.cuda.runtime import CudaRuntime

        return CudaRuntime()

    def toolset(self, arch: str) -> Toolset:
        from catalog.build.export.toolset import cuda_toolset

        return cuda_toolset(arch, self.target(arch))


HIP, CUDA, HOST = _Hip(), _Cuda(), _Host()

_BUILT_IN: Mapping[str, Backend] = MappingProxyType({"hip": HIP, "cuda": CUDA, "host": HOST})
"""By name; the host's archs are in a file, so that it is asked last."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """A backend of another distribution: ``title`` says whose; where it cannot be used, ``broken`` says why."""

    title: str
    backend: Backend | None = None
    broken: str = ""


@functools.cache
def plugins() -> tuple[Plugin, ...]:
    """The backends of other distributions, looked for once; of one that cannot be used a warning says why."""
    from importlib.metadata import entry_points

    found = tuple(map(_load, entry_points(group=GROUP)))
    for plugin in found:
        if plugin.broken:
            _log.warning("%s cannot be used: %s", plugin.title, plugin.broken)
    return found


def _load(point: EntryPoint) -> Plugin:
    whose = "an unknown distribution" if point.dist is None else f"{point.dist.name} {point.dist.version}"
    title = f"backend {point.name} of {whose}"
    try:
        backend = point.load()
        if not isinstance(backend, Backend):
            return Plugin(title, broken=f"{point.value} is no catalog.backends.Backend, but {backend!r}")
        taken = [
            f"{arch} is an arch of the built-in backend {name}"
            for name, other in _BUILT_IN.items()
            for arch in backend.isas
            if other.owns(arch)
        ]
    except (Exception, SystemExit) as error:  # whatever somebody else's code raises when it is imported
        return Plugin(title, broken=f"{type(error).__name__}: {error}")
    return Plugin(title, broken="; ".join(taken)) if taken else Plugin(title, backend)


def backends() -> tuple[Backend, ...]:
    """All that can be used, the built-in ones first."""
    return (*_BUILT_IN.values(), *(plugin.backend for plugin in plugins() if plugin.backend is not None))


def backend_of(arch: str) -> Backend:
    """The backend that owns ``arch``; :data:`HOST`, which says that it is no CPU, where none does.

    Raises:
        BackendError: two do.
        SpecError: a file of facts is missing or malformed.
    """
    built_in = _built_in(arch)
    if built_in is not None:
        return built_in
    owners = {plugin.title: plugin.backend for plugin in plugins() if plugin.backend and plugin.backend.owns(arch)}
    if len(owners) > 1:
        raise BackendError(
            f"{arch} is an arch of {len(owners)} backends: {'; '.join(owners)}", hint="Uninstall all but one of them."
        )
    return next(iter(owners.values()), HOST)


def _built_in(arch: str) -> Backend | None:
    return next((backend for backend in _BUILT_IN.values() if backend.owns(arch)), None)


def spec_folders(arch: str | None = None) -> tuple[Path, ...]:
    """The folders of specs, that of the settings first: those where ``arch`` may have one, None: all."""
    own = data_dir() / "arch_specs"
    if arch is not None and _built_in(arch) is not None:
        return (own,)
    return (own, *(backend.specs for backend in backends() if backend.specs is not None))
