"""Timing: plans are launched in rounds until their medians are known well enough.

A *round* has one block of launches of every plan, in random order, so that whatever else the machine does meets all
plans alike. A *block* is a few launches, about half a millisecond; its time is their median by the device's clock. A
block in which a thread had to wait for a core was timed beside other processes: it does not count and is repeated.

What is kept is the median over the blocks with its 95 % confidence interval. Order statistics give the interval without
an assumption about how durations are distributed (Conover, Practical Nonparametric Statistics, section 3.2).
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

DOUBT = 0.05
"""How often the confidence interval of a median may miss it."""

BLOCK_SECONDS = 0.0005
"""About how long a block takes, if a launch takes no longer: less than the time slice of another process."""

BLOCK_LAUNCHES = 100
"""Maximum number of launches of a block."""

WAITED = 0.02
"""A block counts if each of its threads waited for a core for no longer than this share of it."""

TRIES = 4
"""How often a block is timed in a round until it counts."""

SOUND_BLOCKS = 9
"""Minimum number of blocks of a sound measurement: the least that can show that one plan is slower than another, see
:data:`catalog.runtime.race.DOUBT`."""

PATIENCE = 3
"""How many times longer a plan with fewer than :data:`SOUND_BLOCKS` blocks may be timed."""


class Timed(Protocol):
    """What can be launched and timed: a :class:`~catalog.runtime.bound.BoundPlan`."""

    def time(self, launches: int = 1, *, cold: bool = False) -> list[int]:
        """Nanoseconds of each launch; ``cold``: the device's caches are emptied before each."""

    def waits(self) -> Mapping[str, int]:
        """Nanoseconds for which each thread of launches has waited for a core so far; empty where that is unknown."""

    def clock_mhz(self) -> float | None:
        """The device's clock now, where it says."""


@dataclass(frozen=True, slots=True)
class StopRule:
    """When enough launches are timed.

    Attributes:
        precision: half the width of the median's confidence interval, as a share of the median.
        least: launches that are timed in any case, in :data:`SOUND_BLOCKS` blocks at least.
        most: maximum number of launches.
        seconds: how long the blocks of a plan may take, except for the first ``least`` launches; :data:`PATIENCE` times
            as long where too few blocks count.
        warm_up_seconds: how long a plan is launched before it is timed, for threads, caches and clocks to settle.
        cold: empty the caches before every launch.
    """

    precision: float = 0.02
    least: int = 10
    most: int = 100_000
    seconds: float = 1.0
    warm_up_seconds: float = 0.05
    cold: bool = False


