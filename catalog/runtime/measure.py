"""Timing: plans are launched in rounds until their medians are precise enough.

A *round* has one block of launches of every plan, in random order, so that other work on the machine affects all plans
alike. A *block* is a few launches, about half a millisecond; its time is their median by the device's clock. If a
thread had to wait for a core during a block, other processes disturbed it: the block does not count and is repeated.

The result is the median over the blocks with its 95 % confidence interval. Order statistics give the interval without
any assumption about the distribution of durations (Conover, Practical Nonparametric Statistics, section 3.2).
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from statistics import median, quantiles
from typing import Protocol

from catalog.errors import CatalogError
from catalog.registry.timings import WIDEST
from catalog.schema.policy import MeasuredAs, Policy

DOUBT = 0.05
"""The probability that the confidence interval of a median misses the median."""

BLOCK_SECONDS = 0.0005
"""Approximate duration of a block, unless a single launch takes longer; less than a time slice of the scheduler."""

BLOCK_LAUNCHES = 100
"""Maximum number of launches of a block."""

WAITED = 0.02
"""A block counts if each of its threads waited for a core for at most this share of it."""

TRIES = 4
"""Maximum number of attempts per round to time a block that counts."""

SOUND_BLOCKS = 9
"""Minimum number of blocks of a sound measurement: with fewer no plan can be shown to be slower than another, see
:data:`catalog.runtime.race.DOUBT`."""

PATIENCE = 3
"""Factor on the time limit of a plan with fewer than :data:`SOUND_BLOCKS` blocks."""


class Timed(Protocol):
    """An object that can be launched and timed, such as a :class:`~catalog.runtime.bound.BoundPlan`."""

    def time(self, launches: int = 1, *, cold: bool = False) -> list[int]:
        """Nanoseconds of each launch; ``cold`` empties the device's caches before each."""

    def waits(self) -> Mapping[str, int]:
        """Nanoseconds that each launching thread has waited for a core so far; empty if unknown."""

    def clock_mhz(self) -> float | None:
        """The device's current clock rate in MHz, if known."""


@dataclass(frozen=True, slots=True)
class StopRule:
    """When to stop timing.

    Attributes:
        precision: half the width of the median's confidence interval, as a share of the median; a sound measurement
            needs at most :data:`~catalog.registry.timings.WIDEST`, whatever this is.
        least: minimum number of launches, in at least :data:`SOUND_BLOCKS` blocks.
        most: maximum number of launches.
        seconds: time limit of a plan's blocks after the first ``least`` launches; :data:`PATIENCE` times as long if too
            few blocks count.
        warm_up_seconds: how long a plan is launched before it is timed, until threads, caches and clocks settle.
        cold: empty the caches before every launch.
        measured_as: what a time counts, see :class:`~catalog.schema.policy.Policy`.
    """

    precision: float = 0.02
    least: int = 10
    most: int = 100_000
    seconds: float = 1.0
    warm_up_seconds: float = 0.05
    cold: bool = False
    measured_as: MeasuredAs = "graph"

    @property
    def policy(self) -> Policy:
        """The policy that the times belong to."""
        return Policy(self.measured_as, self.cold)


