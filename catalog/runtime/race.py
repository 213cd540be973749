"""Which of several kernels is the fastest, and how sure that is.

Interference only adds time, and in rounds of random order it meets every kernel alike. So, whatever its distribution, a
kernel that is not faster than another one takes longer in at least half of all rounds: the median of the ratios is on
the right side of 1, and order statistics say how sure that is.

A race has two parts. First all kernels run in rounds, and those drop out that are certainly slower than the leader by
more than noise. Then, in new rounds, those that are left are compared once more, or the leader and the runner-up where
it is alone; only these rounds decide, because who leads the first part may owe it to luck.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median

from catalog.errors import CatalogError
from catalog.runtime.measure import SOUND_BLOCKS, Measurement, Rounds, StopRule, Timed, percent, rank

DOUBT = 0.004
"""How often a comparison of two kernels may be wrong; all :data:`LOOKS` together are wrong at most one time in 20."""

LOOKS = 12
"""Maximum number of comparisons in a part of the race."""

LATER = 1.5
"""Growth of the number of rounds from one comparison to the next."""

SIFTING_LOOKS = 4
"""Maximum number of comparisons in the first part: kernels that still look alike are left to the second."""

SPREAD_SECONDS = 0.2
"""Minimum duration of a part, because other work comes and goes."""

FINALISTS = 2
"""Minimum number of kernels in the second part, if there are that many."""


class Sureness(str, Enum):
    """What a race has shown."""

    SURE = "sure"
    EQUAL = "equal"
    NOISY = "noisy"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The kernel to take, and how sure that is.

    Attributes:
        best: the kernel that selection takes by these times.
        sureness: SURE: every other kernel is slower. EQUAL: the best may be slower than another one, but by no more
            than ``share``. NOISY: nothing follows from the times.
        share: a bound that holds with confidence: how much longer the next kernel takes (SURE), or how much longer the
            best takes than any other (EQUAL, NOISY); infinite where nothing is known, 0 where there is no other.
        rivals: the other kernels of the second part.
        disturbance: the share of blocks during which other processes had a core.
    """

    best: str
    sureness: Sureness
    share: float
    rivals: int
    disturbance: float

    @property
    def about(self) -> str:
        """The verdict in a few words."""
        if self.sureness is Sureness.NOISY:
            return "too noisy: not recorded"
        if self.sureness is Sureness.EQUAL:
            return f"equal within {percent(self.share)}"
        return f"sure by {percent(self.share)}" if self.rivals else "the only one"


@dataclass(frozen=True, slots=True)
class Raced:
    """The outcome of a race.

    ``measurements`` are on one scale: those of each kernel times the factor that makes its median that of the leader
    times the median of their ratios, or that of the leader where the two cannot be told apart. So selection, which
    orders by medians, takes the kernel of the verdict, and of equal kernels the same one after every race. ``verdict``
    is None if all failed.
    """

    measurements: Mapping[str, Measurement]
    failures: Mapping[str, CatalogError]
    verdict: Verdict | None


def choice(medians: Mapping[str, float], noise: float) -> str:
    """The kernel that selection takes by these medians: of those within ``noise`` of the least, the least id."""
    limit = min(medians.values()) * (1 + noise)
    return min(kernel_id for kernel_id, median_ms in medians.items() if median_ms <= limit)


def race(plans: Mapping[str, Timed], rule: StopRule, noise: float) -> Raced:
    """Time plans against each other.

    Args:
        plans: by the id of the kernel that does most of the work.
        rule: of each part of the race. By twice its precision, or twice ``noise`` if that is more, the best may be
            slower than another kernel; beyond that it is too noisy.
        noise: kernels that are nearer than that to the best are as good, as a share of its time.
    """
    first = Rounds(plans, rule)
    first.warm_up()
    _run(first, rule, lambda: _sift(first, noise), SIFTING_LOOKS)
    _sift(first, noise)
    ranking = sorted(
        (name for name in plans if name not in first.failures),
        key=lambda name: (name not in first.running, _typical(first, name), name),
    )
    second = first.anew(ranking[: max(FINALISTS, len(first.running))])
    if any(len(first.blocks(name)) >= SOUND_BLOCKS for name in ranking):
        _run(second, rule, lambda: _decided(second, noise))
    failures = first.failures | second.failures
    left = [name for name in ranking if name not in failures]
    if not left:
        return Raced({}, failures, None)
    measurements = dict(_on_one_scale(left, first, second))
    return Raced(measurements, failures, _verdict(second, measurements, rule, noise))


