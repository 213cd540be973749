"""Regret of selection on problems that were not tuned: the time of its choice over that of the best measured kernel.

Four choices are compared: the static order, what selection takes after a grid of other problems was tuned, the same if
it may answer with other projects' implementations, and what it takes after the problem itself was tuned. The problems
are drawn at random, from a seed; the tuned ones are a grid of a few lengths of each kind.

    python benchmarks/regret.py [--arch sm_90] [--against sdpa] [--itself] [--clock cpu]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from catalog import Catalog, Problem
from catalog.errors import CatalogError
from catalog.foreign.installed import chosen
from catalog.registry.foreign import rival_id
from catalog.runtime.against import entrant, place_of
from catalog.runtime.deployed import Deployed, deployed
from catalog.runtime.devices.host import device as host
from catalog.runtime.inputs import draw_inputs
from catalog.runtime.measure import StopRule
from catalog.runtime.measuring import main_kernel
from catalog.runtime.tensors import make_outputs
from catalog.runtime.torch_copies import same_threads
from catalog.runtime.tune import TuneOptions, tune

BLOCK_SECONDS = 0.0005
"""Duration of a block of launches, if one launch does not take longer. A block's time is the median of its launches."""

ROUNDS = 12
"""Number of rounds between two looks at the times."""

FAR = 1.1
"""Sides slower than this multiple of the best are dropped, unless they are choices."""

ALLOWED = "others tuned, rivals allowed"
"""The title of the choice that may be another project's implementation."""

RIVAL = rival_id("")
"""What the ids of other projects' implementations begin with."""

TUNINGS = 3
"""Maximum number of tunings of a problem whose times are too noisy."""


@dataclass(frozen=True)
class Space:
    """Which problems are drawn, and which are tuned.

    Attributes:
        kinds: what kernels are compiled for.
        lengths: the shortest and longest sequence of queries; they are drawn log-uniformly.
        heads: numbers of query heads; keys have as many, or one.
        batches: numbers of sequences.
        most: maximum number of rows: queries of all heads and sequences, or keys.
        grid: lengths of the tuned problems.
        grid_heads: heads of the tuned problems.
    """

    kinds: Sequence[Mapping[str, Any]]
    lengths: tuple[int, int]
    heads: Sequence[int]
    batches: Sequence[int]
    most: int
    grid: Sequence[int]
    grid_heads: Sequence[int]

    def tuned(self) -> Iterator[Problem]:
        """The problems that are tuned: a grid."""
        for kind in self.kinds:
            for length in self.grid:
                for heads in self.grid_heads:
                    if length * heads <= self.most:
                        yield Problem(batch=1, nhead_q=heads, seqlen_q=length, **kind)

    def others(self, count: int, seed: int) -> Iterator[Problem]:
        """Problems that are not among the tuned ones."""
        chance, seen = random.Random(seed), {problem.key for problem in self.tuned()}  # noqa: S311 - repeatable
        shortest, longest = map(math.log, self.lengths)
        while count:
            length = round(math.exp(chance.uniform(shortest, longest)))
            heads, batch = chance.choice(self.heads), chance.choice(self.batches)
            keys = length if chance.random() < 0.7 else length + chance.randrange(self.lengths[1])
            keys_heads, kind = chance.choice([heads, 1]), chance.choice(self.kinds)
            if batch * heads * max(length, keys) > self.most:
                continue
            problem = Problem(batch=batch, nhead_q=heads, nhead_k=keys_heads, seqlen_q=length, seqlen_k=keys, **kind)
            if problem.key not in seen:
                seen.add(problem.key)
                count -= 1
                yield problem


HOST = Space(
    kinds=(
        {"dtype": "fp32", "hdim_q": 64},
        {"dtype": "fp32", "hdim_q": 64, "mask": "causal"},
        {"dtype": "fp32", "hdim_q": 128, "mask": "causal"},
        {"dtype": "bf16", "hdim_q": 64, "mask": "causal"},
    ),
    lengths=(8, 1500),
    heads=(1, 2, 4, 8, 12),
    batches=(1, 1, 2, 4),
    most=1 << 17,
    grid=(16, 128, 1024),
    grid_heads=(1, 8),
)
GPU = Space(
    kinds=(
        {"dtype": "bf16", "hdim_q": 64, "mask": "causal"},
        {"dtype": "bf16", "hdim_q": 128, "mask": "causal"},
        {"dtype": "bf16", "hdim_q": 128},
    ),
    lengths=(64, 4096),
    heads=(4, 8, 16, 32),
    batches=(1, 1, 2, 4),
    most=1 << 16,
    grid=(128, 512, 2048),
    grid_heads=(8, 32),
)


