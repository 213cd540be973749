"""Timing done right: when to warm up, when to stop, what to keep.

Launches are timed by the device's own clock until the median is known well enough: until its 95 % confidence interval
is no wider than asked, which order statistics give without an assumption about how durations are distributed (Conover,
Practical Nonparametric Statistics, section 3.2).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, median, quantiles
from typing import Protocol

CONFIDENCE = 0.95
_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


class Timed(Protocol):
    """What can be launched and timed: a :class:`~catalog.runtime.bound.BoundPlan`."""

    def time(self, launches: int = 1, *, cold: bool = False) -> list[int]:
        """Nanoseconds of each of so many launches; ``cold``: the device's caches are emptied before each."""

    def clock_mhz(self) -> float | None:
        """The device's clock now, where it says."""


@dataclass(frozen=True, slots=True)
class StopRule:
    """When enough launches are timed.

    Attributes:
        precision: half the width of the median's confidence interval, as a part of the median.
        least: launches that are timed even so.
        most: launches that are timed at the most.
        seconds: time that launches take at the most, but for ``least`` of them.
        warm_up_seconds: launches before those that are timed, for threads, caches and clocks to settle.
        cold: empty the caches before every launch; there is no warm-up of caches then.
    """

    precision: float = 0.02
    least: int = 10
    most: int = 10_000
    seconds: float = 1.0
    warm_up_seconds: float = 0.05
    cold: bool = False


@dataclass(frozen=True, slots=True)
class Measurement:
    """How long ``n`` launches took, in milliseconds.

    ``low_ms`` to ``high_ms`` is the median's confidence interval; ``load`` the machine's load average when they ended,
    ``clock_mhz`` the device's clock then, None where it does not say.
    """

    n: int
    min_ms: float
    median_ms: float
    p10_ms: float
    p90_ms: float
    low_ms: float
    high_ms: float
    cold: bool = False
    load: float = 0.0
    clock_mhz: float | None = None

    @property
    def precision(self) -> float:
        """Half the width of the confidence interval, as a part of the median."""
        return (self.high_ms - self.low_ms) / 2 / self.median_ms if self.median_ms else 0.0


def interval(ordered: Sequence[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the median of ``ordered`` durations, at least one; of few, all of them."""
    n = len(ordered)
    spread = _Z * math.sqrt(n)
    low, high = math.floor((n - spread) / 2), math.ceil((n + spread) / 2)
    return ordered[max(0, low)], ordered[min(n - 1, high)]


def summarise(nanoseconds: Iterable[int], *, cold: bool = False, clock_mhz: float | None = None) -> Measurement:
    """What is kept of durations, at least one of them."""
    ordered = sorted(nanoseconds)
    low, high = interval(ordered)
    deciles = quantiles(ordered, n=10, method="inclusive") if len(ordered) > 1 else ordered * 9
    return Measurement(
        n=len(ordered),
        min_ms=ordered[0] / 1e6,  # the last step: means of whole nanoseconds have few digits
        median_ms=median(ordered) / 1e6,
        p10_ms=deciles[0] / 1e6,
        p90_ms=deciles[-1] / 1e6,
        low_ms=low / 1e6,
        high_ms=high / 1e6,
        cold=cold,
        load=os.getloadavg()[0],
        clock_mhz=clock_mhz,
    )


class Stopwatch:
    """Times one bound plan, in as many goes as the caller likes; the measurement is of all of them."""

    def __init__(self, timed: Timed, rule: StopRule) -> None:
        self.rule = rule
        self._timed = timed
        self._durations: list[int] = []
        self._spent = 0.0
        self._warm = 0

    def warm_up(self) -> None:
        """Launch until threads, caches and clocks have settled.

        Raises:
            DeviceError: a launch failed.
        """
        deadline = time.monotonic() + self.rule.warm_up_seconds
        self._warm = self._timed.time(1)[0]
        while time.monotonic() < deadline:
            self._warm = self._timed.time(1)[0]

    def go(self, launches: int) -> None:
        """Time so many launches more.

        Raises:
            DeviceError: a launch failed.
        """
        started = time.monotonic()
        self._durations += self._timed.time(launches, cold=self.rule.cold)
        self._spent += time.monotonic() - started

    @property
    def done(self) -> bool:
        """Whether the rule says to stop."""
        n = len(self._durations)
        if n < self.rule.least:
            return False
        if n >= self.rule.most or self._spent >= self.rule.seconds:
            return True
        ordered = sorted(self._durations)
        low, high = interval(ordered)
        return (high - low) / 2 <= self.rule.precision * median(ordered)

    @property
    def median_ms(self) -> float:
        """Of what was timed so far, at least one launch."""
        return median(self._durations) / 1e6

    @property
    def typical_ms(self) -> float:
        """What a launch takes, as far as is known: before any was timed, what the last one of the warm-up took."""
        return max(1, median(self._durations) if self._durations else self._warm) / 1e6

    def measurement(self) -> Measurement:
        """What was timed so far, at least one launch."""
        return summarise(self._durations, cold=self.rule.cold, clock_mhz=self._timed.clock_mhz())


def measure(timed: Timed, rule: StopRule | None = None) -> Measurement:
    """Warm up, and time launches until the rule says to stop.

    Raises:
        DeviceError: a launch failed.
    """
    stopwatch = Stopwatch(timed, rule or StopRule())
    stopwatch.warm_up()
    while not stopwatch.done:
        stopwatch.go(stopwatch.rule.least)
    return stopwatch.measurement()
