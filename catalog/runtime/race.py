"""Finds the fastest of several kernels, with a statement of confidence.

Interference only adds time, and in rounds of random order it affects every kernel alike. So, whatever its distribution,
a kernel that is not faster than another takes longer in at least half of all rounds: the median of the ratios is on the
right side of 1, and order statistics give the confidence.

A race has two parts. First all kernels run in rounds, and those that are certainly slower than the leader by more than
noise drop out. Then the remaining kernels, at least the leader and the runner-up, run in new rounds. Only the new
rounds decide, because the leader of the first part may owe its lead to luck.
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
"""Error probability of one comparison of two kernels; for all :data:`LOOKS` together it is at most 1 in 20."""

LOOKS = 12
"""Maximum number of comparisons in a part of the race."""

LATER = 1.5
"""Growth of the number of rounds from one comparison to the next."""

SIFTING_LOOKS = 4
"""Maximum number of comparisons in the first part; kernels not separated by then go on to the second."""

SPREAD_SECONDS = 0.2
"""Minimum duration of a part in seconds, because other work comes and goes."""

FINALISTS = 2
"""Minimum number of kernels in the second part, if there are as many."""


class Sureness(str, Enum):
    """The confidence in a race's result."""

    SURE = "sure"
    EQUAL = "equal"
    NOISY = "noisy"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The kernel to choose, and the confidence in it.

    Attributes:
        best: the kernel that selection chooses by these times.
        sureness: SURE: every other kernel is slower. EQUAL: the best may be slower than another, but by at most
            ``share``. NOISY: the times prove nothing.
        share: a confidence bound on how much longer the next kernel takes (SURE), or on how much longer the best takes
            than any other (EQUAL, NOISY); infinite if nothing is known, 0 if there is no other kernel.
        rivals: number of other kernels in the second part.
        disturbance: the share of blocks disturbed by other processes.
    """

    best: str
    sureness: Sureness
    share: float
    rivals: int
    disturbance: float

    @property
    def about(self) -> str:
        """The verdict as a phrase."""
        if self.sureness is Sureness.NOISY:
            return "too noisy: not recorded"
        if self.sureness is Sureness.EQUAL:
            return f"equal within {percent(self.share)}"
        return f"sure by {percent(self.share)}" if self.rivals else "the only one"


@dataclass(frozen=True, slots=True)
class Raced:
    """The outcome of a race.

    ``measurements`` share one scale: each kernel's times are multiplied so that its median equals the leader's median
    times the median ratio of the two, or just the leader's median if the two cannot be distinguished. So selection,
    which orders by medians, chooses the kernel of the verdict, and among equal kernels the same one after every race.
    ``verdict`` is None if all kernels failed.
    """

    measurements: Mapping[str, Measurement]
    failures: Mapping[str, CatalogError]
    verdict: Verdict | None


def choice(medians: Mapping[str, float], noise: float) -> str:
    """The kernel that selection chooses by these medians: the lowest id among those within ``noise`` of the lowest."""
    limit = min(medians.values()) * (1 + noise)
    return min(kernel_id for kernel_id, median_ms in medians.items() if median_ms <= limit)


def race(plans: Mapping[str, Timed], rule: StopRule, noise: float) -> Raced:
    """Time plans against each other.

    Args:
        plans: plans by the id of the kernel that does most of the work.
        rule: the rule for each part of the race. The result is too noisy if the best may be slower than another kernel
            by more than twice the rule's precision, or twice ``noise`` if that is more.
        noise: kernels within this share of the best kernel's time are equally good.
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
    """Run rounds until ``done``, until ``looks`` comparisons were made, or until all plans reached their limits."""
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
    """Remove plans that are certainly slower than the leader by more than noise; return whether few remain."""
    leader = min(rounds.running, key=lambda name: _typical(rounds, name), default="")
    rounds.running = [
        name for name in rounds.running if name == leader or _bounds(rounds, name, leader)[0] <= 1 + noise
    ]
    return len(rounds.running) <= FINALISTS


def _decided(rounds: Rounds, noise: float) -> bool:
    """Whether the result is final: the best is measured precisely, and each other plan is slower or equally good."""
    if not rounds.running:
        return True
    leader, *_ = rounds.running
    best = choice({name: _ratio(rounds, name, leader) for name in rounds.running}, noise)
    bounds = [_bounds(rounds, best, other) for other in rounds.running if other != best]
    return rounds.precise(best) and all(
        high < 1 or (1 / (1 + noise) <= low and high <= 1 + noise) for low, high in bounds
    )


def _verdict(rounds: Rounds, measurements: Mapping[str, Measurement], rule: StopRule, noise: float) -> Verdict:
    """The verdict of the second part, for the times that are recorded."""
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
    """The measurements of plans on the scale of the first part's leader, the leader first."""
    leader, *_ = names
    of_leader = (second if second.blocks(leader) else first).measurement(leader)
    for name in names:
        rounds = second if second.blocks(name) else first
        measured = rounds.measurement(name)
        yield name, measured.scaled(_ratio(rounds, name, leader) * of_leader.median_ms / measured.median_ms)


def _ratio(rounds: Rounds, name: str, leader: str) -> float:
    """The ratio of a plan's time to the leader's; 1 if the two cannot be distinguished."""
    low, high = _bounds(rounds, name, leader)
    return 1.0 if low <= 1 <= high else median(rounds.ratios(name, leader))


def _typical(rounds: Rounds, name: str) -> float:
    """The median of a plan's blocks in nanoseconds; infinite if none counts."""
    return median(rounds.blocks(name) or [math.inf])


def _bounds(rounds: Rounds, name: str, other: str) -> tuple[float, float]:
    """Confidence bounds of the ratio of a plan's time to another's; 0 and infinity if there are too few rounds."""
    ratios = rounds.ratios(name, other)
    place = rank(len(ratios), DOUBT)
    return (0.0, math.inf) if place is None else (ratios[place], ratios[-1 - place])
