"""Timing: when there is enough of it, what is kept, and which kernel wins beside busy neighbours."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, repeat
from math import comb

import numpy as np
import pytest
from conftest import slow_but
from hypothesis import given
from hypothesis import strategies as st

from catalog.errors import DeviceError
from catalog.runtime.devices.host.device import HostDevice
from catalog.runtime.measure import SOUND_BLOCKS, Measurement, StopRule, interval, measure, rank, summarise
from catalog.runtime.race import DOUBT, Sureness, race

QUICK = StopRule(warm_up_seconds=0, seconds=60)
QUICK_RACE = StopRule(warm_up_seconds=0)


class Clockwork:
    """Launches with given durations, in nanoseconds."""

    def __init__(self, durations: Iterator[int]) -> None:
        self.durations = durations
        self.launches = self.chilled = 0

    def time(self, launches: int = 1, *, cold: bool = False) -> list[int]:
        self.launches += launches
        self.chilled += launches * cold
        return [next(self.durations) for _ in range(launches)]

    def waits(self) -> dict[str, int]:
        return {}

    def clock_mhz(self) -> float | None:
        return 2000.0


def noisy(spread: float, seed: int = 1) -> Iterator[int]:
    generator = np.random.default_rng(seed)
    while True:
        yield round(1_000_000 * generator.lognormal(0, spread))


def test_steady_launches_are_timed_as_few_times_as_allowed() -> None:
    clockwork = Clockwork(repeat(2_000_000))
    measurement = measure(clockwork, QUICK)
    assert (measurement.n, clockwork.launches) == (10, 11), "one more to warm up"
    assert (measurement.min_ms, measurement.median_ms, measurement.p90_ms) == (2, 2, 2)
    assert (measurement.precision, measurement.clock_mhz) == (0, 2000)


@pytest.mark.parametrize("spread", [0.02, 0.1, 0.3])
def test_noisier_launches_are_timed_until_the_median_is_known(spread: float) -> None:
    measurement = measure(Clockwork(noisy(spread)), QUICK)
    assert measurement.precision <= QUICK.precision
    assert measurement.low_ms <= measurement.median_ms <= measurement.high_ms
    assert abs(measurement.median_ms - 1) < 2 * QUICK.precision
    rough = measure(Clockwork(noisy(spread)), StopRule(warm_up_seconds=0, precision=0.1))
    assert rough.n <= measurement.n


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    held = 0
    for seed in range(1000):
        durations = sorted(duration for duration, _ in zip(noisy(0.2, seed), range(25), strict=False))
        low, high = interval(durations)
        held += low <= 1_000_000 <= high
    assert held >= 940


def test_time_and_launches_are_bounded() -> None:
    wild = StopRule(warm_up_seconds=0, precision=0, most=50)
    assert measure(Clockwork(noisy(1)), wild).n == 50
    assert measure(Clockwork(noisy(1)), StopRule(warm_up_seconds=0, precision=0, seconds=0)).n == 10


def test_cold_launches_empty_the_caches_each_time() -> None:
    clockwork = Clockwork(repeat(1000))
    measurement = measure(clockwork, StopRule(cold=True, warm_up_seconds=0))
    assert clockwork.chilled == measurement.n == 10
    assert measurement.cold


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=200))
def test_what_is_kept_is_ordered_and_of_the_durations(durations: list[int]) -> None:
    kept: Measurement = summarise(durations)
    assert kept.n == len(durations)
    order = [kept.min_ms, kept.p10_ms, kept.median_ms, kept.p90_ms, max(durations) / 1e6]
    assert all(a <= b or np.isclose(a, b) for a, b in pairwise(order))
    assert kept.low_ms <= kept.median_ms * (1 + 1e-12)
    assert kept.median_ms <= kept.high_ms * (1 + 1e-12)


class Neighbours:
    """A machine on which others work ``busy`` of the time, in spells of 20 ms on average, by a clock of its own.

    A launch during a spell takes 4 ms longer at least, sometimes 15 times that. ``seen``: the system says so.
    """

    def __init__(self, busy: float, seed: int, *, seen: bool) -> None:
        self.chance = random.Random(seed)  # noqa: S311 - no secret
        self.busy, self.seen = busy, seen
        self.now = self.until = 0.0
        self.working = False
        self.waited = 0

    def launch(self, milliseconds: float) -> int:
        while self.now >= self.until:
            self.working = self.chance.random() < self.busy
            self.until += self.chance.expovariate(1 / 20)
        took = milliseconds * (1 + abs(self.chance.gauss(0, 0.03)))
        if self.working:
            waited = min(60, 4 * self.chance.paretovariate(1.1))
            self.waited += round(waited * 1e6) * self.seen
            took += waited
        self.now += took
        return round(took * 1e6)


@dataclass
class Kernel:
    """One whose launch takes ``milliseconds`` on an idle machine."""

    machine: Neighbours
    milliseconds: float

    def time(self, launches: int = 1, *, cold: bool = False) -> list[int]:
        return [self.machine.launch(self.milliseconds) for _ in range(launches)]

    def waits(self) -> dict[str, int]:
        return {"thread": self.machine.waited}

    def clock_mhz(self) -> float | None:
        return None


def outcomes(milliseconds: Sequence[float], busy: float, *, seen: bool) -> Counter[str]:
    """Which kernels, a, b and so on, win 100 races, each on a machine of its own; "" where it is too noisy."""
    winners = Counter[str]()
    for seed in range(100):
        machine = Neighbours(busy, seed, seen=seen)
        kernels = {name: Kernel(machine, each) for name, each in zip("abc", milliseconds, strict=True)}
        verdict = race(kernels, QUICK_RACE, noise=0.05).verdict
        assert verdict is not None
        winners["" if verdict.sureness is Sureness.NOISY else verdict.best] += 1
    return winners


NEIGHBOURS = [(0, True), (0.3, True), (0.7, True), (0.1, False), (0.3, False), (0.7, False)]


@pytest.mark.parametrize(("busy", "seen"), slow_but([(0.3, True)], NEIGHBOURS))
def test_the_fastest_kernel_wins_whatever_the_neighbours_do(busy: float, seen: bool) -> None:
    winners = outcomes((0.434, 0.33, 0.378), busy, seen=seen)
    assert winners["a"] + winners["c"] <= 1
    assert winners["b"] >= 95, "and hardly a race is too noisy"


@pytest.mark.slow
@pytest.mark.parametrize(("busy", "seen"), [(0.3, True), (0.3, False)])
def test_of_kernels_that_are_equal_within_noise_the_same_one_wins_every_time(busy: float, seen: bool) -> None:
    assert outcomes((0.336, 0.33, 0.333), busy, seen=seen)["a"] >= 98


@pytest.mark.parametrize("seen", [True, False])
def test_where_others_have_the_cores_all_the_time_no_kernel_wins(seen: bool) -> None:
    assert outcomes((0.434, 0.33, 0.378), 1, seen=seen)[""] >= 99


def test_a_few_launches_that_were_disturbed_drop_no_kernel() -> None:
    """The fastest of three is disturbed while the first ones are timed, and nothing shows it."""
    durations = {"a": chain([330_000], [15_000_000] * 5, repeat(330_000)), "b": repeat(378_000), "c": repeat(434_000)}
    raced = race({name: Clockwork(times) for name, times in durations.items()}, QUICK, noise=0.05)
    assert raced.verdict is not None
    assert (raced.verdict.best, raced.verdict.sureness) == ("a", Sureness.SURE)
    assert raced.verdict.about == "sure by 15 %"
    assert {name: one.median_ms for name, one in raced.measurements.items()} == pytest.approx(
        {"a": 0.33, "b": 0.378, "c": 0.434}
    )


def test_times_of_a_race_are_on_one_scale() -> None:
    """The machine slows down by half after the first part, in which a kernel has dropped out."""

    class Throttled(Neighbours):
        def launch(self, milliseconds: float) -> int:
            return super().launch(milliseconds * (2 if self.now > 230 else 1))

    machine = Throttled(0, 1, seen=True)
    kernels = {"a": Kernel(machine, 1.0), "b": Kernel(machine, 1.1), "c": Kernel(machine, 1.3)}
    measured = race(kernels, QUICK, noise=0.05).measurements
    assert measured["a"].median_ms == pytest.approx(2, rel=0.05)
    assert measured["c"].median_ms / measured["a"].median_ms == pytest.approx(1.3, rel=0.02)


@pytest.mark.parametrize("launches", [0, 5, 40])
def test_a_kernel_that_fails_leaves_the_race(launches: int) -> None:
    def failing() -> Iterator[int]:
        yield from repeat(1_000_000, launches)
        raise DeviceError("it broke")

    raced = race({"a": Clockwork(failing()), "b": Clockwork(repeat(2_000_000))}, QUICK, noise=0.05)
    assert [(name, error.message) for name, error in raced.failures.items()] == [("a", "it broke")]
    assert list(raced.measurements) == ["b"]
    assert raced.verdict is not None
    assert raced.verdict.about == "the only one"
    assert race({"a": Clockwork(failing())}, QUICK, noise=0.05).verdict is None


@pytest.mark.parametrize("doubt", [0.05, DOUBT])
def test_bounds_of_a_median_are_exact(doubt: float) -> None:
    """A bound is wrong where all but at most as many values as its rank are on the other side of the median."""
    for n in range(1, 60):
        place = rank(n, doubt)
        wrong = [2 * sum(comb(n, k) for k in range(places + 1)) / 2**n for places in range(n)]
        assert place == max((places for places in range(n) if wrong[places] <= doubt), default=None)
    assert rank(SOUND_BLOCKS, DOUBT) == 0
    assert rank(SOUND_BLOCKS - 1, DOUBT) is None
    assert rank(10_000, 0.05) == pytest.approx(5000 - 98, abs=2)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux says how long a thread has waited")
def test_a_host_device_knows_that_another_process_has_its_core() -> None:
    device, cores = HostDevice(), os.sched_getaffinity(0)
    core = min(cores)
    spinning = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile True: pass\n"
    thread = str(threading.get_native_id())
    with subprocess.Popen([sys.executable, "-c", spinning, str(core)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        try:
            os.sched_setaffinity(0, {core})
            before, end = device.waits()[thread], time.thread_time() + 0.05
            while time.thread_time() < end:
                pass
            assert device.waits()[thread] - before > 10_000_000
        finally:
            os.sched_setaffinity(0, cores)
            other.kill()
