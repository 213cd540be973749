"""Timing: when there is enough of it, and what is kept."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, repeat

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.runtime.measure import Measurement, StopRule, interval, measure, summarise

QUICK = StopRule(warm_up_seconds=0, seconds=60)


class Clockwork:
    """Launches that take as long as they are told, in nanoseconds."""

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