@dataclass(frozen=True)
class Times:
    """Times of the sides of a problem in nanoseconds: the lower decile of their blocks.

    ``settled`` is whether two halves of the blocks give the same times of the choices and of the best, within the
    precision.
    """

    sides: Mapping[str, float]
    settled: bool


def measure(sides: Mapping[str, Deployed], needed: Collection[str], options: argparse.Namespace) -> Times:
    """Time sides in rounds of random order until the choices and the best are settled, or until time is up.

    Interference only adds time, so a low quantile of interleaved blocks is what it disturbs least.
    """
    launches, blocks = {}, {name: list[float]() for name in sides}
    for name, side in sides.items():
        side.time(2)
        once = min(side.time(3))
        launches[name] = max(1, min(100, round(BLOCK_SECONDS * 1e9 / max(1, once))))
    order, running = random.Random(0), list(sides)  # noqa: S311 - not for security
    deadline, settled = time.monotonic() + options.seconds, False
    while not settled and time.monotonic() < deadline:
        for _ in range(ROUNDS):
            order.shuffle(running)
            for name in running:
                blocks[name].append(median(sides[name].time(launches[name])))
        best = min(running, key=lambda name: lower_decile(blocks[name]))
        limit = FAR * lower_decile(blocks[best])
        running = [name for name in running if name in needed or lower_decile(blocks[name]) <= limit]
        settled = all(agreed(blocks[name]) <= options.precision for name in {best, *needed} & blocks.keys())
    return Times({name: lower_decile(taken) for name, taken in blocks.items()}, settled)


