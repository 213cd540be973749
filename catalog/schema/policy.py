"""The measuring policy of a timing: what its time counts, and the state of the caches. It is part of a timing's key."""

from __future__ import annotations

from typing import Literal, NamedTuple

from catalog.settings import settings

MeasuredAs = Literal["eager", "graph"]


class Policy(NamedTuple):
    """What a timing counts, and the state of the device's caches.

    Attributes:
        measured_as: ``eager``: what the caller of one call waits for, host time and kernels together. ``graph``: only
            the device's time of launches one after another, as a captured graph replays them on a GPU.
        cold: the caches are emptied before every launch.
    """

    measured_as: MeasuredAs = "graph"
    cold: bool = False

    def __str__(self) -> str:
        return f"{self.measured_as}, cold caches" if self.cold else self.measured_as

    @property
    def parameters(self) -> dict[str, str | int]:
        """The parameters of :data:`CONDITION`."""
        return {"measured_as": self.measured_as, "cold": int(self.cold)}


GRAPH = Policy()
"""The default policy."""

CONDITION = "measured_as = :measured_as AND cold = :cold"
"""SQL for the timings of a policy."""


def policy_in_force() -> Policy:
    """The policy whose timings the settings ask selection to use, outside of captured graphs.

    Raises:
        UsageError: a setting has an invalid value.
    """
    chosen = settings()
    return Policy(chosen.measured_as, chosen.measured_cold)
