"""Plans as programs run them, to be timed: called eagerly, or replayed from a captured graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from catalog.runtime.torch_copies import has_torch, torch_copies
from catalog.runtime.tracing import paused

if TYPE_CHECKING:
    from catalog.runtime.devices import Device
    from catalog.runtime.plan import Plan
    from catalog.runtime.tensors import Array
    from catalog.schema.policy import Policy


@dataclass(frozen=True, slots=True)
class Deployed:
    """Work that is launched and timed on a device, a :class:`~catalog.runtime.measure.Timed`.

    ``start`` starts it once; ``clock`` is :meth:`Device.timed` or :meth:`Device.awaited`.
    """

    device: Device[Any]
    start: Callable[[], object]
    clock: Callable[..., list[int]]

    def time(self, launches: int = 1, *, cold: bool = False) -> list[int]:
        """Nanoseconds of each launch; ``cold`` empties the device's caches before each.

        Raises:
            DeviceError: as :meth:`Device.timed`.
        """
        with paused():
            return self.clock(self.start, launches, cold=cold)

    def waits(self) -> Mapping[str, int]:
        """Nanoseconds that each launching thread has waited for a core so far; empty if unknown."""
        return self.device.waits()

    def clock_mhz(self) -> float | None:
        """The device's current clock rate in MHz, if known."""
        return self.device.clock_mhz()


def deployed(plan: Plan, inputs: Mapping[str, Array], outputs: Mapping[str, Array], policy: Policy) -> Deployed:
    """A plan, ready to be timed under a policy.

    ``graph`` is the plan bound to the arrays. ``eager`` is :meth:`Plan.enqueue`, which checks and binds the tensors of
    each call and makes its outputs: on PyTorch tensors if PyTorch is installed, else on the arrays. Each caller then
    waits until the device is done.

    Raises:
        UsageError: eager on a GPU, without PyTorch.
        CatalogError: as :meth:`Plan.bind`.
    """
    device = plan.services.device(plan.arch)
    if policy.measured_as == "graph":
        bound = plan.bind(inputs, outputs=outputs)
        return Deployed(bound.device, bound.replayed(), bound.device.timed)
    given = torch_copies(plan.problem, inputs, device) if device.queues or has_torch() else dict(inputs)
    with paused():
        plan.enqueue(given)  # loads the kernels: errors show before anything is timed
    return Deployed(device, partial(plan.enqueue, given), device.awaited)
