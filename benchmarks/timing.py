"""Medians of calls that take turns in one process, and the measures of the machine that take their turn among them.

PyTorch's threads spin for some milliseconds after their work, and ours sleep soon.
So before a side is timed, it runs untimed until its own threads are awake and the others' asleep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from pathlib import Path
from statistics import median

import torch

Call = Callable[[], object]

SGEMM_SIZE = 1024
SGEMM_FLOP = 2 * SGEMM_SIZE**3
STREAM_BYTES = 2**30

_SETTLE_S = 0.005
_LONG_S = 0.25
"""In a longer call, waking the threads takes a negligible part: it is timed after a pause instead."""

_FEWEST_TURNS = 3
_DEFAULT_L3_BYTES = 64 * 2**20
_L3_SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


@dataclass(frozen=True)
class Pace:
    """How long to measure: ``runs`` timed runs of each side, ``burst`` of them in a turn.

    After ``budget_s`` seconds no further turn begins, except for the first few. ``of_runs`` makes one figure of them.
    ``clock`` returns seconds: of the wall, or ``time.thread_time``, which does not count what other processes take.
    """

    runs: int
    burst: int
    budget_s: float
    of_runs: Callable[[list[float]], float] = median
    clock: Callable[[], float] = time.perf_counter


def seconds_of(call: Call, clock: Callable[[], float] = time.perf_counter) -> float:
    """The time of one call in seconds."""
    start = clock()
    call()
    return clock() - start


def interleaved(calls: Mapping[str, Call], pace: Pace) -> tuple[dict[str, float], int]:
    """The seconds of each call, by default the median, and how often each was timed."""
    last = {name: seconds_of(call) for name, call in calls.items()}  # first calls touch memory for the first time
    timed: dict[str, list[float]] = {name: [] for name in calls}
    start = time.perf_counter()
    for turn in range(-(-pace.runs // pace.burst)):
        if turn >= _FEWEST_TURNS and time.perf_counter() - start > pace.budget_s:
            break
        for name, call in calls.items():
            _settle(call, last[name])
            timed[name] += (seconds_of(call, pace.clock) for _ in range(pace.burst))
            last[name] = timed[name][-1]
    return {name: pace.of_runs(seconds) for name, seconds in timed.items()}, min(map(len, timed.values()))


def _settle(call: Call, expected_s: float) -> None:
    if expected_s > _LONG_S:
        time.sleep(_SETTLE_S)
        return
    start = time.perf_counter()
    call()
    while time.perf_counter() - start < _SETTLE_S:
        call()


def rotating(calls: Iterable[Call]) -> Call:
    """A call that runs ``calls`` in turn: on copies of one problem, its inputs are never in a cache."""
    turns = cycle(calls)

    def call() -> None:
        next(turns)()

    return call


def copies_to_stream(size: int) -> int:
    """Copies of ``size`` bytes that are together larger than 4 last-level caches."""
    return 4 * _l3_bytes() // max(size, 1) + 1


@cache
def _l3_bytes() -> int:
    """Size of the last-level cache that a core sees, in bytes; a guess if the system does not report it."""
    try:
        return int(_L3_SIZE.read_text().strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        return _DEFAULT_L3_BYTES


@cache
def sgemm() -> Call:
    """PyTorch's fp32 matrix product, of ``SGEMM_FLOP``: the machine's limit of computing."""
    a, b = torch.randn(2, SGEMM_SIZE, SGEMM_SIZE)
    return lambda: a @ b


@cache
def stream() -> Call:
    """PyTorch's sum of ``STREAM_BYTES``, on all its threads: the machine's limit of reading memory."""
    numbers = torch.ones(STREAM_BYTES // 4)
    return numbers.sum
