"""A plan with its tensors: checked once, launched any number of times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from catalog.errors import TensorError
from catalog.ops import operation_of
from catalog.runtime import tracing
from catalog.runtime.devices.arguments import without_tensors
from catalog.runtime.inputs import make_inputs
from catalog.runtime.tensors import Strided, check_inputs, check_outputs, results
from catalog.schema.workspace import NO_WORKSPACE, Workspace

if TYPE_CHECKING:
    from catalog.runtime.devices import Device
    from catalog.runtime.devices.arguments import Call
    from catalog.runtime.devices.loading import LoadedKernel
    from catalog.runtime.plan import Plan
    from catalog.schema.problem import Problem

_OVERLAP_WORK = 100_000
"""Steps that deciding whether two strided arrays share an element may take; past it they count as sharing."""


@dataclass(frozen=True, slots=True)
class BoundPlan:
    """The kernels of a plan, loaded, with tensors, outputs and workspaces that every launch uses anew.

    A launch reads what the inputs hold at the time, and writes ``outputs``, arrays by name, in place. On a GPU, NumPy
    arrays are copied there and back by each launch, arrays in its memory are used where they are. The work is on the
    caller's current stream, PyTorch's where the process uses it, else the default one: what other streams do to such
    arrays between launches must be done, or ordered before it.
    """

    outputs: Mapping[str, Any] = field(repr=False)
    kernels: tuple[LoadedKernel, ...]
    device: Device[Any] = field(repr=False)
    _call: Call = field(repr=False)
    _plan: Plan = field(repr=False)
    _taken: Taken = field(repr=False)

    def launch(self) -> None:
        """Run all stages once, without a check; on return the outputs are written, in whatever memory they are.

        Nothing is allocated, but for a dense copy of each strided NumPy array that a GPU gets. While the stream is
        captured into a graph, the work becomes part of it, and nothing is waited for.

        Raises:
            DeviceError: a kernel refuses the call, fails or has no memory: a length or a page number of the inputs no
                longer fits.
            TensorError: a NumPy array would have to be copied in a graph.
        """
        if tracing.active:
            with tracing.Recorded("launch", self._plan, self.device, self._taken):
                self.device.run(self.kernels, self._call)
            return
        self.device.run(self.kernels, self._call)

    def enqueue(self, stream: Any = None) -> None:
        """Queue all stages once on ``stream``, without a check, and return at once: for arrays in a GPU's memory.

        ``stream`` is a handle or an object that tells it (PyTorch's, CuPy's, what has ``__cuda_stream__``), by default
        the caller's current stream. Later work of the stream sees the outputs; where the work fails, the next call that
        waits for the GPU says so. Keep this object until the work is done. The host runs the stages at once.

        Raises:
            TensorError: a tensor is a NumPy array, and the device is a GPU.
            UsageError: ``stream`` is no stream.
            DeviceError: a kernel refuses the call or has no memory, or the GPU does not take the launch.
        """
        if tracing.active:
            with tracing.Recorded("enqueue", self._plan, self.device, self._taken):
                self.device.enqueue(self.kernels, self._call, stream)
            return
        self.device.enqueue(self.kernels, self._call, stream)

    def run(self, launches: int) -> list[int]:
        """As :meth:`time`, for a caller who wants the outputs: a call that a trace records.

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
        """Nanoseconds of each of so many launches, by the device's clock: wall time on the host, a GPU's own on a GPU.

        A GPU's launches share one copy of the NumPy arrays there and back, which does not count. ``cold``: the device's
        caches are emptied before each launch.

        Raises:
            DeviceError: as :meth:`launch`.
        """
        return self.device.time(self.kernels, self._call, launches, cold=cold)

    def waits(self) -> Mapping[str, int]:
        """Nanoseconds that each thread of launches has waited for a core so far; empty if unknown."""
        return self.device.waits()

    def clock_mhz(self) -> float | None:
        """The device's clock now, where it says."""
        return self.device.clock_mhz()


@dataclass(frozen=True, slots=True)
class Taken:
    """The tensors of a run, inputs, then outputs: ``arrays`` as the device takes them; ``results`` as they were given
    or made, those that are written, by the names of the results; ``seed`` that of inputs that were made.
    """

    arrays: Mapping[str, Strided]
    results: Mapping[str, Any]
    seed: int | None


def take(
    problem: Problem, device: Device[Any], given: Mapping[str, Any], into: Mapping[str, Any] | None, seed: int
) -> Taken:
    """All tensors of a run on ``device``: inputs, checked or made, and outputs, made or checked; see :meth:`Plan.bind`.

    Raises:
        TensorError: as :meth:`Plan.bind`.
    """
    inputs: Mapping[str, Any] = check_inputs(problem, given, device.array) if given else make_inputs(problem, seed)
    made_of = None if given else seed
    if into is None:
        made = device.outputs(problem, inputs, given)
        outputs = {name: device.array(problem, name, value) for name, value in made.items()}
        return Taken({**inputs, **outputs}, results(problem.form, {**inputs, **given, **made}), made_of)
    outputs = check_outputs(problem, into, device.array)
    arrays = {**inputs, **outputs}
    _check_apart(arrays, tuple(outputs))
    return Taken(arrays, results(problem.form, {**inputs, **given, **into}), made_of)


def bind(plan: Plan, device: Device[Any], kernels: tuple[LoadedKernel, ...], taken: Taken) -> BoundPlan:
    """The loaded kernels of a plan with the tensors of a run."""
    call = device.call(plan.problem, taken.arrays, plan.workspace(device, kernels))
    return BoundPlan(taken.results, kernels, device, call, plan, taken)


def enqueue(plan: Plan, device: Device[Any], kernels: tuple[LoadedKernel, ...], taken: Taken) -> Any:
    """Queue the loaded kernels of a plan once with the tensors of a run; the arguments that they got.

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


def agreed_workspace(problem: Problem, kernels: Sequence[LoadedKernel], num_splits: int) -> Workspace:
    """The workspace that the stages of a plan agree on, where ``num_splits`` is wished for.

    Raises:
        DeviceError: it would be larger than any memory.
    """
    if not problem.divided:
        return NO_WORKSPACE
    args, needed = without_tensors(problem), []
    for kernel in kernels:
        args.num_splits = num_splits
        needed.append(kernel.workspace(args))
        num_splits = needed[-1].num_splits
    return operation_of(problem).workspace(problem, num_splits, needed)


def _check_apart(tensors: Mapping[str, Strided], outputs: tuple[str, ...]) -> None:
    """No output shares an element with another tensor.

    Raises:
        TensorError: one does, or the strides are too tangled to tell.
    """
    for name in outputs:
        for other, array in tensors.items():
            if other != name and _share(tensors[name], array):
                raise TensorError(f"the output {name} shares memory with {other}", hint="Give it an array of its own.")


def _share(a: Strided, b: Strided) -> bool:
    try:
        return np.shares_memory(a, b, max_work=_OVERLAP_WORK)  # type: ignore[arg-type]  # stubs know two values
    except RuntimeError:  # NumPy's TooHardError, whose place depends on NumPy's version
        return True
