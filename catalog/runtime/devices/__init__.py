"""Devices that run kernels: their memory, streams and clocks. This module has the interface that all implement."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from pathlib import Path

    from catalog.runtime.devices.arguments import Call
    from catalog.runtime.devices.fast_path import Means
    from catalog.runtime.devices.loading import LoadedKernel
    from catalog.runtime.tensors import Array, Strided
    from catalog.schema.problem import Problem
    from catalog.schema.problem_form import Form
    from catalog.schema.workspace import Workspace

C = TypeVar("C", bound="Call")


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The description of a device that a timing is recorded with; a kernel is measured again if any field differs.

    ``arch`` is the catalog's name of the compile target, ``name`` the product name, ``cores`` the number of CPU
    threads, compute units or multiprocessors that a kernel may use.
    """

    arch: str
    name: str
    cores: int

    @property
    def facts(self) -> str:
        """What the registry records besides arch and name, a JSON object."""
        return json.dumps({"cores": self.cores}, sort_keys=True)


class Device(Protocol[C]):
    """The interface of a device: it places tensors, and loads, launches and times kernels."""

    @property
    def device(self) -> DeviceInfo:
        """The description of the device.

        Raises:
            DeviceError: the device is absent.
        """

    @property
    def identity(self) -> Mapping[str, Any] | None:
        """JSON data by which :func:`catalog.runtime.here.reopened` finds the device in another process.

        It is None if the device cannot be identified.

        Raises:
            DeviceError: as :attr:`device`.
        """

    @property
    def place(self) -> str:
        """PyTorch's name of the device, such as ``cpu`` or ``cuda:0``."""

    @property
    def threads(self) -> int:
        """The number of threads or cores that a kernel's work is divided among."""

    @property
    def queues(self) -> bool:
        """Whether :meth:`enqueue` returns before the work is done."""

    def on_host(self, array: Any) -> Array | None:
        """The current contents of an array from :meth:`array`; None if the stream must not be waited for.

        Raises:
            DeviceError: the array cannot be copied.
        """

    def beside(self, tensors: Mapping[str, Any]) -> Device[C]:
        """The device for these tensors: this one, or another of the same arch that holds them in its memory."""

    def array(self, problem: Problem, name: str, value: Any) -> Strided:
        """The value given for the tensor ``name``, as an array that this device can use; not checked any further.

        Raises:
            TensorError: it is not an array, or is in memory that the device's kernels cannot use.
        """

    def outputs(self, problem: Problem, inputs: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make arrays for the outputs, of the same kind as the inputs.

        They start as zeros if kernels do not write every element, else uninitialised. ``inputs`` are the arrays from
        :meth:`array`, ``given`` the caller's values.

        Raises:
            ProblemError: they would be larger than this machine's memory.
        """

    def means(self, form: Form, given: Mapping[str, Any]) -> Means | None:
        """The device's part of a :class:`~.fast_path.FastPath`, for calls like one on these tensors.

        None if one of them is not a plain PyTorch tensor, so that each call must be checked in full.
        """

    def load(self, path: Path, sha256: str, kernel_id: str) -> LoadedKernel:
        """Load a kernel as :meth:`Libraries.load` does.

        Raises:
            DeviceError: the device cannot run the kernel, or the library does not load.
        """

    def call(self, problem: Problem, tensors: Mapping[str, Any], workspace: Workspace = ...) -> C:
        """The argument struct of a problem with its checked arrays from :meth:`array`, inputs and outputs together.

        All stages of a plan share it. The call keeps the tensors alive and can be launched any number of times.

        Raises:
            DeviceError: there is no memory for it.
        """

    def once(self, problem: Problem, tensors: Mapping[str, Any], workspace: Workspace = ...) -> C:
        """Like :meth:`call`, for a single :meth:`enqueue`; the call need not be kept until that work is done.

        Raises:
            DeviceError: as :meth:`call`.
        """

    def enqueue(self, kernels: Sequence[LoadedKernel], call: C, stream: Any = None) -> None:
        """Queue the kernels in order on a GPU's stream (None: the caller's current one) and return without waiting.

        A device without streams runs them before it returns.

        Raises:
            TensorError: a tensor is not in the device's memory.
            UsageError: ``stream`` is not a stream of the device.
            DeviceError: a kernel rejects the call or runs out of memory, or the device does not accept the launch.
        """

    def run(self, kernels: Sequence[LoadedKernel], call: C) -> None:
        """Run the kernels in order on the current contents of the inputs; when it returns, the outputs are written.

        Raises:
            DeviceError: a kernel rejects the call, runs out of memory, or fails.
        """

    def time(self, kernels: Sequence[LoadedKernel], call: C, launches: int, *, cold: bool = False) -> list[int]:
        """Like :meth:`run`, ``launches`` times; return the nanoseconds of each by the device's clock.

        ``cold`` empties the caches before each launch, so that it reads its tensors from memory.

        Raises:
            DeviceError: as :meth:`run`.
        """

    def replayed(self, kernels: Sequence[LoadedKernel], call: C) -> Callable[[], object]:
        """A function that starts the kernels in order as a captured graph does: with the least work of the host.

        Without graphs it calls the kernels one after another.

        Raises:
            DeviceError: as :meth:`run`, or the kernels cannot be captured.
        """

    def timed(self, start: Callable[[], object], launches: int, *, cold: bool = False) -> list[int]:
        """Start work on the current stream ``launches`` times; nanoseconds of each by the device's clock.

        ``cold`` empties the caches before each launch.

        Raises:
            DeviceError: the work failed, or the stream is being captured.
        """

    def awaited(self, start: Callable[[], object], launches: int, *, cold: bool = False) -> list[int]:
        """Like :meth:`timed`, in nanoseconds that the caller waits: from before the call until the work is done."""

    @property
    def capturing(self) -> bool:
        """Whether the caller's current stream is being captured into a graph."""

    def waits(self) -> Mapping[str, int]:
        """Nanoseconds that each launching thread has waited for a core so far.

        Empty if unknown, and for a device that times launches with its own clock.
        """

    def clock_mhz(self) -> float | None:
        """The current clock rate in MHz, the mean over cores, if known."""
