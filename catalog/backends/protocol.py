"""What a backend is: a kind of devices, what compiles kernels for them, and what runs those."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from catalog.errors import DeviceError

if TYPE_CHECKING:
    from catalog.build.export.toolset import Toolset
    from catalog.build.targets import Target
    from catalog.runtime.devices import Device
    from catalog.runtime.devices.gpu.runtime import GpuRuntime


class Backend(ABC):
    """A kind of device. This one's kernels run in this process, on the host CPU; those of others: :class:`GpuBackend`.

    Attributes:
        specs: a folder like ``data/arch_specs``, with the specs of its archs; None: they are in the data folder.
        noise: kernels that are nearer than that to the best are as good, as a share of its median.
        rounds_weights: what kernels compute is rounded to the type of the inputs before it is multiplied again, as the
            matrix units of a GPU take it (attention: the weights); what may differ from the reference depends on it.
        whole_waves: work is split so that blocks fill whole waves of the device.
    """

    specs: ClassVar[Path | None] = None
    noise: ClassVar[float] = 0.05  # on two cores of a shared machine, 75 % of medians differ by less
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

    noise = 0.01  # by its own clock, medians hardly differ by more
    rounds_weights = True

    @abstractmethod
    def runtime(self) -> GpuRuntime:
        """What such GPUs are used by; it may find none."""

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
