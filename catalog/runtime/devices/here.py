"""The devices of this machine, by arch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from catalog.backends import GpuBackend, backend_of, why_unavailable
from catalog.errors import DeviceError
from catalog.forks import Lock
from catalog.runtime.devices import DeviceInfo
from catalog.settings import settings
from catalog.threads import checked

if TYPE_CHECKING:
    from catalog.runtime.devices import Device
    from catalog.runtime.devices.host.device import HostDevice


class Devices:
    """One object a device, made when it is first asked for, in any thread.

    Args:
        num_threads: threads of a host kernel, as :class:`~.host.HostDevice` takes them; None: as the settings say.

    Raises:
        UsageError: so many threads are not allowed.
    """

    def __init__(self, num_threads: int | None) -> None:
        self._num_threads = None if num_threads is None else checked(num_threads)
        self._devices: dict[str, Device[Any]] = {}
        self._on_host: dict[str, bool] = {}
        self._lock = Lock()

    @cached_property
    def host(self) -> HostDevice:
        """The host CPU."""
        from catalog.runtime.devices.host.device import HostDevice

        chosen = self._num_threads
        return HostDevice(settings().num_threads if chosen is None else chosen)

    def host_of(self, arch: str) -> HostDevice | None:
        """The host CPU, if it runs kernels of ``arch``, which no GPU does."""
        runs = self._on_host.get(arch)
        if runs is None:
            resolved = resolve_arch(arch)
            runs = not isinstance(backend_of(resolved), GpuBackend) and why_unavailable(resolved) is None
            self._on_host[arch] = runs
        return self.host if runs else None

    def of(self, arch: str) -> Device[Any]:
        """What kernels of ``arch`` run on: the host CPU, or the first GPU of that arch which the process may use.

        Raises:
            DeviceError: this machine has none; says what it lacks.
        """
        device = self._devices.get(arch)
        if device is None:
            with self._lock:
                if arch not in self._devices:
                    self._devices[arch] = self._open(resolve_arch(arch))
                device = self._devices[arch]
        return device

    def info(self, arch: str) -> DeviceInfo:
        """What timings of kernels of ``arch`` are tied to.

        Raises:
            DeviceError: as :meth:`of`.
        """
        return replace(self.of(arch).device, arch=resolve_arch(arch))

    def _open(self, arch: str) -> Device[Any]:
        check_available(arch)
        backend = backend_of(arch)
        return backend.device(arch) if isinstance(backend, GpuBackend) else self.host


def check_available(arch: str) -> None:
    """Kernels of ``arch`` can run on this machine.

    Raises:
        DeviceError: they cannot; says why.
    """
    reason = why_unavailable(arch)
    if reason is not None:
        raise DeviceError(
            f"{arch} kernels cannot run on this machine: {reason}",
            hint="This machine's CPU is the arch 'host': --arch host, arch='host'.",
        )


def reopened(identity: Mapping[str, Any]) -> Device[Any]:
    """The device with this :attr:`Device.identity`, which was read in another process of this machine.

    Raises:
        DeviceError: this process may not use it.
    """
    if "uuid" not in identity:
        from catalog.runtime.devices.host.device import HostDevice

        return HostDevice(identity["num_threads"])
    from catalog.runtime.devices.gpu.device import GpuDevice

    backend = backend_of(identity["arch"])
    if not isinstance(backend, GpuBackend):
        raise DeviceError(f"{identity['arch']} is no arch of a GPU")
    runtime = backend.runtime()
    return GpuDevice(runtime, runtime.with_uuid(identity["uuid"]))


def resolve_arch(arch: str) -> str:
    """``arch`` with ``host`` resolved to this machine's CPU.

    Raises:
        DeviceError: ``host``, and no host arch runs on this CPU.
    """
    if arch != "host":
        return arch
    from catalog.runtime.devices.host.device import resolve_host_arch

    return resolve_host_arch()
