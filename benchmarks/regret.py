"""Regret of selection on problems that were not measured: the time of its choice over that of the best kernel.

Two sets of problems are drawn at random, from a seed, and the kernels of each are timed once. The times of the first
set are what selection knows; it chooses for the problems of the second. Compared are the static order, the nearest
known problem, what ``catalog learn`` makes of the known ones, and the last if selection may answer with other projects'
implementations. The measurements are lines of JSON, which can be evaluated again later, on any machine.

    python benchmarks/regret.py --json FILE [--arch sm_90] [--operation gemm] [--against sdpa] [--clock cpu]
    python benchmarks/regret.py --from FILE
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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from drawn_problems import SPACES, drawn

from catalog import Catalog
from catalog.backends import backend_of, why_unavailable
from catalog.errors import CatalogError
from catalog.foreign.installed import chosen
from catalog.ops import problem_of_key
from catalog.registry import foreign
from catalog.registry.foreign import Rival, rival_id, rival_timing
from catalog.registry.timings import Timing, record
from catalog.runtime.against import entrant, place_of, title_of
from catalog.runtime.deployed import Deployed, deployed
from catalog.runtime.devices import DeviceInfo
from catalog.runtime.devices.host import device as host
from catalog.runtime.inputs import draw_inputs
from catalog.runtime.measure import summarise
from catalog.runtime.select import Choice
from catalog.runtime.tensors import make_outputs
from catalog.runtime.torch_copies import same_threads
from catalog.schema.kernel import Kernel
from catalog.schema.policy import Policy
from catalog.schema.problem import Problem as AnyProblem

BLOCK_SECONDS = 0.0005
"""Duration of a block of launches, if one launch does not take longer. A block's time is the median of its launches."""

ROUNDS = 12
"""Number of rounds between two looks at the times."""

FAR = 1.1
"""Sides slower than this multiple of the best are dropped."""

CLOSE = 1.03
"""Sides up to this multiple of the best must be settled."""

RIVAL = rival_id("")
"""What the ids of other projects' implementations begin with."""

Line = Mapping[str, Any]


def measure(sides: Mapping[str, Deployed], seconds: float, precision: float) -> tuple[dict[str, float], bool]:
    """The times of the sides in nanoseconds, and whether they are settled.

    The sides run in rounds of random order until two halves of the blocks agree about all that are close to the best,
    or until time is up. A time is the lower decile of the blocks: interference only adds time, and disturbs a low
    quantile of interleaved blocks least.
    """
    launches, blocks = {}, {name: list[float]() for name in sides}
    for name, side in sides.items():
        side.time(2)
        once = min(side.time(3))
        launches[name] = max(1, min(100, round(BLOCK_SECONDS * 1e9 / max(1, once))))
    order, running = random.Random(0), list(sides)  # noqa: S311 - not for security
    deadline, settled = time.monotonic() + seconds, False
    while not settled and time.monotonic() < deadline:
        for _ in range(ROUNDS):
            order.shuffle(running)
            for name in running:
                blocks[name].append(median(sides[name].time(launches[name])))
        best = min(lower_decile(blocks[name]) for name in running)
        running = [name for name in running if lower_decile(blocks[name]) <= FAR * best]
        close = [name for name in running if lower_decile(blocks[name]) <= CLOSE * best]
        settled = all(agreed(blocks[name]) <= precision for name in close)
    return {name: lower_decile(taken) for name, taken in blocks.items()}, settled


