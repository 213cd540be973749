"""``catalog tune``: time kernels against each other, and let selection go by what came of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from catalog.cli.options import ArchOption, Jobs
from catalog.cli.printing import FormatOption, print_rows
from catalog.cli.problem import with_problem
from catalog.cli.progress import each_timed
from catalog.messages import counted

if TYPE_CHECKING:
    from catalog.build.pools import Pool
    from catalog.runtime.catalog import Catalog
    from catalog.runtime.tune import Tuned, TuneReport
    from catalog.schema.problem import Problem


@with_problem
def tune(
    context: typer.Context,
    *,
    arch: ArchOption = "host",
    shapes: Annotated[
        str | None, typer.Option("--shapes", metavar="SET", help="Tune a set: smoke, full, nightly, or a YAML file.")
    ] = None,
    misses: Annotated[bool, typer.Option("--misses", help="Tune what was asked for and never measured.")] = False,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Tune what a trace has calls of, most time first.")
    ] = None,
    candidates: Annotated[int, typer.Option(min=1, help="Kernels of a problem at the most.")] = 6,
    budget: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="Stop after so long; tune again to go on.")
    ] = None,
    precision: Annotated[
        float, typer.Option(min=0, help="Half the width of the medians' confidence intervals, as a part of them.")
    ] = 0.02,
    jobs: Jobs = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Compile on the workers of this Dask scheduler; times are of this machine."
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure also what was measured before.")] = False,
    form: FormatOption = "table",
    fields: dict[str, Any],
) -> None:
    """Time kernels, and select by the medians from then on.

    One problem by its options, a set of them, those that were asked for before, or those of a trace. A tuning
    that was stopped goes on where it was. Times that are too noisy are not recorded.

    Exits with 1 when nothing could be recorded.

    Example: catalog tune --batch 1 --nhead-q 8 --seqlen-q 1024 --hdim-q 64 --dtype fp32

    Example: catalog tune --shapes smoke --budget 1200

    Example: catalog tune --trace calls.jsonl
    """
    from catalog.runtime.catalog import Catalog
    from catalog.runtime.measure import StopRule
    from catalog.runtime.tune import TuneOptions
    from catalog.runtime.tune import tune as tune_problems
    from catalog.settings import settings

    catalog = Catalog(context.find_root().params["db"] or settings().db)
    problems = _problems(catalog, arch, shapes, misses, trace, fields)
    with each_timed("tuning", len(problems)) as (advance, _), _pool(scheduler) as pool:
        done = count(1)
        options = TuneOptions(arch, candidates, budget, StopRule(precision=precision), jobs, pool, again)
        report = tune_problems(
            catalog, list(problems.values()), options, lambda tuned: advance(next(done), _about(tuned))
        )
    names = {problem.key: name for name, problem in problems.items()}
    columns = ["problem", "best", "median_ms", "tflops", "gain", "confidence", "kernels", "failed", "id"]
    print_rows(columns, [[names[tuned.problem.key], *_row(tuned)] for tuned in report.tuned], form)
    for tuned in report.tuned:
        for line in _troubles(tuned):
            print(f"{names[tuned.problem.key]}: {line}", file=sys.stderr)
    for key, reason in report.unanswered.items():
        print(f"{names[key]}: {reason}", file=sys.stderr)
    print(_summary(report), file=sys.stderr)
    if (report.tuned or report.unanswered) and not report.recorded:
        raise typer.Exit(1)


def _pool(scheduler: str | None) -> AbstractContextManager[Pool | None]:
    if scheduler is None:
        return nullcontext()
    from catalog.build.cluster import connect

    return connect(scheduler)


def _problems(
    catalog: Catalog, arch: str, shapes: str | None, misses: bool, trace: Path | None, fields: dict[str, Any]
) -> dict[str, Problem]:
    """What is to be tuned, by name."""
    from catalog.errors import UsageError
    from catalog.ops import problem_of, problem_of_key
    from catalog.runtime.devices.here import resolve_arch

    if (shapes is not None) + misses + (trace is not None) + bool(fields) != 1:
        raise UsageError(
            "what to tune is one of: a problem by its options, --shapes SET, --misses, --trace FILE",
            hint="As in: catalog tune --shapes smoke",
        )
    if shapes is not None:
        from catalog.schema.shapes import load_shapes

        return {shape.name: shape.problem for shape in load_shapes(shapes).shapes}
    if misses:
        asked = [problem_of_key(key) for key, _ in catalog.misses(resolve_arch(arch))]
        return {problem.name: problem for problem in asked}
    if trace is not None:
        from catalog.runtime.traces import read_trace

        return {problem.name: problem for problem in read_trace(trace).problems}
    problem = problem_of(fields)
    return {problem.name: problem}


def _summary(report: TuneReport) -> str:
    gain = (
        ""
        if report.gain is None
        else (
            f"the best kernels are {report.gain:.3f} times as fast as the first of the static order (geometric mean); "
        )
    )
    return (
        f"{counted(len(report.recorded), 'problem')} tuned; {gain}{len(report.noisy):,} too noisy, "
        f"{len(report.failed):,} with no kernel that runs, {len(report.left):,} left, "
        f"{len(report.unanswered):,} without a kernel."
    )


def _about(tuned: Tuned) -> str:
    """The result of a problem in one line."""
    if tuned.best is None:
        return _confidence(tuned)
    kernel_id, median_ms = tuned.best
    return f"{median_ms:.3f} ms, {tuned.kernels[kernel_id].name}"


def _confidence(tuned: Tuned) -> str:
    if tuned.verdict is not None:
        return tuned.verdict.about
    return "measured before" if tuned.known else "every kernel failed"


def _troubles(tuned: Tuned) -> Iterator[str]:
    """A line for each kernel without times, and one for a problem without any."""
    from catalog.runtime.measure import remedy

    for kernel_id, reason in tuned.failures.items():
        first, *_ = reason.splitlines()
        name = tuned.kernels[kernel_id].name
        yield first if name in first else f"{name}: {first}"
    if tuned.best is None and tuned.verdict is not None:
        yield f"nothing is recorded: {remedy(tuned.verdict.disturbance)}"


def _row(tuned: Tuned) -> list[Any]:
    """The values of a row after the problem's name."""
    timed: list[Any] = [None] * 4
    kernel_id = None
    if tuned.best is not None:
        kernel_id, median_ms = tuned.best
        timed = [
            tuned.kernels[kernel_id].name,
            round(median_ms, 5),
            round(tuned.problem.flops / median_ms / 1e9, 4),
            None if tuned.gain is None else round(tuned.gain, 3),
        ]
    failed = len(tuned.failures)
    return [*timed, _confidence(tuned), len(tuned.kernels) - failed, failed, kernel_id]
