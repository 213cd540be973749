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
    """This machine's devices, one object each, created on first use; thread-safe.

    Args:
        num_threads: threads of a host kernel, as for ``HostDevice``; None: from the settings.

    Raises:
        UsageError: ``num_threads`` is out of range.
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
        """The host CPU if ``arch`` is a CPU's, else None."""
        runs = self._on_host.get(arch)
        if runs is None:
            resolved = resolve_arch(arch)
            runs = not isinstance(backend_of(resolved), GpuBackend) and why_unavailable(resolved) is None
            self._on_host[arch] = runs
        return self.host if runs else None

    def of(self, arch: str) -> Device[Any]:
        """The device that runs kernels of ``arch``: the host CPU, or the first usable GPU of that arch.

        Raises:
            DeviceError: this machine has no such device; the message says what is missing.
        """
        device = self._devices.get(arch)
        if device is None:
            with self._lock:
                if arch not in self._devices:
                    self._devices[arch] = self._open(resolve_arch(arch))
                device = self._devices[arch]
        return device

    def info(self, arch: str) -> DeviceInfo:
        """The description that timings of kernels of ``arch`` are recorded with.

        Raises:
            DeviceError: as :meth:`of`.
        """
        return replace(self.of(arch).device, arch=resolve_arch(arch))

    def _open(self, arch: str) -> Device[Any]:
        check_available(arch)
        backend = backend_of(arch)
        return backend.device(arch) if isinstance(backend, GpuBackend) else self.host


def check_available(arch: str) -> None:
    """Check that kernels of ``arch`` can run on this machine.

    Raises:
        DeviceError: they cannot; the message says why.
    """
    reason = why_unavailable(arch)
    if reason is not None:
        raise DeviceError(
            f"{arch} kernels cannot run on this machine: {reason}",
            hint="For this machine's CPU use --arch host or arch='host'.",
        )


def reopened(identity: Mapping[str, Any]) -> Device[Any]:
    """The device with this :attr:`Device.identity`, taken in another process of this machine.

    Raises:
        DeviceError: this process may not use it.
    """
    if "uuid" not in identity:
        from catalog.runtime.devices.host.device import HostDevice

        return HostDevice(identity["num_threads"])
    from catalog.runtime.devices.gpu.device import GpuDevice

    backend = backend_of(identity["arch"])
    if not isinstance(backend, GpuBackend):
        raise DeviceError(f"{identity['arch']} is not a GPU arch")
    runtime = backend.runtime()
    return GpuDevice(runtime, runtime.with_uuid(identity["uuid"]))


def resolve_arch(arch: str) -> str:
    """Return ``arch``, with ``host`` resolved to the arch of this machine's CPU.

    Raises:
        DeviceError: ``host``, and no host arch runs on this CPU.
    """
    if arch != "host":
        return arch
    from catalog.runtime.devices.host.device import resolve_host_arch

    return resolve_host_arch()
