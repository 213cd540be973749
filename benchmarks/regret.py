"""Regret of selection on problems that were not tuned: the time of its choice over that of the best measured kernel.

Three choices are compared: the static order, what selection takes after other problems of the same kinds were tuned,
and what it takes after the problem itself was tuned. The problems are drawn at random, from a seed; the tuned ones are
a grid of a few lengths of each kind.

    python benchmarks/regret.py --problems 100 --threads 1 [--as eager] [--against sdpa]
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from catalog import Catalog, Problem
from catalog.errors import SelectionError
from catalog.runtime.measure import StopRule
from catalog.runtime.tune import Tuned, TuneOptions, tune

KINDS: tuple[Mapping[str, Any], ...] = (
    {"dtype": "fp32", "hdim_q": 64},
    {"dtype": "fp32", "hdim_q": 64, "mask": "causal"},
    {"dtype": "fp32", "hdim_q": 128, "mask": "causal"},
    {"dtype": "bf16", "hdim_q": 64, "mask": "causal"},
)
"""What kernels are compiled for."""

GRID = (16, 128, 1024)
"""Lengths of the tuned problems, with one and with eight heads."""


def tuned_problems() -> Iterator[Problem]:
    """The problems that are tuned: a grid."""
    for kind in KINDS:
        for length in GRID:
            for heads in (1, 8):
                yield Problem(batch=1, nhead_q=heads, seqlen_q=length, **kind)


def other_problems(count: int, seed: int) -> Iterator[Problem]:
    """Problems that are not among the tuned ones, as log-uniform lengths, batches and heads."""
    chance, seen = random.Random(seed), {problem.key for problem in tuned_problems()}  # noqa: S311 - repeatable
    while count:
        length = round(math.exp(chance.uniform(math.log(8), math.log(1500))))
        keys = length if chance.random() < 0.7 else length + chance.randrange(1500)
        heads = chance.choice((1, 2, 4, 8, 12))
        problem = Problem(
            batch=chance.choice((1, 1, 2, 4)),
            nhead_q=heads,
            nhead_k=chance.choice([heads, 1]),
            seqlen_q=length,
            seqlen_k=keys,
            **chance.choice(KINDS),
        )
        if problem.key not in seen:
            seen.add(problem.key)
            count -= 1
            yield problem


def choices(catalog: Catalog, tuned: Tuned) -> Iterator[tuple[str, str]]:
    """The kernel that each way to choose takes for a problem, by its title."""
    yield "static order", tuned.first
    try:
        yield "others tuned", catalog.choice(tuned.problem, limit=1).candidates[0].kernel.id
    except SelectionError:
        return
    ours = {kernel_id: ms for kernel_id, ms in tuned.medians.items() if kernel_id in tuned.kernels}
    limit = min(ours.values()) * (1 + tuned.noise)
    yield "itself tuned", min(kernel_id for kernel_id, ms in ours.items() if ms <= limit)


def line(title: str, regrets: Sequence[float]) -> str:
    """A line with the geometric mean, the worst, and how many are within 1 % and 10 %."""
    if not regrets:
        return f"{title}: nothing measured"
    mean = math.exp(sum(map(math.log, regrets)) / len(regrets))
    within = ", ".join(f"{sum(one <= 1 + share for one in regrets)} within {share:.0%}" for share in (0.01, 0.05, 0.1))
    worst = f"worst {max(regrets) - 1:.0%}"
    return f"{title}: {len(regrets)} problems, regret {mean - 1:.2%} on geometric mean, {worst}; {within}"


def main() -> None:
    """Tune the grid in one catalog, measure the other problems in a copy, and print a line for each way to choose."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--candidates", type=int, default=6)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--precision", type=float, default=0.02)
    parser.add_argument("--seconds", type=float, default=1.0, help="time limit of a plan in each part of a race")
    parser.add_argument("--as", dest="measured_as", choices=("graph", "eager"), default="graph")
    parser.add_argument("--against", default="", help="other implementations that count as best, such as sdpa")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rule = StopRule(precision=options.precision, seconds=options.seconds, measured_as=options.measured_as)
    against = tuple(filter(None, options.against.split(",")))
    how = TuneOptions(candidates=options.candidates, rule=rule, against=against)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "catalog.db"
        with Catalog(path, num_threads=options.threads) as catalog:
            report = tune(catalog, list(tuned_problems()), how)
            print(f"Tuned: {report.summary}", flush=True)
        measured = Path(shutil.copy(path, Path(folder) / "measured.db"))
        regrets: dict[str, list[float]] = {}
        with (
            Catalog(path, num_threads=options.threads) as catalog,
            Catalog(measured, num_threads=options.threads) as other,
        ):

            def on_done(tuned: Tuned) -> None:
                if tuned.medians:
                    best = min(tuned.medians.values())
                    for title, kernel_id in choices(catalog, tuned):
                        if kernel_id in tuned.medians:
                            regrets.setdefault(title, []).append(tuned.medians[kernel_id] / best)

            report = tune(other, list(other_problems(options.problems, options.seed)), how, on_done)
            print(f"Measured: {report.summary}")
    for title, found in regrets.items():
        print(line(title, found))
    print(f"{time.monotonic() - started:.0f} s, {options.measured_as}, candidates {options.candidates}")


if __name__ == "__main__":
    main()
