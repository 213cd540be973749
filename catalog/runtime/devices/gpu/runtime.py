"""The interface of GPU runtimes of all vendors: the calls that the catalog needs, and the errors of failed calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from catalog.errors import DeviceError, KernelFaultError
from catalog.forks import SPAWN, forks
from catalog.runtime.devices import DeviceInfo
from catalog.runtime.devices.gpu.vendors import Vendor

if TYPE_CHECKING:
    from catalog.runtime.devices.loading import LoadedKernel

SUCCESS = 0
"""The status of a successful call, in every runtime."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that the runtime sees: its number, description and memory.

    ``uuid`` identifies it in other processes; None if the runtime does not report one.
    """

    index: int
    info: DeviceInfo
    memory_bytes: int
    uuid: str | None = None


class GpuRuntime(ABC):
    """A vendor's runtime. Addresses and handles of streams and events are integers; stream 0 is the default stream.

    ``faults`` has the errors that only kernels cause, by the runtime's names, with what the kernel did; after one of
    them the process can no longer use the GPU. ``remedies`` says by name what to do about an error, ``otherwise`` what
    to do about all others, ``no_gpu`` what is needed to find a GPU. The argument ``about`` adds details to the message
    of a failed call. Every method except those about errors raises DeviceError if the runtime fails or is missing.
    """

    vendor: ClassVar[Vendor]
    faults: ClassVar[Mapping[str, str]] = MappingProxyType({})
    remedies: ClassVar[Mapping[str, str]]
    otherwise: ClassVar[str]
    no_gpu: ClassVar[str]

    @property
    @abstractmethod
    def version(self) -> str:
        """The runtime's version."""

    @abstractmethod
    def error_name(self, status: int) -> str:
        """The runtime's name for a status."""

    @abstractmethod
    def error_text(self, status: int) -> str:
        """The runtime's description of a status."""

    @abstractmethod
    def take_last_error(self) -> int:
        """Return and reset the last error of this thread's calls, 0 for none; the error of a lost GPU stays."""

    @abstractmethod
    def _count(self) -> tuple[int, int]:
        """A status, and the number of GPUs that the process may use."""

    @abstractmethod
    def _gpu(self, index: int) -> Gpu:
        """The GPU of this number."""

    @abstractmethod
    def _current(self) -> int:
        """As :meth:`current`."""

    @abstractmethod
    def _make_current(self, index: int) -> None:
        """Make GPU ``index`` current for this thread's calls."""

    @abstractmethod
    def allocate(self, size: int, about: str = "") -> int:
        """Allocate ``size`` bytes, at least 1, of the current GPU's memory; return the address."""

    @abstractmethod
    def free(self, address: int) -> None:
        """Free memory once all work of its GPU is done."""

    @abstractmethod
    def make_stream(self, about: str = "") -> int:
        """Create a stream, a queue of work, on the current GPU."""

    @abstractmethod
    def drop_stream(self, stream: int) -> None:
        """Release a stream."""

    @abstractmethod
    def make_event(self, about: str = "") -> int:
        """Create a timing event on the current GPU."""

    @abstractmethod
    def drop_event(self, event: int) -> None:
        """Release an event."""

    @abstractmethod
    def record(self, event: int, stream: int) -> None:
        """Record the event after the stream's current work."""

    @abstractmethod
    def await_event(self, event: int) -> None:
        """Wait until the event's stream has reached it."""

    @abstractmethod
    def milliseconds(self, start: int, stop: int) -> float:
        """The time between two reached events."""

    @abstractmethod
    def copy_in(self, target: int, source: int, size: int, stream: int) -> None:
        """Start a copy of ``size`` bytes from the host to a GPU; both must live until the stream is synchronised."""

    @abstractmethod
    def copy_out(self, target: int, source: int, size: int, stream: int) -> None:
        """Start a copy of ``size`` bytes from a GPU to the host; otherwise as :meth:`copy_in`."""

    @abstractmethod
    def fill(self, target: int, value: int, size: int, stream: int) -> None:
        """Start setting ``size`` bytes of a GPU's memory to the byte ``value``."""

    @abstractmethod
    def synchronize(self, stream: int) -> None:
        """Wait for all work of a stream; raises if some of it failed."""

    @abstractmethod
    def capturing(self, stream: int) -> bool:
        """Whether a stream is being captured, so that its work goes into a graph instead of to the GPU."""

    @abstractmethod
    def begin_capture(self, stream: int) -> None:
        """Begin to capture a stream other than the default one; other threads may use the GPU meanwhile."""

    @abstractmethod
    def end_capture(self, stream: int) -> int:
        """End the capture of a stream; return a handle of the captured graph, ready to be replayed."""

    @abstractmethod
    def replay(self, graph: int, stream: int) -> None:
        """Start the work of a captured graph on a stream."""

    @abstractmethod
    def drop_graph(self, graph: int) -> None:
        """Release a captured graph."""

    @abstractmethod
    def owner(self, address: int) -> int | None:
        """The number of the GPU whose memory contains ``address``; None for memory unknown to the runtime."""

    @abstractmethod
    def launch(self, kernel: LoadedKernel, pointer: Any, stream: int) -> None:
        """Start a kernel on the current GPU with a pointer to its arguments; it is done when the stream is."""

    @cached_property
    def _process(self) -> int:
        """The process that uses this runtime, as its number of :func:`forks`."""
        return forks()

    @property
    def forked(self) -> bool:
        """Whether an ancestor of this process has used this runtime, which then must not be called."""
        return self._process != forks()

    def check_process(self) -> None:
        """Check that this process may call the runtime.

        Raises:
            DeviceError: this process is a fork of one that used the runtime; GPU contexts do not survive a fork.
        """
        if self.forked:
            raise DeviceError(
                f"this process was forked after {self.vendor.runtime} was used, which cannot survive a fork", hint=SPAWN
            )

    def current(self) -> int:
        """The number of the GPU that is current for this thread.

        Raises:
            DeviceError: as :meth:`check_process`, or the runtime fails.
        """
        self.check_process()
        return self._current()

    def order(self, before: int, after: int) -> None:
        """Make later work of the stream ``after`` wait for the current work of the stream ``before``."""
        self.synchronize(before)

    def clock_mhz(self, index: int) -> float | None:
        """The current clock rate of GPU ``index`` in MHz, if the runtime or the driver reports it."""
        return None

    def failure(self, what: str, status: int) -> DeviceError:
        """The error for the status of ``what``: a :class:`KernelFaultError` if it is one of ``faults``."""
        # Reset the last error: it is reported here, and the next caller, such as PyTorch, must not see it.
        self.take_last_error()
        name, means = self.error_name(status), self.error_text(status)
        explained = name if means == name else f"{name}, {means}"
        message, hint = f"{what} failed: {explained} ({int(status)})", self.remedies.get(name, self.otherwise)
        fault = self.faults.get(name)
        return DeviceError(message, hint=hint) if fault is None else KernelFaultError(message, hint=hint, fault=fault)

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that the process may use, at least one.

        Raises:
            DeviceError: there is no GPU or no runtime.
        """
        self.check_process()
        status, count = self._count()
        if status != SUCCESS or not count:
            called = f"{self.vendor.runtime.lower()}GetDeviceCount"
            reason = f" ({self.failure(called, status).message})" if status != SUCCESS else ""
            hint = f"This process was forked. {SPAWN}\n{self.no_gpu}" if forks() else self.no_gpu
            raise DeviceError(f"the {self.vendor.runtime} runtime {self.version} finds no GPU{reason}", hint=hint)
        return tuple(map(self._gpu, range(count)))

    def first(self, arch: str) -> int:
        """The number of the first GPU of ``arch`` that the process may use.

        Raises:
            DeviceError: there is no runtime, or no GPU of this arch.
        """
        for gpu in self.gpus:
            if gpu.info.arch == arch:
                return gpu.index
        found = ", ".join(f"{gpu.info.name} of arch {gpu.info.arch}" for gpu in self.gpus)
        raise DeviceError(
            f"the {self.vendor.runtime} runtime {self.version} finds no GPU of arch {arch}, but {found} "
            f"({self.vendor.hidden_by} may hide GPUs)"
        )

    def with_uuid(self, uuid: str) -> int:
        """The number of the GPU with this :attr:`Gpu.uuid`.

        Raises:
            DeviceError: there is no runtime, or the process may not use that GPU.
        """
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu.index
        raise DeviceError(
            f"the {self.vendor.runtime} runtime {self.version} finds no GPU with the UUID {uuid} "
            f"({self.vendor.hidden_by} may hide GPUs)"
        )

    @contextmanager
    def on(self, index: int) -> Iterator[None]:
        """Make GPU ``index`` current for this thread; restore the previous one afterwards.

        Raises:
            DeviceError: there is no such GPU.
        """
        before = self.current()
        if before == index:
            yield
            return
        self._make_current(index)
        try:
            yield
        finally:
            self._make_current(before)