@dataclass(frozen=True, slots=True)
class Measurement:
    """How long a launch of a plan takes, in milliseconds, by ``n`` launches in ``blocks`` blocks.

    ``median_ms``, ``p10_ms`` and ``p90_ms`` are of the blocks that count, each of which has the median of its launches;
    ``low_ms`` to ``high_ms`` is the confidence interval of ``median_ms``. Another ``disturbed`` blocks do not count;
    where all were disturbed, ``blocks`` is 0 and the times are theirs. ``load`` is the machine's load average at the
    end, ``clock_mhz`` the device's clock then, None where it does not say.
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

    @property
    def precision(self) -> float:
        """Half the width of the confidence interval, as a share of the median."""
        return (self.high_ms - self.low_ms) / 2 / self.median_ms if self.median_ms else 0.0

    @property
    def sound(self) -> bool:
        """Whether there are enough blocks, and they agree: only such a measurement is recorded."""
        return self.blocks >= SOUND_BLOCKS and self.precision <= WIDEST

    @property
    def confidence(self) -> str:
        """The precision in words, or ``too noisy``."""
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
    """Why times are too noisy, and what to do; ``disturbance``: the share of blocks with other processes on a core."""
    others = f"other processes had the cores during {percent(disturbance)} of the time"
    return (
        f"{others if disturbance else 'the times differ too much'}. Stop other work and measure again, or use fewer "
        "threads: CATALOG_NUM_THREADS=1."
    )


@cache
def rank(n: int, doubt: float) -> int | None:
    """The index of the value among ``n`` ordered ones that bounds their median from below; from the end, from above.

    Both bounds together are wrong with a probability of at most ``doubt``. None where ``n`` values are too few.
    """
    share = Fraction(str(doubt))
    wrong, place, ways = 0, 0, 1
    while 2 * (wrong + ways) * share.denominator <= share.numerator << n:
        wrong, place, ways = wrong + ways, place + 1, ways * (n - place) // (place + 1)
    return place - 1 if place else None


def interval(ordered: Sequence[float], doubt: float = DOUBT) -> tuple[float, float]:
    """The confidence interval of the median of ``ordered`` values, at least one; of too few, all of them."""
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
        nanoseconds: a duration for each block.
        cold: the caches were emptied before each launch.
        clock_mhz: of the device.
        n: launches of all blocks; None: one each.
        fastest: the shortest duration of a launch; None: that of a block.
    """
    ordered = sorted(nanoseconds)
    low, high = interval(ordered)
    deciles = quantiles(ordered, n=10, method="inclusive") if len(ordered) > 1 else ordered * 9
    return Measurement(
        n=n or len(ordered),
        min_ms=(fastest or ordered[0]) / 1e6,  # the last step: means of whole nanoseconds have few digits
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

    ``running`` has the names that take part in the next round; the caller may remove some. A plan whose launch fails
    drops out by itself, and ``failures`` has its error.

    Args:
        plans: by name.
        rule: says how to launch; when to stop is up to the caller.
    """

    def __init__(self, plans: Mapping[str, Timed], rule: StopRule) -> None:
        self.failures: dict[str, CatalogError] = {}
        self.running = list(plans)
        self._plans = dict(plans)
        self._rule = rule
        self._launches = 1
        self._order = random.Random(0)  # noqa: S311 - no secret: others' work must not keep step with it
        self._rounds: list[dict[str, _Block]] = []
        self._disturbed: defaultdict[str, list[_Block]] = defaultdict(list)
        self._tried: Counter[str] = Counter()
        self._counted: Counter[str] = Counter()
        self._spent: Counter[str] = Counter()

    def warm_up(self) -> None:
        """Launch each plan until threads, caches and clocks have settled, and set the number of launches of a block.

        All plans have blocks of as many launches: medians of more would vary less.
        """
        taken = []
        for name in list(self.running):
            with self._dropping(name):
                deadline = time.monotonic() + self._rule.warm_up_seconds
                taken += self._plans[name].time(1)
                while time.monotonic() < deadline:
                    taken += self._plans[name].time(1)
        if taken and not self._rule.cold:  # emptying the caches takes longer than a launch
            launches = round(BLOCK_SECONDS * 1e9 / max(1, min(taken)))
            self._launches = max(1, min(BLOCK_LAUNCHES, launches))

    @property
    def fewest(self) -> int:
        """Minimum number of rounds."""
        return max(SOUND_BLOCKS, -(-self._rule.least // self._launches))

    def anew(self, names: Iterable[str]) -> Rounds:
        """New rounds of some of the plans, which are warm."""
        rounds = Rounds({name: self._plans[name] for name in names}, self._rule)
        rounds._launches, rounds._order = self._launches, self._order
        return rounds

    def go(self) -> None:
        """One round."""
        order = list(self.running)
        self._order.shuffle(order)
        self._rounds.append({})
        for name in order:
            with self._dropping(name):
                self._visit(name)

    @property
    def seconds(self) -> float:
        """How long all blocks took."""
        return sum(self._spent.values()) / 1e9

    def blocks(self, name: str) -> list[float]:
        """Nanoseconds of the blocks of a plan that count, in ascending order."""
        return sorted(blocks[name].nanoseconds for blocks in self._rounds if name in blocks)

    def ratios(self, name: str, other: str) -> list[float]:
        """The time of a plan over that of another in each round that has both, in ascending order."""
        return sorted(
            blocks[name].nanoseconds / blocks[other].nanoseconds
            for blocks in self._rounds
            if name in blocks and other in blocks
        )

    def precise(self, name: str) -> bool:
        """Whether the median of a plan is known as precisely as the rule asks."""
        ordered = self.blocks(name)
        if len(ordered) < self.fewest:
            return False
        low, high = interval(ordered)
        return (high - low) / 2 <= self._rule.precision * median(ordered)

    def exhausted(self, name: str) -> bool:
        """Whether a plan may not be timed for longer."""
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
        return replace(measured, blocks=len(counted), disturbed=len(disturbed))

    @contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        """Remove a plan that fails in this block."""
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
    """Warm up, and time plans in rounds, each until its median is known or it may not be timed for longer.

    Returns:
        Measurements by name, and the errors of those whose launches failed.
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
    """:func:`measure_all` of one plan.

    Raises:
        DeviceError: a launch failed.
    """
    measured, failures = measure_all({"": plan}, rule or StopRule())
    for error in failures.values():
        raise error
    return measured[""]
