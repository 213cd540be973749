"""Time bound launches of host kernels alone, after a pause, beside busy processes, and after PyTorch's own work.

The kinds of neighbours take turns in one process, so that changes of the machine meet all of them. The script uses only
what older versions have, too: run it in two checkouts to compare them. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from statistics import median, quantiles

from report import Label, Row, Target, is_met, print_table, summary

from catalog import Catalog, Problem
from catalog.threads import usable_cores

BUSY = "while True: pass"
PAUSE_S = 0.002
SETTLE_S = 0.2
MM_SIZE = 256

PROBLEMS = {
    "tiny": Problem(batch=1, nhead_q=8, seqlen_q=1, seqlen_k=16, hdim_q=64, dtype="fp32"),
    "s64": Problem(batch=1, nhead_q=8, seqlen_q=64, hdim_q=64, dtype="fp32"),
    "s256": Problem(batch=1, nhead_q=8, seqlen_q=256, hdim_q=64, dtype="fp32"),
    "s1024": Problem(batch=1, nhead_q=8, seqlen_q=1024, hdim_q=64, dtype="fp32"),
}
COLUMNS = ("problem", "beside", "least us", "median us", "mean us", "p90 us", "of alone")
TARGETS = [
    Target("median us", "<=", 8.0, {"problem": ("tiny",), "beside": ("nobody",)}),
    Target("of alone", "<=", 2.2, {"problem": ("s256", "s1024")}),
]


@contextmanager
def busy(count: int) -> Iterator[None]:
    """This many processes that compute all the time."""
    command = [sys.executable, "-c", BUSY]
    processes = [subprocess.Popen(command) for _ in range(count)]  # noqa: S603 - our own interpreter
    try:
        time.sleep(SETTLE_S)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@cache
def torch_mm() -> Callable[[], object]:
    """A product of PyTorch's on all its threads, which spin for a while afterwards."""
    import torch

    a, b = torch.randn(2, MM_SIZE, MM_SIZE)
    return lambda: a @ b


NEIGHBOURS: dict[str, tuple[Callable[[int], int], Callable[[], Callable[[], object]]]] = {
    "nobody": (lambda _: 0, lambda: lambda: None),
    "a pause": (lambda _: 0, lambda: lambda: time.sleep(PAUSE_S)),
    "half": (lambda cores: max(1, cores // 2), lambda: lambda: None),
    "all but one": (lambda cores: cores - 1, lambda: lambda: None),
    "torch": (lambda _: 0, torch_mm),
}
"""By name: how many of the cores other processes keep busy, and what happens before each launch, untimed."""


def timed(launch: Callable[[], object], before: Callable[[], object], seconds: float) -> list[float]:
    """Microseconds of each launch within about this many seconds."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 2:
        before()
        start = time.perf_counter()
        launch()
        times.append(1e6 * (time.perf_counter() - start))
    return times


def rows_of(catalog: Catalog, options: argparse.Namespace) -> Iterator[Row]:
    bound = {name: catalog.select(PROBLEMS[name]).bind() for name in options.problem}
    times: dict[tuple[str, str], list[float]] = {(name, beside): [] for name in bound for beside in options.beside}
    for _ in range(options.turns):
        for beside in options.beside:
            busy_of, make = NEIGHBOURS[beside]
            before = make()
            with busy(busy_of(usable_cores())):
                for name, plan in bound.items():
                    times[name, beside] += timed(plan.launch, before, options.seconds)
    for (name, beside), of_launches in times.items():
        figures = {
            "least us": min(of_launches),
            "median us": median(of_launches),
            "mean us": sum(of_launches) / len(of_launches),
            "p90 us": quantiles(of_launches, n=10)[-1],
        }
        if alone := times.get((name, "nobody")):
            figures["of alone"] = figures["median us"] / median(alone)
        labels: dict[str, Label] = {"problem": name, "beside": beside}
        yield Row("neighbours", labels, figures, len(of_launches))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--problem", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--beside", nargs="+", choices=NEIGHBOURS, default=list(NEIGHBOURS))
    parser.add_argument("--threads", type=int, default=0, help="of a launch (default: one per core)")
    parser.add_argument("--with-torch", action="store_true", help="launch on the threads of PyTorch's OpenMP runtime")
    parser.add_argument("--turns", type=int, default=5, help="of each kind of neighbours (default 5)")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each problem in a turn (default 0.3)")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    if options.with_torch:
        torch_mm()  # imports PyTorch, before plans are bound
    catalog = Catalog(num_threads=options.threads)
    device = catalog.host().device
    print(f"{device.name}, {device.arch}, {device.cores} threads on {usable_cores()} cores")
    rows = print_table(COLUMNS, TARGETS, rows_of(catalog, options))
    print(f"\n{sum(is_met(row, TARGETS) for row in rows)}/{len(rows)} rows meet their targets")
    for line in summary(TARGETS, rows):
        print(f"    {line}")


if __name__ == "__main__":
    main()