def lower_decile(values: Sequence[float]) -> float:
    """The value that a tenth of them does not exceed."""
    return sorted(values)[len(values) // 10]


def agreed(values: Sequence[float]) -> float:
    """The share by which the lower deciles of the even and of the odd values differ."""
    even, odd = lower_decile(values[::2]), lower_decile(values[1::2])
    return abs(even - odd) / min(even, odd)


class Bench:
    """Times the kernels of drawn problems."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.catalog = Catalog(folder / "bench.db", num_threads=options.threads)
        self.options = options
        self.policy = Policy(options.measured_as)
        self.against = tuple(filter(None, options.against.split(",")))

    def sides(self, problem: AnyProblem) -> Iterator[tuple[str, Deployed]]:
        """The kernels that answer a problem and the rivals that compute it, ready to be timed, if they run."""
        arch, device = self.options.arch, self.catalog.device(self.options.arch)
        inputs, outputs = self.tensors(problem)
        entrants: dict[str, Callable[[], Deployed]] = {}
        found = self.catalog.candidates(problem, arch=arch, limit=self.options.candidates, static=True)
        for kernel in (candidate.kernel for candidate in found):
            plan = self.catalog.plan(problem, kernel)
            entrants[kernel.id] = partial(deployed, plan, inputs, outputs, self.policy)
        for one in chosen(problem.operation, self.against):
            if not one.objection(problem, place_of(device)):
                entrants[rival_id(one.name)] = partial(entrant, one, problem, inputs, device, self.policy)
        for name, ready in entrants.items():
            try:
                yield name, ready()
            except CatalogError as error:
                print(f"{problem.name}: {name}: {error.message}", file=sys.stderr)

    def tensors(self, problem: AnyProblem) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Inputs and outputs; on a GPU they are drawn there, unless rivals need arrays."""
        if self.options.arch == "host" or self.against:
            inputs = draw_inputs(problem)
            return inputs, make_outputs(problem, inputs)
        torch = import_module("torch")

        def drawn_there(names: Iterable[str]) -> dict[str, Any]:
            of = {name: getattr(torch, problem.tensors[name].element) for name in names}
            return {name: torch.randn(problem.shapes[name], device="cuda").to(of[name]) for name in of}

        return drawn_there(problem.needed), drawn_there(problem.made)

    def build(self, problems: Sequence[AnyProblem]) -> None:
        """Compile all kernels before anything is timed."""
        kernels: dict[str, Kernel] = {}
        for problem in problems:
            found = self.catalog.candidates(problem, arch=self.options.arch, limit=self.options.candidates, static=True)
            stages = (self.catalog.plan(problem, candidate.kernel).kernels for candidate in found)
            kernels |= {kernel.id: kernel for of in stages for kernel in of}
        self.catalog.builder.build_many(kernels.values())

    def run(self, done: Callable[[Line], None]) -> None:
        """Measure each problem, and pass what was measured to ``done``; stop when the time is up."""
        options = self.options
        space = SPACES[options.operation, "host" if options.arch == "host" else "gpu"]
        known, new = (list(drawn(space, n, options.seed + i)) for i, n in enumerate((options.known, options.problems)))
        self.build([*known, *new])
        info, device = self.catalog.device_info(options.arch), self.catalog.device(options.arch)
        titles = {one.name: title_of(one) for one in chosen(options.operation, self.against)}
        machine = {"arch": info.arch, "device": info.name, "cores": info.cores, "as": options.measured_as}
        until = time.monotonic() + options.budget
        with same_threads(device) if self.against else nullcontext():
            # Alternately, so that a run that ends early has problems of both sets.
            turns = [
                (turn / len(of), name, each)
                for name, of in (("known", known), ("new", new))
                for turn, each in enumerate(of)
            ]
            for _, name, problem in sorted(turns, key=lambda turn: turn[:2]):
                if time.monotonic() > until:
                    break
                sides, settled = measure(dict(self.sides(problem)), options.seconds, options.precision)
                done(
                    {
                        "set": name,
                        "problem": problem.key,
                        **machine,
                        "sides": sides,
                        "settled": settled,
                        "titles": titles,
                    }
                )


class Evaluation:
    """What selection chooses for new problems when it knows others, from the lines of a run."""

    def __init__(self, folder: Path, lines: Sequence[Line]) -> None:
        self.known = [line for line in lines if line["set"] == "known"]
        self.new = [line for line in lines if line["set"] == "new"]
        self.arch, cores = lines[0]["arch"], lines[0]["cores"]
        self.catalog = Catalog(folder / "evaluation.db", num_threads=min(cores, os.cpu_count() or 1))
        self.device = DeviceInfo(self.arch, lines[0]["device"], cores)
        if why_unavailable(self.arch) is None:
            self.device = self.catalog.device_info(self.arch)
        self.policy = Policy(lines[0]["as"])

    def record(self) -> None:
        """Record the known times, as a tuning would."""
        self.catalog.populate(self.arch, operation=problem_of_key(self.known[0]["problem"]).operation)
        for line in self.known:
            problem = problem_of_key(line["problem"])
            sides = {name: summarise([ns] * 9) for name, ns in line["sides"].items()}
            ours = {name: one for name, one in sides.items() if not name.startswith(RIVAL)}
            with self.catalog.writing() as connection:
                connection.executemany(
                    "INSERT OR IGNORE INTO artifact (key, kernel_id, arch, toolchain, isa, flags, status, log, "
                    "compile_s, created) VALUES (:name, :name, :arch, '', '', '', 'built', '', 0, '')",
                    [{"name": name, "arch": self.arch} for name in ours],
                )
                record(connection, problem, self.device, [Timing(name, name, one) for name, one in ours.items()])
                rivals = {name.removeprefix(RIVAL): one for name, one in sides.items() if name not in ours}
                foreign.record(
                    connection,
                    [
                        rival_timing(
                            Rival(name, line["titles"].get(name, name), "", one.median_ms), problem, self.device, one
                        )
                        for name, one in rivals.items()
                    ],
                )
        self.catalog.forget()

    def choices(self, allowed: bool) -> Iterator[str]:
        """The id of what selection takes for each new problem; ``allowed``: perhaps a rival."""
        as_good = 1 + backend_of(self.arch).noise
        for line in self.new:
            choice = self.catalog.choice(problem_of_key(line["problem"]), arch=self.arch, limit=1)
            yield (_rival(choice, as_good) if allowed else "") or choice.candidates[0].kernel.id

    def run(self) -> dict[str, list[float]]:
        """The regrets of each way to choose, by its title."""
        static = [
            self.catalog.candidates(problem_of_key(line["problem"]), arch=self.arch, limit=1, static=True)[0].kernel.id
            for line in self.new
        ]
        self.record()
        chosen_by = {"static order": static, "nearest known problem": list(self.choices(False))}
        lessons = self.catalog.learn(self.arch)
        chosen_by["learned"] = list(self.choices(False))
        for lesson in lessons.lessons:
            print("   ", *lesson.row)
        print(f"known: {len(self.known)} problems; {lessons.summary}")
        found = {title: self.regrets(choices, rivals=False) for title, choices in chosen_by.items()}
        if any(name.startswith(RIVAL) for line in self.new for name in line["sides"]):
            found["learned, rivals allowed"] = self.regrets(list(self.choices(True)), rivals=True)
            best = [min(_ours(line).values()) / min(line["sides"].values()) for line in self.new]
            found["best kernel, compared with rivals"] = best
        evidence = Counter(
            self.catalog.choice(problem_of_key(line["problem"]), arch=self.arch).evidence for line in self.new
        )
        print(f"new: {', '.join(f'{count} {word}' for word, count in evidence.most_common())}")
        return found

    def regrets(self, choices: Sequence[str], *, rivals: bool) -> list[float]:
        """The time of each choice over the best of what it may choose from, where the choice was measured."""
        return [
            line["sides"][name] / min((line["sides"] if rivals else _ours(line)).values())
            for line, name in zip(self.new, choices, strict=True)
            if name in line["sides"]
        ]


def _ours(line: Line) -> dict[str, float]:
    return {name: ns for name, ns in line["sides"].items() if not name.startswith(RIVAL)}


def _rival(choice: Choice, as_good: float) -> str:
    """The id of the rival that beats our kernels by more than noise; empty if none does."""
    beaten = choice.compared_ms
    faster = [rival for rival in choice.rivals if beaten is not None and rival.median_ms * as_good < beaten]
    return faster[0].id if faster else ""


def row(title: str, found: Sequence[float]) -> str:
    """A line with the geometric mean, the worst, and how many are within 1, 5 and 10 %."""
    mean = math.exp(sum(map(math.log, found)) / len(found))
    within = ", ".join(f"{sum(one <= 1 + share for one in found)} within {share:.0%}" for share in (0.01, 0.05, 0.1))
    return (
        f"{title}: {len(found)} problems, regret {mean - 1:.2%} on geometric mean ({1 / mean:.1%} of the best), "
        f"worst {max(found) - 1:.0%} ({1 / max(found):.0%}); {within}"
    )


def plot(path: Path, found: Mapping[str, Sequence[float]]) -> None:
    """Write a figure: for each way to choose, the speed of its choices as a share of the best kernel's, sorted."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.hashsalt": "regret", "svg.fonttype": "none", "font.size": 9}):
        figure, axes = pyplot.subplots(figsize=(6.4, 3.2), layout="constrained")
        for title, regrets in found.items():
            shares = sorted((1 / regret for regret in regrets), reverse=True)
            mean = math.exp(sum(map(math.log, shares)) / len(shares))
            axes.step(range(1, len(shares) + 1), shares, where="mid", label=f"{title}: {mean:.1%}")
        axes.set(
            xlabel="problems that were not measured, sorted",
            ylabel="speed of the choice, as a share of the best's",
            ylim=(0, 1.02),
        )
        axes.legend(loc="lower left", frameon=False)
        axes.grid(alpha=0.3)
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="host")
    parser.add_argument("--operation", default="attention", choices=("attention", "conv", "gemm"))
    parser.add_argument("--known", type=int, default=100, help="number of problems that selection knows")
    parser.add_argument("--problems", type=int, default=100, help="number of new problems")
    parser.add_argument("--candidates", type=int, default=6, help="kernels to time, the first of the static order")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--precision", type=float, default=0.01, help="agreement of two halves of the measurements")
    parser.add_argument("--seconds", type=float, default=2.0, help="time limit of a problem's measurement")
    parser.add_argument("--budget", type=float, default=math.inf, help="time limit of all measurements, in seconds")
    parser.add_argument("--as", dest="measured_as", choices=("graph", "eager"), default="graph")
    parser.add_argument("--against", default="", help="other projects' implementations, such as sdpa,flash_attn_3")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: of the one thread of the host")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=Path(os.devnull), help="file for the measurements")
    parser.add_argument("--from", dest="source", type=Path, help="evaluate these measurements, and measure nothing")
    parser.add_argument("--plot", type=Path, help="write a figure, an SVG file; needs the extra report")
    options = parser.parse_args()
    if options.operation == "conv" and options.arch != "host":
        parser.error("--operation conv has kernels to measure on the host only")
    if options.clock == "cpu":
        if options.threads != 1:
            parser.error("--clock cpu needs --threads 1")
        vars(host)["time"] = SimpleNamespace(perf_counter_ns=time.thread_time_ns)
        setattr(host.HostDevice, "waits", lambda _: {})  # noqa: B010 - it replaces a method
    return options


def main() -> None:
    """Measure both sets, unless they were measured before, and print a line for each way to choose."""
    options, started = parsed(), time.monotonic()
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as folder:
        if options.source is not None:
            lines = [json.loads(text) for text in options.source.read_text().splitlines()]
        else:
            with options.json.open("w") as file:
                bench = Bench(Path(folder), options)

                def done(measured: Line) -> None:
                    lines.append(measured)
                    print(json.dumps(measured), file=file, flush=True)
                    sys.stderr.write(".")

                bench.run(done)
                bench.catalog.close()
        evaluation = Evaluation(Path(folder), lines)
        regrets = evaluation.run()
        for title, found in regrets.items():
            print(row(title, found))
        if options.plot is not None:
            plot(options.plot, regrets)
        evaluation.catalog.close()
    unsettled = sum(not line["settled"] for line in lines)
    print(f"{unsettled} of {len(lines)} unsettled; {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
