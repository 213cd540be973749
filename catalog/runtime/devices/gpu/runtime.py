"""What a GPU is used by, whoever made it: the calls that the catalog needs, and how their failures are told."""

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
"""What calls of every runtime return where they do not fail."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that the runtime sees: its number, what it is, and its memory.

    ``uuid`` identifies it in other processes; None where the runtime does not say.
    """

    index: int
    info: DeviceInfo
    memory_bytes: int
    uuid: str | None = None


class GpuRuntime(ABC):
    """A vendor's runtime. Handles of streams and events, and addresses, are integers; stream 0 is the default one.

    ``faults`` has the errors that only a kernel causes, by the names that the runtime gives them, with what they say of
    the kernel; after them the process cannot use the GPU any more. ``remedies`` says what to do about an error, by
    name, ``otherwise`` what to do about others, ``no_gpu`` what a GPU needs to be found. ``about`` tells more of a call
    where it fails. Every method but those of errors raises DeviceError where the runtime fails or is missing.
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
        """The runtime's name of a status."""

    @abstractmethod
    def error_text(self, status: int) -> str:
        """What the runtime says a status means."""

    @abstractmethod
    def take_last_error(self) -> int:
        """The status that this thread's calls have left, 0 for none; it is forgotten, unless it is of a lost GPU."""

    @abstractmethod
    def _count(self) -> tuple[int, int]:
        """A status, and how many GPUs the process may use."""

    @abstractmethod
    def _gpu(self, index: int) -> Gpu:
        """The GPU of this number."""

    @abstractmethod
    def _current(self) -> int:
        """As :meth:`current`."""

    @abstractmethod
    def _make_current(self, index: int) -> None:
        """Let this thread's calls be for GPU ``index``."""

    @abstractmethod
    def allocate(self, size: int, about: str = "") -> int:
        """The address of ``size`` bytes, at least 1, of the current GPU's memory."""

    @abstractmethod
    def free(self, address: int) -> None:
        """Give memory back, when all work of its GPU is done."""

    @abstractmethod
    def make_stream(self, about: str = "") -> int:
        """A queue of work of the current GPU."""

    @abstractmethod
    def drop_stream(self, stream: int) -> None:
        """Release a stream."""

    @abstractmethod
    def make_event(self, about: str = "") -> int:
        """An event of the current GPU, with its time."""

    @abstractmethod
    def drop_event(self, event: int) -> None:
        """Release an event."""

    @abstractmethod
    def record(self, event: int, stream: int) -> None:
        """Let the event be where the stream's work ends now."""

    @abstractmethod
    def await_event(self, event: int) -> None:
        """Wait until its stream has come to the event."""

    @abstractmethod
    def milliseconds(self, start: int, stop: int) -> float:
        """The time between two events that were reached."""

    @abstractmethod
    def copy_in(self, target: int, source: int, size: int, stream: int) -> None:
        """Start to copy ``size`` bytes of host memory to a GPU; both must live until the stream is synchronised."""

    @abstractmethod
    def copy_out(self, target: int, source: int, size: int, stream: int) -> None:
        """Start to copy ``size`` bytes of a GPU's memory to the host; as :meth:`copy_in`."""

    @abstractmethod
    def fill(self, target: int, value: int, size: int, stream: int) -> None:
        """Start to set ``size`` bytes of a GPU's memory to a byte."""

    @abstractmethod
    def synchronize(self, stream: int) -> None:
        """Wait for all work of a stream; where some of it failed, that is raised."""

    @abstractmethod
    def capturing(self, stream: int) -> bool:
        """Whether what a stream is given goes into a graph, to be run later, instead of to the GPU."""

    @abstractmethod
    def owner(self, address: int) -> int | None:
        """The GPU whose memory ``address`` is in; None for memory that the runtime does not know."""

    @abstractmethod
    def launch(self, kernel: LoadedKernel, pointer: Any, stream: int) -> None:
        """Start a kernel of the current GPU with a pointer to its arguments; it is done when the stream is."""

    @cached_property
    def _process(self) -> int:
        """The process that has used this runtime, by its :func:`forks`."""
        return forks()

    @property
    def forked(self) -> bool:
        """Whether the process that has used this runtime is a parent of this one: then it must not be called."""
        return self._process != forks()

    def check_process(self) -> None:
        """This process may call the runtime.

        Raises:
            DeviceError: a process has used it of which this one is a fork: contexts of GPUs do not survive that.
        """
        if self.forked:
            raise DeviceError(
                f"this process was forked after {self.vendor.runtime} was used, which no fork survives", hint=SPAWN
            )

    def current(self) -> int:
        """The GPU that this thread's calls are for.

        Raises:
            DeviceError: as :meth:`check_process`, or the runtime fails.
        """
        self.check_process()
        return self._current()

    def order(self, before: int, after: int) -> None:
        """What the stream ``after`` is given from now on begins when the stream ``before`` has done what it has now."""
        self.synchronize(before)

    def clock_mhz(self, index: int) -> float | None:
        """The clock that GPU ``index`` has now, where the runtime or the driver says."""
        return None

    def failure(self, what: str, status: int) -> DeviceError:
        """The error for ``what`` that gave a status: a :class:`KernelFaultError` where it is one of ``faults``."""
        # The runtime keeps the error for whoever asks next, PyTorch for one: it has been told here.
        self.take_last_error()
        name, means = self.error_name(status), self.error_text(status)
        explained = name if means == name else f"{name}, {means}"
        message, hint = f"{what} failed: {explained} ({int(status)})", self.remedies.get(name, self.otherwise)
        fault = self.faults.get(name)
        return DeviceError(message, hint=hint) if fault is None else KernelFaultError(message, hint=hint, fault=fault)

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs of this machine that the process may use, at least one.

        Raises:
            DeviceError: there is none, or there is no runtime.
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
            DeviceError: there is no runtime, or it finds no such GPU.
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
            DeviceError: there is no runtime, or the process may not use such a GPU.
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
        """Let this thread's calls be for GPU ``index``; afterwards for the one that they were for before.

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
