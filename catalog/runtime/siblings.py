"""Siblings: the devices whose timings are evidence for a device that has none of its own.

One relation orders them: the differences of :data:`APART`, of which the first that is not equal decides.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from catalog.errors import CatalogError
from catalog.runtime.catalog_file import read_spec


@dataclass(frozen=True, slots=True)
class Profile:
    """What is known about a device for comparing it with others; None: unknown.

    ``family`` and ``generation`` are those of the arch's spec. ``units`` are compute units, multiprocessors or CPU
    threads, and ``clock_mhz`` is the highest clock rate that was recorded with a timing.
    """

    arch: str
    family: str | None
    generation: float | None
    units: int | None
    clock_mhz: float | None

    @classmethod
    def of(cls, arch: str, units: int | None, clock_mhz: float | None = None) -> Profile:
        """The profile of a device with these facts and those of its arch's spec; ``units`` None: the usual number."""
        hardware = None
        with suppress(CatalogError):  # an arch that has timings may have lost its spec
            hardware = read_spec(arch).hardware
        if hardware is None:
            return cls(arch, None, None, units, clock_mhz)
        units = hardware.compute_units if units is None else units
        return cls(arch, hardware.family, hardware.generation, units, clock_mhz)

    def __str__(self) -> str:
        return self.arch if self.units is None else f"{self.arch} with {self.units} units"


@dataclass(frozen=True, slots=True)
class Sibling:
    """A device whose timings stand in for those of the device ``of``: its row id, and how far the two are apart."""

    id: int
    profile: Profile
    of: Profile
    apart: tuple[float, ...]


def _unequal(one: object, other: object) -> float:
    return float(one != other)


def _gap(one: float, other: float) -> float:
    return abs(one - other)


def _octaves(one: float, other: float) -> float:
    return abs(math.log2(one / other))


APART: Mapping[str, Callable[[Any, Any], float]] = MappingProxyType(
    {"arch": _unequal, "generation": _gap, "units": _octaves, "clock_mhz": _octaves}
)
"""How a sibling differs from the device, what counts most first.

What is unknown about the device makes no difference; what is unknown about a sibling makes it the farthest.
"""


def _apart(sibling: Profile, device: Profile) -> tuple[float, ...]:
    differences = []
    for name, measure in APART.items():
        theirs, ours = getattr(sibling, name), getattr(device, name)
        differences.append(0.0 if ours is None else math.inf if theirs is None else measure(theirs, ours))
    return tuple(differences)


_ROWS = (
    "SELECT id, arch, json_extract(facts, '$.cores') AS units, "
    "(SELECT max(clock_mhz) FROM timing WHERE device_id = device.id) AS clock_mhz FROM device"
)


def _profile(row: sqlite3.Row) -> Profile:
    return Profile.of(row["arch"], row["units"], row["clock_mhz"])


def profile_of(connection: sqlite3.Connection, device: int) -> Profile:
    """The profile of the device with this row id."""
    return _profile(connection.execute(f"{_ROWS} WHERE id = ?", (device,)).fetchone())


def siblings_of(
    connection: sqlite3.Connection,
    device: Profile,
    table: Literal["timing", "foreign_timing"] = "timing",
    without: int | None = None,
) -> tuple[Sibling, ...]:
    """The devices of the arch or the family of ``device`` that have rows in ``table``, nearest first.

    The device with row id ``without`` is left out.
    """
    there = f"EXISTS (SELECT 1 FROM {table} WHERE device_id = device.id)"
    found = []
    for row in connection.execute(f"{_ROWS} WHERE id IS NOT ? AND {there}", (without,)).fetchall():
        profile = _profile(row)
        if profile.arch == device.arch or (profile.family is not None and profile.family == device.family):
            found.append(Sibling(row["id"], profile, device, _apart(profile, device)))
    return tuple(sorted(found, key=lambda sibling: (sibling.apart, sibling.id)))
