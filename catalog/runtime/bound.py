"""A plan with its tensors: checked once, launched any number of times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from catalog.errors import TensorError
from catalog.runtime.inputs import make_inputs
from catalog.runtime.tensors import Array, check_inputs, check_outputs, make_outputs, results
from catalog.runtime.workspace import splits_of

if TYPE_CHECKING:
    from catalog.runtime.devices.arguments import Call
    from catalog.runtime.devices.host import HostDevice
    from catalog.runtime.devices.loading import LoadedKernel
    from catalog.runtime.plan import Plan
    from catalog.schema.problem import Problem

_OVERLAP_WORK = 100_000
"""Steps that deciding whether two strided arrays share an element may take; past it they count as sharing."""


@dataclass(frozen=True, slots=True)
class BoundPlan:
    """The kernels of a plan, loaded, with tensors, outputs and workspaces that every launch uses anew.

    A launch reads what the inputs hold at the time, and writes ``outputs``, arrays by name, in place.
    """

    outputs: Mapping[str, Array] = field(repr=False)
    kernels: tuple[LoadedKernel, ...]
    device: HostDevice = field(repr=False)
    _call: Call = field(repr=False)

    def launch(self) -> None:
        """Run all stages once, without a check or an allocation; on return the outputs are written.

        Raises:
            DeviceError: a kernel refuses the call or has no memory: a length or a page number of the inputs no longer
                fits.
        """
        for kernel in self.kernels:
            self.device.launch(kernel, self._call)

    def time(self, launches: int = 1) -> list[int]:
        """Nanoseconds of each of so many launches.

        Raises:
            DeviceError: as :meth:`launch`.
        """
        return self.device.time(self.kernels, self._call, launches)


def take(problem: Problem, given: Mapping[str, Any], into: Mapping[str, Any] | None, seed: int) -> dict[str, Array]:
    """All tensors of a run: the inputs, checked or made, then the outputs, made or checked; see :meth:`Plan.bind`."""
    inputs = check_inputs(problem, given) if given else make_inputs(problem, seed)
    if into is None:
        return inputs | make_outputs(problem, inputs)
    outputs = check_outputs(problem, into)
    _check_apart(inputs | outputs, tuple(outputs))
    return inputs | outputs


def bind(plan: Plan, device: HostDevice, kernels: tuple[LoadedKernel, ...], tensors: Mapping[str, Array]) -> BoundPlan:
    """The loaded kernels of a plan with tensors from :func:`take`."""
    problem = plan.problem
    call = device.call(problem, tensors, splits_of(problem, plan.kernels, device.threads))
    return BoundPlan(results(problem, tensors), kernels, device, call)


def _check_apart(tensors: Mapping[str, Array], outputs: tuple[str, ...]) -> None:
    """No output shares an element with another tensor.

    Raises:
        TensorError: one does, or the strides are too tangled to tell.
    """
    for name in outputs:
        for other, array in tensors.items():
            if other != name and _share(tensors[name], array):
                raise TensorError(f"the output {name} shares memory with {other}", hint="give it an array of its own")


def _share(a: Array, b: Array) -> bool:
    try:
        return np.shares_memory(a, b, max_work=_OVERLAP_WORK)  # type: ignore[arg-type]  # stubs know two values
    except RuntimeError:  # NumPy's TooHardError, whose place depends on NumPy's version
        return True
