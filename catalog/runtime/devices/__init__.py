"""One module a kind of device: memory, streams, clocks. What they have in common is here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """What a timing is tied to: the same kernel is measured anew where any of these differs.

    ``arch`` is the catalog's name of the compile target, ``name`` the product's, ``cores`` what a kernel may use of it:
    CPU threads, compute units, multiprocessors.
    """

    arch: str
    name: str
    cores: int


class Device(Protocol[C]):
    """What a plan needs of a device: a place for tensors, kernels loaded, launched and timed."""

    @property
    def device(self) -> DeviceInfo:
        """What it is.

        Raises:
            DeviceError: it is not there.
        """

    @property
    def identity(self) -> Mapping[str, Any] | None:
        """What :func:`catalog.runtime.devices.here.reopened` finds it by in another process; None where nothing does.

        It is written as JSON.

        Raises:
            DeviceError: as :attr:`device`.
        """

    @property
    def threads(self) -> int:
        """What a kernel's work is divided among."""

    @property
    def queues(self) -> bool:
        """Whether :meth:`enqueue` returns before the work is done."""

    def on_host(self, array: Any) -> Array | None:
        """What an array that :meth:`array` gave holds now; None where the work of the stream is not to be waited for.

        Raises:
            DeviceError: it cannot be copied.
        """

    def beside(self, tensors: Mapping[str, Any]) -> Device[C]:
        """The device for these tensors, by name: this one, or another of the same arch, whose memory they are in."""

    def array(self, problem: Problem, name: str, value: Any) -> Strided:
        """The array that ``value``, given as the tensor ``name``, is to this device; not checked any further.

        Raises:
            TensorError: it is none, or is where the device's kernels cannot use it.
        """

    def outputs(self, problem: Problem, inputs: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Arrays for the outputs, of the kind of the inputs; these as :meth:`array` gave them, and as they were given.

        They begin as zeros where kernels leave some elements alone, else uninitialised.

        Raises:
            ProblemError: they would be larger than this machine's memory.
        """

    def means(self, form: Form, given: Mapping[str, Any]) -> Means | None:
        """What a :class:`~.fast_path.FastPath` needs of it, for calls like one on these tensors.

        None where each call is checked like the first: where one of them is no plain tensor of PyTorch's.
        """

    def load(self, path: Path, sha256: str, kernel_id: str) -> LoadedKernel:
        """As :meth:`Libraries.load`, for kernels that the device can run.

        Raises:
            DeviceError: it cannot run them, or they do not load.
        """

    def call(self, problem: Problem, tensors: Mapping[str, Any], workspace: Workspace = ...) -> C:
        """The argument struct of a problem with its tensors: what :meth:`array` gave, checked, inputs and outputs.

        All stages of a plan take it. The call keeps the tensors alive and may be launched any number of times.

        Raises:
            DeviceError: there is no memory for it.
        """

    def once(self, problem: Problem, tensors: Mapping[str, Any], workspace: Workspace = ...) -> C:
        """As :meth:`call`, for one :meth:`enqueue`; it need not be kept until that work is done.

        Raises:
            DeviceError: as :meth:`call`.
        """

    def enqueue(self, kernels: Sequence[LoadedKernel], call: C, stream: Any = None) -> None:
        """Queue the kernels, one after the other, on a GPU's stream, None: the caller's current one; without waiting.

        A device that has no streams runs them.

        Raises:
            TensorError: a tensor is not in the device's memory.
            UsageError: ``stream`` is no stream of the device's.
            DeviceError: a kernel refuses the call or has no memory, or the device does not take the launch.
        """

    def run(self, kernels: Sequence[LoadedKernel], call: C) -> None:
        """Run the kernels, one after the other, on what the inputs hold now; on return the outputs are written.

        Raises:
            DeviceError: a kernel refuses the call, has no memory, or fails.
        """

    def time(self, kernels: Sequence[LoadedKernel], call: C, launches: int, *, cold: bool = False) -> list[int]:
        """As :meth:`run`, so many times; the nanoseconds of each, by the device's clock.

        ``cold``: before each the caches are emptied, so that it reads its tensors from memory.

        Raises:
            DeviceError: as :meth:`run`.
        """

    def waits(self) -> Mapping[str, int]:
        """Nanoseconds for which each thread of launches has waited for a core so far.

        Empty where that is unknown, and of a device whose own clock times launches.
        """

    def clock_mhz(self) -> float | None:
        """The clock now, where the device says; of several cores the mean."""