@dataclass(frozen=True, slots=True)
class Measurement:
    """The time of a plan's launch in milliseconds, from ``n`` launches in ``blocks`` blocks.

    ``median_ms``, ``p10_ms`` and ``p90_ms`` are taken over the blocks that count, where a block's time is the median of
    its launches; ``low_ms`` to ``high_ms`` is the confidence interval of ``median_ms``. ``disturbed`` more blocks do
    not count; if all were disturbed, ``blocks`` is 0 and the times are from those. ``load`` is the machine's load
    average at the end, ``clock_mhz`` the device's clock rate then, None if unknown.
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
    blocks: int = SOUND_BLOCKS
    disturbed: int = 0
    measured_as: MeasuredAs = "graph"

    @property
    def precision(self) -> float:
        """Half the width of the confidence interval, as a share of the median."""
        return (self.high_ms - self.low_ms) / 2 / self.median_ms if self.median_ms else 0.0

    @property
    def sound(self) -> bool:
        """Whether there are enough blocks and they agree; only sound measurements are recorded."""
        return self.blocks >= SOUND_BLOCKS and self.precision <= WIDEST

    @property
    def confidence(self) -> str:
        """The precision as text, or ``too noisy``."""
        return f"within {percent(self.precision)}" if self.sound else "too noisy"

    @property
    def disturbance(self) -> float:
        """The share of blocks during which other processes had a core."""
        return self.disturbed / (self.blocks + self.disturbed)

    def scaled(self, factor: float) -> Measurement:
        """The same with all times multiplied by ``factor``."""
        times = ("min_ms", "median_ms", "p10_ms", "p90_ms", "low_ms", "high_ms")
        return replace(self, **{name: getattr(self, name) * factor for name in times})


def percent(share: float) -> str:
    """A share as a percentage, with one decimal below 10 %."""
    return f"{100 * share:.{1 if share < 0.1 else 0}f} %"


def remedy(disturbance: float) -> str:
    """Why times are too noisy, and what to do; ``disturbance`` is the share of blocks disturbed by other processes."""
    others = f"other processes had the cores during {percent(disturbance)} of the time"
    return (
        f"{others if disturbance else 'the times differ too much'}. Stop other work and measure again, or use fewer "
        "threads: CATALOG_NUM_THREADS=1."
    )


@cache
def rank(n: int, doubt: float) -> int | None:
    """The index, from either end, of the values among ``n`` ordered ones that bound the median from below and above.

    The interval misses the median with a probability of at most ``doubt``. None if ``n`` values are too few.
    """
    share = Fraction(str(doubt))
    wrong, place, ways = 0, 0, 1
    while 2 * (wrong + ways) * share.denominator <= share.numerator << n:
        wrong, place, ways = wrong + ways, place + 1, ways * (n - place) // (place + 1)
    return place - 1 if place else None


def interval(ordered: Sequence[float], doubt: float = DOUBT) -> tuple[float, float]:
    """The confidence interval of the median of ``ordered`` values; the whole range if they are too few."""
    place = rank(len(ordered), doubt) or 0
    return ordered[place], ordered[-1 - place]


def summarise(
    nanoseconds: Iterable[float],
    *,
    cold: bool = False,
    clock_mhz: float | None = None,
    n: int | None = None,
    fastest: float | None = None,
) -> Measurement:
    """The measurement from the durations of at least one block.

    Args:
        nanoseconds: the duration of each block.
        cold: whether the caches were emptied before each launch.
        clock_mhz: clock rate of the device.
        n: number of launches in all blocks; None: one per block.
        fastest: nanoseconds of the fastest launch; None: those of the fastest block.
    """
    ordered = sorted(nanoseconds)
    low, high = interval(ordered)
    deciles = quantiles(ordered, n=10, method="inclusive") if len(ordered) > 1 else ordered * 9
    return Measurement(
        n=n or len(ordered),
        min_ms=(fastest or ordered[0]) / 1e6,  # divide last: means of whole nanoseconds have few digits
        median_ms=median(ordered) / 1e6,
        p10_ms=deciles[0] / 1e6,
        p90_ms=deciles[-1] / 1e6,
        low_ms=low / 1e6,
        high_ms=high / 1e6,
        cold=cold,
        load=os.getloadavg()[0],
        clock_mhz=clock_mhz,
        blocks=len(ordered),
    )


@dataclass(frozen=True, slots=True)
class _Block:
    nanoseconds: float
    fastest: int


class Rounds:
    """Times several plans in rounds.

    ``running`` has the names of the plans in the next round; the caller may remove some. A plan whose launch fails is
    removed, and ``failures`` has its error.

    Args:
        plans: the plans by name.
        rule: how to launch; the caller decides when to stop.
    """

    def __init__(self, plans: Mapping[str, Timed], rule: StopRule) -> None:
        self.failures: dict[str, CatalogError] = {}
        self.running = list(plans)
        self._plans = dict(plans)
        self._rule = rule
        self._launches = 1
        self._order = random.Random(0)  # noqa: S311 - not for security: it keeps periodic work out of step
        self._rounds: list[dict[str, _Block]] = []
        self._disturbed: defaultdict[str, list[_Block]] = defaultdict(list)
        self._tried: Counter[str] = Counter()
        self._counted: Counter[str] = Counter()
        self._spent: Counter[str] = Counter()

    def warm_up(self) -> None:
        """Launch each plan until threads, caches and clocks have settled, and set the number of launches of a block.

        All plans have blocks of equal length, because medians of more launches would vary less.
        """
        taken = []
        for name in list(self.running):
            with self._dropping(name):
                deadline = time.monotonic() + self._rule.warm_up_seconds
                taken += self._plans[name].time(1)
                while time.monotonic() < deadline:
                    taken += self._plans[name].time(1)
        if taken and not self._rule.cold:  # cold blocks have one launch: emptying the caches takes longer than it
            launches = round(BLOCK_SECONDS * 1e9 / max(1, min(taken)))
            self._launches = max(1, min(BLOCK_LAUNCHES, launches))

    @property
    def fewest(self) -> int:
        """Minimum number of rounds."""
        return max(SOUND_BLOCKS, -(-self._rule.least // self._launches))

    def anew(self, names: Iterable[str]) -> Rounds:
        """New rounds of some of the plans, which are already warm."""
        rounds = Rounds({name: self._plans[name] for name in names}, self._rule)
        rounds._launches, rounds._order = self._launches, self._order
        return rounds

    def go(self) -> None:
        """Time one round."""
        order = list(self.running)
        self._order.shuffle(order)
        self._rounds.append({})
        for name in order:
            with self._dropping(name):
                self._visit(name)

    @property
    def seconds(self) -> float:
        """Total duration of all blocks in seconds."""
        return sum(self._spent.values()) / 1e9

    def blocks(self, name: str) -> list[float]:
        """Nanoseconds of a plan's blocks that count, in ascending order."""
        return sorted(blocks[name].nanoseconds for blocks in self._rounds if name in blocks)

    def ratios(self, name: str, other: str) -> list[float]:
        """The ratio of a plan's time to another's in each round that has both, in ascending order."""
        return sorted(
            blocks[name].nanoseconds / blocks[other].nanoseconds
            for blocks in self._rounds
            if name in blocks and other in blocks
        )

    def precise(self, name: str) -> bool:
        """Whether a plan's median is as precise as the rule and a sound measurement require."""
        ordered = self.blocks(name)
        if len(ordered) < self.fewest:
            return False
        low, high = interval(ordered)
        return (high - low) / 2 <= min(self._rule.precision, WIDEST) * median(ordered)

    def exhausted(self, name: str) -> bool:
        """Whether a plan has reached the rule's limits."""
        tried, rule = self._tried[name], self._rule
        sound = self._counted[name] >= SOUND_BLOCKS
        seconds = rule.seconds if sound else rule.seconds * PATIENCE
        launches = tried * self._launches
        return tried >= self.fewest and (launches >= rule.most or self._spent[name] >= seconds * 1e9)

    def measurement(self, name: str) -> Measurement:
        """The measurement of a plan with at least one timed block."""
        counted = [blocks[name] for blocks in self._rounds if name in blocks]
        disturbed = self._disturbed[name]
        kept = counted or disturbed
        measured = summarise(
            [block.nanoseconds for block in kept],
            cold=self._rule.cold,
            clock_mhz=self._plans[name].clock_mhz(),
            n=len(kept) * self._launches,
            fastest=min(block.fastest for block in kept),
        )
        return replace(measured, blocks=len(counted), disturbed=len(disturbed), measured_as=self._rule.measured_as)

    @contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        """Remove a plan that fails in this ``with`` block."""
        try:
            yield
        except CatalogError as error:
            self.failures[name] = error
            self.running.remove(name)

    def _visit(self, name: str) -> None:
        """Time blocks of a plan until one counts."""
        for _ in range(TRIES):
            block, quiet = self._block(name)
            if quiet:
                self._rounds[-1][name] = block
                self._counted[name] += 1
                return
            self._disturbed[name].append(block)

    def _block(self, name: str) -> tuple[_Block, bool]:
        plan = self._plans[name]
        started, before = time.monotonic_ns(), plan.waits()
        durations = plan.time(self._launches, cold=self._rule.cold)
        waited = max((waits - before.get(thread, 0) for thread, waits in plan.waits().items()), default=0)
        total = sum(durations)
        self._tried[name] += 1
        self._spent[name] += max(total, time.monotonic_ns() - started)
        return _Block(max(1.0, median(durations)), min(durations)), waited <= WAITED * total


def measure_all(plans: Mapping[str, Timed], rule: StopRule) -> tuple[dict[str, Measurement], dict[str, CatalogError]]:
    """Warm up, then time plans in rounds, each until its median is precise or its limits are reached.

    Returns:
        Measurements by name, and the errors of plans whose launches failed.
    """
    rounds = Rounds(plans, rule)
    rounds.warm_up()
    while rounds.running:
        for _ in range(rounds.fewest):
            rounds.go()
            rounds.running = [name for name in rounds.running if not rounds.exhausted(name)]
        rounds.running = [name for name in rounds.running if not rounds.precise(name)]
    measured = {name: rounds.measurement(name) for name in plans if name not in rounds.failures}
    return measured, rounds.failures


def measure(plan: Timed, rule: StopRule | None = None) -> Measurement:
    """Like :func:`measure_all`, for one plan.

    Raises:
        DeviceError: a launch failed.
    """
    measured, failures = measure_all({"": plan}, rule or StopRule())
    for error in failures.values():
        raise error
    return measured[""]