def lower_decile(values: Sequence[float]) -> float:
    """The value that a tenth of them does not exceed."""
    return sorted(values)[len(values) // 10]


def agreed(values: Sequence[float]) -> float:
    """The share by which the lower deciles of the even and of the odd values differ."""
    even, odd = lower_decile(values[::2]), lower_decile(values[1::2])
    return abs(even - odd) / min(even, odd)


class Bench:
    """The catalogs in which the grid and the problems themselves are tuned, and how to measure."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.catalog, self.itself = (
            Catalog(folder / f"{name}.db", num_threads=options.threads) for name in ("others", "itself")
        )
        self.options = options
        self.against = tuple(filter(None, options.against.split(",")))
        rule = StopRule(precision=0.02, seconds=options.seconds, measured_as=options.measured_as)
        self.how = TuneOptions(options.arch, candidates=options.candidates, rule=rule, against=self.against)

    def tune(self, catalog: Catalog, problems: Sequence[Problem]) -> str:
        """Tune the problems, those again whose times were too noisy; return how many are tuned."""
        for _ in range(TUNINGS):
            report = tune(catalog, problems, self.how)
            if not report.noisy:
                break
        return f"{len(report.recorded)} of {len(problems)} tuned"

    def choices(self, problem: Problem) -> dict[str, str]:
        """The id of what each way to choose takes, by its title."""
        arch = self.options.arch
        [first] = self.catalog.candidates(problem, arch=arch, limit=1, static=True)
        plan = self.catalog.select(problem, arch=arch)
        found = {"static order": first.kernel.id, "others tuned": main_kernel(plan).id}
        if self.against:
            instead = None if plan.instead is None else rival_id(plan.instead.implementation.name)
            found[ALLOWED] = instead or found["others tuned"]
        if self.options.itself:
            self.tune(self.itself, [problem])
            found["itself tuned"] = main_kernel(self.itself.select(problem, arch=arch)).id
        return found

    def sides(self, problem: Problem, needed: Collection[str]) -> Iterator[tuple[str, Deployed]]:
        """The kernels that answer a problem and the rivals that compute it, ready to be timed, if they run."""
        arch, policy = self.options.arch, self.how.rule.policy
        device, inputs = self.catalog.device(arch), draw_inputs(problem)
        outputs = make_outputs(problem, inputs)
        entrants: dict[str, Callable[[], Deployed]] = {}
        for place, candidate in enumerate(self.catalog.candidates(problem, arch=arch, limit=1_000, static=True)):
            if place < self.how.candidates or candidate.kernel.id in needed:
                plan = self.catalog.plan(problem, candidate.kernel)
                entrants[candidate.kernel.id] = partial(deployed, plan, inputs, outputs, policy)
        for one in chosen(problem.operation, self.against):
            if not one.objection(problem, place_of(device)):
                entrants[rival_id(one.name)] = partial(entrant, one, problem, inputs, device, policy)
        for name, ready in entrants.items():
            try:
                yield name, ready()
            except CatalogError as error:
                print(f"{problem.name}: {name}: {error.message}", file=sys.stderr)

    def run(self, problems: Sequence[Problem], done: Callable[[Mapping[str, Any]], None]) -> None:
        """Measure each problem; pass its times and the regrets of the choices to ``done``."""
        device = self.catalog.device(self.options.arch)
        with same_threads(device) if self.against else nullcontext():
            for problem in problems:
                choices = self.choices(problem)
                needed = set(choices.values())
                times = measure(dict(self.sides(problem, needed)), needed, self.options)
                done({"problem": problem.key, **asdict(times), "choices": choices, "regrets": regrets(times, choices)})


def regrets(times: Times, choices: Mapping[str, str]) -> dict[str, float]:
    """The time of each choice over the best of what it may choose from, and of the best kernel over the best of all."""
    ours = min(ns for name, ns in times.sides.items() if not name.startswith(RIVAL))
    best = min(times.sides.values())
    ran = {title: times.sides[name] for title, name in choices.items() if name in times.sides}
    found = {title: ns / (best if title == ALLOWED else ours) for title, ns in ran.items()}
    return {**found, "best kernel, compared with rivals": ours / best} if ALLOWED in choices else found


def line(title: str, found: Sequence[float]) -> str:
    """A line with the geometric mean, the worst, and how many are within 1, 5 and 10 %."""
    mean = math.exp(sum(map(math.log, found)) / len(found))
    within = ", ".join(f"{sum(one <= 1 + share for one in found)} within {share:.0%}" for share in (0.01, 0.05, 0.1))
    worst = f"worst {max(found) - 1:.0%}"
    return f"{title}: {len(found)} problems, regret {mean - 1:.2%} on geometric mean, {worst}; {within}"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="host")
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--candidates", type=int, default=6, help="kernels to time, the first of the static order")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--precision", type=float, default=0.01, help="agreement of two halves of the measurements")
    parser.add_argument("--seconds", type=float, default=2.0, help="time limit of a problem's measurement")
    parser.add_argument("--as", dest="measured_as", choices=("graph", "eager"), default="graph")
    parser.add_argument("--against", default="", help="other projects' implementations, such as sdpa,flash_attn_3")
    parser.add_argument("--itself", action="store_true", help="tune each problem itself, too")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: of the one thread of the host")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None, help="a line of JSON for each problem")
    options = parser.parse_args()
    if options.clock == "cpu":
        if options.threads != 1:
            parser.error("--clock cpu needs --threads 1")
        vars(host)["time"] = SimpleNamespace(perf_counter_ns=time.thread_time_ns)
        setattr(host.HostDevice, "waits", lambda _: {})  # noqa: B010 - it replaces a method
    return options


def main() -> None:
    """Tune the grid, measure the other problems, and print a line for each way to choose."""
    options, started = parsed(), time.monotonic()
    space = HOST if options.arch == "host" else GPU
    if options.against:
        os.environ["CATALOG_ALLOW_FOREIGN"] = "true"
    found: dict[str, list[float]] = {}
    unsettled = 0
    with tempfile.TemporaryDirectory() as folder, (options.json or Path(os.devnull)).open("w") as file:
        bench = Bench(Path(folder), options)
        print(f"grid: {bench.tune(bench.catalog, list(space.tuned()))}, {time.monotonic() - started:.0f} s", flush=True)

        def done(measured: Mapping[str, Any]) -> None:
            nonlocal unsettled
            unsettled += not measured["settled"]
            for title, regret in measured["regrets"].items():
                found.setdefault(title, []).append(regret)
            print(json.dumps(measured), file=file, flush=True)
            sys.stderr.write(".")

        bench.run(list(space.others(options.problems, options.seed)), done)
        bench.catalog.close()
        bench.itself.close()
    for title, its in found.items():
        print(line(title, its))
    how = f"{options.arch}, {options.measured_as}, {options.clock} clock"
    print(f"{unsettled} unsettled; {time.monotonic() - started:.0f} s, {how}")


if __name__ == "__main__":
    main()
