"""Other projects' implementations as entrants of a race: checked against the reference, then ready to be timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from catalog.errors import CatalogError, DeviceError
from catalog.registry.foreign import Rival
from catalog.runtime.deployed import Deployed
from catalog.runtime.torch_copies import numpy_copy, torch_copies

if TYPE_CHECKING:
    from catalog.ops.implementation import Implementation
    from catalog.runtime.devices import Device
    from catalog.runtime.tensors import Array
    from catalog.runtime.validate import Expected
    from catalog.schema.policy import Policy
    from catalog.schema.problem import Problem


def title_of(one: Implementation) -> str:
    """The project of an implementation with its version."""
    return f"{one.title} {one.version}".rstrip()


def rival_of(one: Implementation, median_ms: float) -> Rival:
    """An implementation with its median."""
    return Rival(one.name, title_of(one), one.version, median_ms)


def place_of(device: Device[Any]) -> str:
    """PyTorch's type of a device: ``cpu`` or ``cuda``."""
    return device.place.partition(":")[0]


def entrant(
    one: Implementation, problem: Problem, inputs: Mapping[str, Array], device: Device[Any], policy: Policy
) -> Deployed:
    """An implementation bound to copies of the inputs, ready to be timed under a policy; :func:`check` it first.

    On the host, ``graph`` counts the whole call, because the function cannot be had without its dispatch; on a GPU, it
    is the replay of a graph that PyTorch captures.

    Raises:
        DeviceError: the implementation raises an error.
        UsageError: PyTorch is not installed.
    """
    with _its_errors(one):
        compute = one.bind(problem, torch_copies(problem, inputs, device))
        compute()
    start = _guarded(one, compute)
    if policy.measured_as == "eager" or not device.queues:
        return Deployed(device, start, device.awaited)
    with _its_errors(one):
        return Deployed(device, _graph_of(compute), device.timed)


def check(one: Implementation, expected: Expected, device: Device[Any]) -> None:
    """Compare the results of an implementation with the reference, on the problem of ``expected``.

    Raises:
        DeviceError: one is wrong, or the implementation raises an error.
        UsageError: PyTorch is not installed.
    """
    problem = expected.problem
    reason = one.objection(problem, place_of(device))
    if reason:
        raise DeviceError(f"{one.name} cannot be checked: {reason}")
    with _its_errors(one):
        results = one.bind(problem, torch_copies(problem, expected.given(), device))()
        outputs = {name: numpy_copy(problem, name, tensor) for name, tensor in results.items()}
    for checked in expected.check_outputs(outputs):
        if not checked.passed:
            raise DeviceError(
                f"{one.name} is WRONG: {checked.tensor} is off by {checked.max_error:.3g}, "
                f"{checked.tolerance_used:.3g} times the tolerance"
            )


@contextmanager
def _its_errors(one: Implementation) -> Iterator[None]:
    """Turn whatever an implementation raises into one error.

    Raises:
        DeviceError: it raised something.
    """
    try:
        yield
    except CatalogError:
        raise
    except Exception as error:  # other projects raise anything
        reason = str(error).strip().splitlines() or [""]
        raise DeviceError(f"{one.name} failed: {type(error).__name__}: {reason[0]}") from None


def _guarded(one: Implementation, compute: Callable[[], object]) -> Callable[[], object]:
    def start() -> None:
        try:
            compute()
        except Exception as error:  # as in _its_errors, which would cost a microsecond for each call
            raise DeviceError(f"{one.name} failed: {type(error).__name__}: {error}") from None

    return start


def _graph_of(compute: Callable[[], object]) -> Callable[[], object]:
    """The replay of a graph of PyTorch's that calls ``compute``, which has run before."""
    cuda: Any = import_module("torch").cuda
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        compute()
    replay: Callable[[], object] = graph.replay
    return replay
