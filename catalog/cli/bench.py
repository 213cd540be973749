"""``catalog bench``: how fast kernels are, on one problem or on every problem of a set."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from catalog.cli.options import ArchOption, Jobs
from catalog.cli.printing import FormatOption, print_rows
from catalog.cli.problem import with_problem
from catalog.cli.progress import each_timed

if TYPE_CHECKING:
    from catalog.runtime.bench_files import BenchFiles, BenchRun
    from catalog.runtime.bench_shapes import Outcome
    from catalog.runtime.catalog import Catalog


@with_problem
def bench(
    context: typer.Context,
    *,
    arch: ArchOption = "host",
    shapes: Annotated[
        str | None,
        typer.Option("--shapes", metavar="SET", help="Every problem of a set: smoke, full, nightly, or a YAML file."),
    ] = None,
    candidates: Annotated[int, typer.Option(min=1, help="How many applicable kernels to time, best first.")] = 1,
    runs: Annotated[int, typer.Option(min=1, help="Minimum number of timed launches of each.")] = 10,
    cold: Annotated[bool, typer.Option("--cold", help="Empty the caches before every launch.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare with the float64 reference first; time no kernel that is wrong.")
    ] = False,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write a row a problem and kernel, with its traits.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the same rows, and what they are of, as JSON.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: CATALOG_NUM_THREADS, or every core.")] = None,
    jobs: Jobs = None,
    form: FormatOption = "table",
    fields: dict[str, Any],
) -> None:
    """Time the kernels of a problem or of a set.

    The speeds of one problem are shown beside this machine's peaks.

    The peaks of a CPU are measured: fp32 multiply-adds between registers, and reads of memory in order. The
    medians of a set are recorded for selection. Files are also written when Ctrl-C ends the command.

    Exits with 1 when a kernel is wrong or nothing could be timed, 130 after Ctrl-C.

    Example: catalog bench --batch 1 --nhead-q 8 --seqlen-q 2048 --hdim-q 128 --dtype fp32 --candidates 3

    Example: catalog bench --shapes smoke --csv smoke.csv --verify
    """
    from catalog.errors import UsageError
    from catalog.ops.attention.problem import Problem
    from catalog.runtime.bench_files import BenchFiles, BenchRun
    from catalog.runtime.bench_shapes import ONE_PROBLEM, BenchOptions, shape_of
    from catalog.runtime.catalog import Catalog
    from catalog.runtime.measure import StopRule
    from catalog.schema.shapes import load_shapes
    from catalog.settings import settings

    files = BenchFiles(csv, json)
    if shapes is not None and fields:
        raise UsageError(
            "what to time is one of: a problem by its options, --shapes SET", hint="As in: catalog bench --shapes smoke"
        )
    asked = (shape_of(Problem(**fields)),) if shapes is None else load_shapes(shapes).shapes
    catalog = Catalog(context.find_root().params["db"] or settings().db, num_threads=threads)
    options = BenchOptions(arch, candidates, StopRule(least=runs, cold=cold), verify, jobs)
    catalog.spec(arch)  # a wrong one is told before a device is looked for
    run = BenchRun(shapes or ONE_PROBLEM, asked, options, catalog.device_info(arch))
    if shapes is None:
        _bench_problem(catalog, run, files, form)
    else:
        _bench_set(catalog, run, files, form)
    if run.exit_code:
        raise typer.Exit(run.exit_code)


def _bench_problem(catalog: Catalog, run: BenchRun, files: BenchFiles, form: str) -> None:
    from catalog.runtime.bench import COLUMNS, bench_problem

    def on_done(outcome: Outcome) -> None:
        run.outcomes.append(outcome)
        if not outcome.timed:
            print(outcome.about, file=sys.stderr)

    with files.of(run):
        report = bench_problem(catalog, run.shapes[0].problem, run.options, on_done)
    print_rows(COLUMNS, [benchmark.row for benchmark in report.benchmarks], form)
    print(report.about, file=sys.stderr)
    _warn_of_noise(run)


def _bench_set(catalog: Catalog, run: BenchRun, files: BenchFiles, form: str) -> None:
    from catalog.runtime.bench_files import SHOWN, printed
    from catalog.runtime.bench_shapes import bench_shapes

    with suppress(KeyboardInterrupt), files.of(run), each_timed("timing", len(run.shapes)) as (advance, say):

        def on_done(outcome: Outcome) -> None:
            run.outcomes.append(outcome)
            advance(run.shapes_seen, outcome.about)
            if not outcome.timed:
                say(f"{outcome.shape.name}: {outcome.about}")

        bench_shapes(catalog, run.shapes, run.options, on_done)
    print_rows(SHOWN, printed(run.rows, SHOWN), form)
    print(run.summary, file=sys.stderr)
    _warn_of_noise(run)


def _warn_of_noise(run: BenchRun) -> None:
    from catalog.runtime.measure import remedy

    worst = max((noisy.measurement.disturbance for noisy in run.noisy if noisy.measurement), default=None)
    if worst is not None:
        print(f"Too noisy: {remedy(worst)}", file=sys.stderr)