def _run(rounds: Rounds, rule: StopRule, done: Callable[[], bool], looks: int = LOOKS) -> None:
    """Run rounds until ``done``, until all ``looks`` are used, or until no plan may be timed for longer."""
    spread = min(SPREAD_SECONDS, rule.seconds)
    count, due = 0, float(rounds.fewest)
    for _ in range(looks):
        while count < due or rounds.seconds < spread:
            rounds.go()
            count += 1
            if all(rounds.exhausted(name) for name in rounds.running):
                return
        if done():
            return
        due = count * LATER


def _sift(rounds: Rounds, noise: float) -> bool:
    """Remove plans that are certainly slower than the leader by more than noise; return whether few are left."""
    leader = min(rounds.running, key=lambda name: _typical(rounds, name), default="")
    rounds.running = [
        name for name in rounds.running if name == leader or _bounds(rounds, name, leader)[0] <= 1 + noise
    ]
    return len(rounds.running) <= FINALISTS


def _decided(rounds: Rounds, noise: float) -> bool:
    """Whether more rounds would change nothing: the best is known well, and each other one is slower or as good."""
    if not rounds.running:
        return True
    leader, *_ = rounds.running
    best = choice({name: _ratio(rounds, name, leader) for name in rounds.running}, noise)
    bounds = [_bounds(rounds, best, other) for other in rounds.running if other != best]
    return rounds.precise(best) and all(
        high < 1 or (1 / (1 + noise) <= low and high <= 1 + noise) for low, high in bounds
    )


def _verdict(rounds: Rounds, measurements: Mapping[str, Measurement], rule: StopRule, noise: float) -> Verdict:
    """The verdict of the second part on the times that are recorded."""
    best = choice({name: measurement.median_ms for name, measurement in measurements.items()}, noise)
    others = [name for name in rounds.running if name != best]
    slowest = max((_bounds(rounds, best, other)[1] for other in others), default=1.0)
    disturbed = sum(measurement.disturbed for measurement in measurements.values())
    blocks = sum(measurement.blocks for measurement in measurements.values())
    if not measurements[best].sound or slowest > 1 + 2 * max(noise, rule.precision):
        sureness = Sureness.NOISY
    else:
        sureness = Sureness.SURE if slowest < 1 or not others else Sureness.EQUAL
    share = 1 / slowest - 1 if sureness is Sureness.SURE else slowest - 1
    return Verdict(best, sureness, share, len(others), disturbed / (disturbed + blocks))


def _on_one_scale(names: Sequence[str], first: Rounds, second: Rounds) -> Iterator[tuple[str, Measurement]]:
    """What was measured of plans, the leader of the first part first."""
    leader, *_ = names
    of_leader = (second if second.blocks(leader) else first).measurement(leader)
    for name in names:
        rounds = second if second.blocks(name) else first
        measured = rounds.measurement(name)
        yield name, measured.scaled(_ratio(rounds, name, leader) * of_leader.median_ms / measured.median_ms)


def _ratio(rounds: Rounds, name: str, leader: str) -> float:
    """How many times as long as the leader a plan takes: 1 where they cannot be told apart."""
    low, high = _bounds(rounds, name, leader)
    return 1.0 if low <= 1 <= high else median(rounds.ratios(name, leader))


def _typical(rounds: Rounds, name: str) -> float:
    """The median of the blocks of a plan, in nanoseconds; infinite where none counts."""
    return median(rounds.blocks(name) or [math.inf])


def _bounds(rounds: Rounds, name: str, other: str) -> tuple[float, float]:
    """Bounds of how many times as long as another plan one takes: 0 and infinity where there are too few rounds."""
    ratios = rounds.ratios(name, other)
    place = rank(len(ratios), DOUBT)
    return (0.0, math.inf) if place is None else (ratios[place], ratios[-1 - place])
