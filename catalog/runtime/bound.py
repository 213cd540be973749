"""A plan bound to tensors: checked once, launched any number of times."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from catalog.errors import TensorError
from catalog.runtime import tracing
from catalog.runtime.inputs import make_inputs
from catalog.runtime.tensors import Strided, check_inputs, check_outputs, results

if TYPE_CHECKING:
    from catalog.runtime.devices import Device
    from catalog.runtime.devices.arguments import Call
    from catalog.runtime.devices.loading import LoadedKernel
    from catalog.runtime.plan import Plan
    from catalog.schema.problem import Problem

_OVERLAP_WORK = 100_000
"""Limit of NumPy's search for a shared element of two strided arrays; beyond it they count as overlapping."""


@dataclass(frozen=True, slots=True)
class BoundPlan:
    """The loaded kernels of a plan with the inputs, outputs and workspaces that every launch reuses.

    A launch reads the current contents of the inputs and writes ``outputs``, arrays by name, in place. For a GPU, each
    launch copies NumPy arrays to the GPU and back, and uses arrays in its memory in place. The work runs on the
    caller's current stream: PyTorch's if the process uses PyTorch, else the default stream. Work of other streams on
    these arrays must be finished, or ordered before that stream.
    """

    outputs: Mapping[str, Any] = field(repr=False)
    kernels: tuple[LoadedKernel, ...]
    device: Device[Any] = field(repr=False)
    _call: Call = field(repr=False)
    _plan: Plan = field(repr=False)
    _taken: Taken = field(repr=False)

    def launch(self) -> None:
        """Run all stages once, without checks; when it returns, the outputs are written.

        Nothing is allocated except a dense copy of each strided NumPy array that is copied to a GPU. While the stream
        is captured into a graph, the work becomes part of the graph and the call does not wait.

        Raises:
            DeviceError: a kernel rejects the call, for example because a length or page number no longer fits, or
                fails, or runs out of memory.
            TensorError: a NumPy array would have to be copied during a capture.
        """
        if tracing.active:
            with tracing.Recorded("launch", self._plan, self.device, self._taken):
                self.device.run(self.kernels, self._call)
            return
        self.device.run(self.kernels, self._call)

    def enqueue(self, stream: Any = None) -> None:
        """Queue all stages once on ``stream``, without checks, and return immediately; for arrays in a GPU's memory.

        ``stream`` is a stream of PyTorch or CuPy, an object with ``__cuda_stream__``, or a handle; by default it is the
        caller's current stream. Later work on the stream sees the outputs; if the work fails, the next call that waits
        for the GPU raises. Keep this object until the work is done. On the host the stages run before the call returns.

        Raises:
            TensorError: a tensor is a NumPy array, and the device is a GPU.
            UsageError: ``stream`` is not a stream.
            DeviceError: a kernel rejects the call or runs out of memory, or the GPU does not accept the launch.
        """
        if tracing.active:
            with tracing.Recorded("enqueue", self._plan, self.device, self._taken):
                self.device.enqueue(self.kernels, self._call, stream)
            return
        self.device.enqueue(self.kernels, self._call, stream)

    def run(self, launches: int) -> list[int]:
        """Like :meth:`time`, for callers who want the outputs: traces record the call.

        Raises:
            DeviceError: as :meth:`launch`.
        """
        if not tracing.active:
            return self.time(launches)
        with tracing.Recorded("run", self._plan, self.device, self._taken) as call:
            durations = self.time(launches)
            call.took(durations)
        return durations

    def time(self, launches: int = 1, *, cold: bool = False) -> list[int]:
        """Launch ``launches`` times; return the nanoseconds of each: wall time on the host, GPU time on a GPU.

        On a GPU, NumPy arrays are copied once before the first and after the last launch, outside the timed interval.
        ``cold`` empties the device's caches before each launch.

        Raises:
            DeviceError: as :meth:`launch`.
        """
        return self.device.time(self.kernels, self._call, launches, cold=cold)

    def replayed(self) -> Callable[[], object]:
        """A function that launches all stages as a graph replays them, for :meth:`Device.timed`.

        On a GPU a graph is captured now; NumPy arrays are copied there once.

        Raises:
            DeviceError: as :meth:`launch`, or the stages cannot be captured.
        """
        return self.device.replayed(self.kernels, self._call)

    def waits(self) -> Mapping[str, int]:
        """Nanoseconds that each launching thread has waited for a core so far; empty if unknown."""
        return self.device.waits()

    def clock_mhz(self) -> float | None:
        """The device's current clock rate in MHz, if known."""
        return self.device.clock_mhz()


@dataclass(frozen=True, slots=True)
class Taken:
    """The tensors of a run.

    ``arrays`` holds inputs, then outputs, as the device uses them; ``results`` the written tensors by result name, as
    the caller gave them or as they were made; ``seed`` is the seed of inputs that were made.
    """

    arrays: Mapping[str, Strided]
    results: Mapping[str, Any]
    seed: int | None


def take(
    problem: Problem, device: Device[Any], given: Mapping[str, Any], into: Mapping[str, Any] | None, seed: int
) -> Taken:
    """Check or make the inputs and outputs of a run on ``device``; see :meth:`Plan.bind`.

    Raises:
        TensorError: as :meth:`Plan.bind`.
    """
    inputs: Mapping[str, Any] = check_inputs(problem, given, device.array) if given else make_inputs(problem, seed)
    made_of = None if given else seed
    updated = [name for name in inputs if problem.form.tensors[name].role == "updated"]
    if into is None:
        _check_apart(inputs, updated)
        made = device.outputs(problem, inputs, given)
        outputs = {name: device.array(problem, name, value) for name, value in made.items()}
        return Taken({**inputs, **outputs}, results(problem.form, {**inputs, **given, **made}), made_of)
    outputs = check_outputs(problem, into, device.array)
    arrays = {**inputs, **outputs}
    _check_apart(arrays, [*outputs, *updated])
    return Taken(arrays, results(problem.form, {**inputs, **given, **into}), made_of)


def bind(plan: Plan, device: Device[Any], kernels: tuple[LoadedKernel, ...], taken: Taken) -> BoundPlan:
    """Bind the loaded kernels of a plan to the tensors of a run."""
    call = device.call(plan.problem, taken.arrays, plan.workspace(device, kernels))
    return BoundPlan(taken.results, kernels, device, call, plan, taken)


def enqueue(plan: Plan, device: Device[Any], kernels: tuple[LoadedKernel, ...], taken: Taken) -> Any:
    """Queue the loaded kernels of a plan once on the tensors of a run; return their arguments.

    Raises:
        TensorError, DeviceError: as :meth:`Plan.enqueue`.
    """
    call = device.once(plan.problem, taken.arrays, plan.workspace(device, kernels))
    if tracing.active:
        with tracing.Recorded("enqueue", plan, device, taken):
            device.enqueue(kernels, call)
    else:
        device.enqueue(kernels, call)
    return call.args


def _check_apart(tensors: Mapping[str, Strided], outputs: Collection[str]) -> None:
    """Check that no output shares an element with another tensor.

    Raises:
        TensorError: one does, or the strides are too complex to decide.
    """
    for name in outputs:
        for other, array in tensors.items():
            if other != name and _share(tensors[name], array):
                raise TensorError(f"the output {name} shares memory with {other}", hint="Give it an array of its own.")


def _share(a: Strided, b: Strided) -> bool:
    try:
        return np.shares_memory(a, b, max_work=_OVERLAP_WORK)  # type: ignore[arg-type]  # stubs know two values
    except RuntimeError:  # NumPy's TooHardError, whose module depends on NumPy's version
        return True
