"""Time the catalog's host kernels, PyTorch's attention and this machine's limits, and compare them with targets.

All sides of a problem take turns in one process, on the same threads; figures are medians. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from report import Row, is_met, print_table, summary
from scenarios import DTYPES, SCENARIOS, Scenario
from sides import Bench
from timing import SGEMM_SIZE, STREAM_BYTES, Pace, interleaved
from turns import Turn

from catalog import Catalog
from catalog.runtime.devices.host.device import host_archs, resolve_host_arch
from catalog.runtime.tolerance import max_error
from catalog.settings import settings

QUICK_RUNS = 3
QUICK_BUDGET_S = 2.0


def measured(name: str, turn: Turn, catalog: Catalog, arch: str, pace: Pace) -> Iterator[Row]:
    """Yield the rows of one turn. Its arrays live until the last row is taken."""
    bench = Bench(catalog, arch)
    sides = {side: make(bench) for side, make in turn.sides.items()}
    seconds, runs = interleaved({side: made.call for side, made in sides.items()}, pace)
    for planned in turn.rows:
        figures = {figure: value(seconds) for figure, value in planned.figures.items()}
        mine = sides[planned.side]
        if planned.answer_of is not None:
            figures["max diff"] = max_error(mine.answer(), sides[planned.answer_of].answer())
        yield Row(name, planned.labels, figures, runs, mine.kernels)


def rows_of(scenario: Scenario, catalog: Catalog, options: argparse.Namespace) -> Iterator[Row]:
    chosen = {axis: tuple(values) for axis in ("seqlen", "hdim", "dtype") if (values := getattr(options, axis))}
    quick = options.quick
    runs = options.runs or (max(QUICK_RUNS, scenario.runs // QUICK_RUNS) if quick else scenario.runs)
    pace = Pace(runs, scenario.burst, QUICK_BUDGET_S if quick else options.seconds)
    skipped = 0
    for turn in scenario.turns({**(scenario.quick if quick else {}), **chosen}):
        if turn.cache_gb > options.max_gb:
            skipped += 1
            continue
        yield from measured(scenario.name, turn, catalog, options.arch, pace)
    if skipped:
        print(f"({skipped} problems left out: K and V exceed --max-gb {options.max_gb:g})")


def parsed() -> argparse.Namespace:
    names = [scenario.name for scenario in SCENARIOS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add(
        "--scenario",
        nargs="+",
        choices=names,
        default=names,
        metavar="NAME",
        help=f"of {', '.join(names)}; default: all",
    )
    add("--seqlen", type=int, nargs="+", help="instead of a scenario's own; of decode: keys; not of varlen, paged")
    add("--hdim", type=int, nargs="+", help="instead of a scenario's own")
    add("--dtype", nargs="+", choices=DTYPES, help="instead of a scenario's own")
    add("--runs", type=int, help="timed runs of each side (default: 7; short: 300)")
    add("--seconds", type=float, default=8.0, help="of one problem; slow ones get fewer runs, at least 3 (default 8)")
    add("--threads", type=int, default=torch.get_num_threads(), help="of each side (default: PyTorch's)")
    add("--arch", choices=host_archs(), default=resolve_host_arch(), help="of our kernels (default: the best here)")
    add("--max-gb", type=float, default=2.0, help="GiB that K and V of decode may take (default 2)")
    add("--quick", action="store_true", help="a few problems of each scenario, few runs: about a minute")
    add("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args()
    if options.threads < 1 or (options.runs is not None and options.runs < 1):
        parser.error("--runs and --threads are at least 1")
    return options


def main() -> None:
    options = parsed()
    torch.set_num_threads(options.threads)
    os.environ["CATALOG_NUM_THREADS"] = str(options.threads)
    settings.cache_clear()
    catalog = Catalog()
    device = catalog.host().device
    print(f"{device.name}, {options.arch}, {device.cores} threads; PyTorch {torch.__version__}")
    print(f"sgemm: its fp32 matrix product of {SGEMM_SIZE}; stream: its fp32 sum of {STREAM_BYTES / 2**30:g} GiB")
    chosen = [scenario for scenario in SCENARIOS if scenario.name in options.scenario]
    results: dict[str, list[Row]] = {}
    for scenario in chosen:
        print(f"\n{scenario.name}: {scenario.title}")
        results[scenario.name] = print_table(scenario.columns, scenario.targets, rows_of(scenario, catalog, options))
    print("\nTargets")
    for scenario in chosen:
        rows = results[scenario.name]
        print(f"{scenario.name}: {sum(is_met(row, scenario.targets) for row in rows)}/{len(rows)} problems met")
        for line in summary(scenario.targets, rows):
            print(f"    {line}")
    if options.json is not None:
        all_rows = [
            asdict(row) | {"met": is_met(row, scenario.targets)}
            for scenario in chosen
            for row in results[scenario.name]
        ]
        figures = {
            "device": asdict(device) | {"arch": options.arch},
            "torch": torch.__version__,
            "threads": options.threads,
            "targets": {scenario.name: list(map(str, scenario.targets)) for scenario in chosen},
            "rows": all_rows,
        }
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
