"""The protocol of backends: a kind of device, the compiler of its kernels, and what runs them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from catalog.errors import DeviceError
from catalog.schema.arithmetic import FLOAT32, Arithmetic

if TYPE_CHECKING:
    from catalog.build.export.toolset import Toolset
    from catalog.build.targets import Target
    from catalog.runtime.devices import Device
    from catalog.runtime.devices.gpu.runtime import GpuRuntime


class Backend(ABC):
    """A kind of device. Kernels run in this process on the host CPU, unless it is a :class:`GpuBackend`.

    Attributes:
        specs: a folder like ``data/arch_specs`` with the specs of its archs; None if they are in the data folder.
        noise: kernels whose median is within this share of the best median are considered equal.
        whole_waves: whether work is split so that blocks fill whole waves of the device.
    """

    specs: ClassVar[Path | None] = None
    noise: ClassVar[float] = 0.05  # on two cores of a shared machine, 75 % of medians differ by less than that
    whole_waves: ClassVar[bool] = False

    @property
    @abstractmethod
    def isas(self) -> Mapping[str, str]:
        """The archs that kernels are compiled for, each with the ISA passed to the compiler, never ``native``.

        Raises:
            SpecError: a file of facts is missing or malformed.
        """

    def owns(self, arch: str) -> bool:
        """Whether it owns ``arch``.

        Raises:
            SpecError: as in :attr:`isas`.
        """
        return arch in self.isas

    @property
    def features(self) -> frozenset[str]:
        """What the device here has that not every device of its arch has; none, by default.

        Selection rules read it as ``:features``: the names, with a space before and after each.
        """
        return frozenset()

    def arithmetic(self, arch: str) -> Arithmetic:
        """How the kernels of ``arch``, one of :attr:`isas`, round on the way to their results; tolerances depend on it.

        By default they do not round: everything is computed in float32.

        Raises:
            SpecError: as in :attr:`isas`.
        """
        return FLOAT32

    @abstractmethod
    def target(self, arch: str) -> Target:
        """The target that compiles rows of ``arch``, one of :attr:`isas`, to libraries."""

    @abstractmethod
    def why_unavailable(self, arch: str) -> str | None:
        """Why kernels of ``arch`` cannot run on this machine, as a part of a sentence; None where they can."""

    def toolset(self, arch: str) -> Toolset:
        """The compiler and flags for building kernels of ``arch`` elsewhere: by default those of its toolchain.

        Raises:
            ToolchainError: there is no toolchain here, and no toolset without one.
            SpecError: as in :attr:`isas`.
        """
        from catalog.build.export.toolset import toolset_from

        return toolset_from(self.target(arch).toolchain(arch))


class GpuBackend(Backend):
    """A kind of GPU: kernels run on its own memory and streams, through its vendor's runtime."""

    noise = 0.01  # by the GPU's own clock, medians hardly differ by more

    def arithmetic(self, arch: str) -> Arithmetic:
        """By default, factors are rounded to the type of the inputs, as matrix units take them."""
        return Arithmetic(rounds_factors=True)

    @abstractmethod
    def runtime(self) -> GpuRuntime:
        """The runtime of such GPUs; it may find no GPU."""

    def why_unavailable(self, arch: str) -> str | None:
        """As :meth:`Backend.why_unavailable`: why the runtime finds no GPU of ``arch``."""
        try:
            self.runtime().first(arch)
        except DeviceError as error:
            return error.message
        return None

    def device(self, arch: str) -> Device[Any]:
        """The first GPU of ``arch`` that the process may use.

        Raises:
            DeviceError: there is no runtime, or it finds no such GPU.
        """
        from catalog.runtime.devices.gpu.device import GpuDevice

        runtime = self.runtime()
        return GpuDevice(runtime, runtime.first(arch))
