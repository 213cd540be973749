"""Commands that measure and learn from timings: tune, learn, bench, and timings clear."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from catalog.cli import options
from catalog.cli.options import db_path, open_catalog
from catalog.cli.printing import note, print_result, print_rows
from catalog.cli.problem import ProblemCommand, StatedProblem, stated_problem
from catalog.cli.progress import each_timed

if TYPE_CHECKING:
    from catalog.runtime.bench_files import BenchFiles, BenchRun
    from catalog.runtime.bench_shapes import Outcome
    from catalog.runtime.catalog import Catalog
    from catalog.schema.problem import Problem

ShapesOption = Annotated[
    str | None,
    typer.Option("--shapes", metavar="SET", help="Every problem of a set of `catalog shapes`, or of a YAML file."),
]
CandidatesOption = Annotated[
    int, typer.Option(min=1, metavar="N", help="Maximum number of kernels to try per problem, best first.")
]

app = typer.Typer()
timings = typer.Typer(
    name="timings",
    help="The measured times.\n\nExample: catalog timings clear --yes",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(timings)


@app.command(cls=ProblemCommand)
def tune(
    context: typer.Context,
    *,
    arch: options.Arch = "host",
    revision: options.Revision = None,
    shapes: ShapesOption = None,
    misses: Annotated[
        bool, typer.Option("--misses", help="Tune the problems that were selected but never measured.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Tune a trace's problems, those that took the most time first."),
    ] = None,
    candidates: CandidatesOption = 6,
    budget: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="Stop after this time; tune again to continue.")
    ] = None,
    precision: Annotated[
        float,
        typer.Option(min=0, help="Half the width of a median's confidence interval, as a fraction of the median."),
    ] = 0.02,
    jobs: options.Jobs = None,
    scheduler: options.Scheduler = None,
    there: Annotated[
        bool, typer.Option("--there", help="With --scheduler: measure on the devices of its workers, not on this one.")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Repeat previous measurements.")] = False,
    measured_as: options.MeasuredAs = None,
    cold: options.Cold = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Time other projects' implementations in the same runs: sdpa, flash_attn, xformers, ...",
        ),
    ] = None,
    form: options.Format = "table",
) -> None:
    """Time kernels; selection uses the medians from then on.

    Tunes one problem by its options, a set of problems, those that were selected before, or those of a trace. A tuning
    that was stopped continues where it ended. Times that are too noisy are not recorded. With --scheduler kernels are
    compiled elsewhere and timed on this machine. With --there as well, each worker compiles for its own device and
    measures on it, and all timings become rows of this catalog.

    A time counts what --as says: eager, the whole call that a caller waits for, or graph, the device's time alone.
    Timings of one kind never replace the other's, and selection uses those of CATALOG_MEASURED_AS. Other projects'
    implementations are compared with the reference first.

    Exits with 1 if nothing could be recorded.

    Example: catalog tune --batch 1 --nhead-q 8 --seqlen-q 1024 --hdim-q 64 --dtype fp32

    Example: catalog tune --shapes smoke --budget 1200

    Example: catalog tune --trace calls.jsonl

    Example: catalog tune --shapes smoke --as eager --against sdpa
    """
    from catalog.build.cluster import connect
    from catalog.errors import UsageError
    from catalog.runtime.here import resolve_arch
    from catalog.runtime.measure import StopRule
    from catalog.runtime.tune import COLUMNS, TuneOptions
    from catalog.runtime.tune import tune as tune_problems
    from catalog.runtime.tune_there import tune_there

    catalog = open_catalog(context)
    policy, rivals = options.policy(measured_as, cold), options.split_columns(against)
    rule = StopRule(precision=precision, cold=policy.cold, measured_as=policy.measured_as)
    missed = (lambda: catalog.misses(resolve_arch(arch), policy)) if misses else None
    problems = _problems(shapes, missed, trace, stated_problem(context))
    if there and scheduler is None:
        raise UsageError("--there needs the workers of a --scheduler")
    pools = nullcontext() if scheduler is None else connect(scheduler)
    with each_timed("tuning", len(problems)) as (advance, _), pools as pool:
        done = count(1)
        how = TuneOptions(arch, candidates, budget, rule, jobs, pool, again, rivals, revision=revision)
        measure = partial(tune_there, cluster=pool) if pool is not None and there else tune_problems
        report = measure(catalog, list(problems.values()), how, on_done=lambda tuned: advance(next(done), tuned.about))
    names = {problem.key: name for name, problem in problems.items()}
    rows = [[names[tuned.problem.key], *tuned.row] for tuned in report.tuned]
    if there:
        rows = [[tuned.where, *row] for tuned, row in zip(report.tuned, rows, strict=True)]
    print_rows([*(["device"] if there else []), "problem", *COLUMNS], rows, form)
    for tuned in report.tuned:
        for line in tuned.troubles:
            note(f"{names[tuned.problem.key]}: {line}")
    for key, reason in report.unanswered.items():
        note(f"{names[key]}: {reason}")
    note(report.summary)
    raise typer.Exit(report.exit_code)


def _problems(
    shapes: str | None, missed: Callable[[], list[tuple[str, int]]] | None, trace: Path | None, stated: StatedProblem
) -> Mapping[str, Problem]:
    """The problems to tune, by name, from exactly one source; ``missed`` returns the keys of misses."""
    from catalog.errors import UsageError
    from catalog.ops import problem_of_key
    from catalog.runtime.traces import read_trace
    from catalog.schema.shapes import load_shapes

    if (shapes is not None) + (missed is not None) + (trace is not None) + bool(stated) != 1:
        raise UsageError(
            "give exactly one of: the options of a problem, --shapes SET, --misses, --trace FILE",
            hint="For example: catalog tune --shapes smoke",
        )
    if shapes is not None:
        return {shape.name: shape.problem for shape in load_shapes(shapes).shapes}
    if missed is not None:
        problems = [problem_of_key(key) for key, _ in missed()]
    else:
        problems = [stated.problem()] if trace is None else list(read_trace(trace).problems)
    return {problem.name: problem for problem in problems}


@app.command()
def learn(
    context: typer.Context,
    arch: Annotated[str | None, options.arch_option("Learn from timings of this arch only. Default: all.")] = None,
    form: options.Format = "table",
) -> None:
    """Learn from recorded times which kernels are fast.

    Fits a model of kernel time for each kind of problem, and stores it in the catalog. For a problem that was not
    measured, selection uses the times that the model predicts if these choose better than the nearest measured problem
    and the static order do; otherwise it uses the better of those two.

    The columns static, nearest and predicted show how much longer than the best kernel the choices take, in percent:
    the geometric mean over the measured problems, each of which was left out of the evidence for its own choice.

    Exits with 1 if there are too few times to learn from.

    Example: catalog learn
    """
    from catalog.runtime.learning import COLUMNS

    lessons = open_catalog(context).learn(arch)
    print_rows(COLUMNS, [lesson.row for lesson in lessons.lessons], form)
    for kind, reason in lessons.unusable.items():
        note(f"{kind}: {reason}")
    note(lessons.summary)
    raise typer.Exit(lessons.exit_code)


@app.command(cls=ProblemCommand)
def bench(
    context: typer.Context,
    *,
    arch: options.Arch = "host",
    shapes: ShapesOption = None,
    candidates: CandidatesOption = 1,
    runs: Annotated[int, typer.Option(min=1, help="Minimum number of timed launches per kernel.")] = 10,
    measured_as: options.MeasuredAs = None,
    cold: options.Cold = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare with the float64 reference first; do not time wrong kernels.")
    ] = False,
    csv: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="Write one row per problem and kernel, with its traits."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the same rows and their metadata as JSON.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of host kernels. Default: CATALOG_NUM_THREADS, or every core.")
    ] = None,
    jobs: options.Jobs = None,
    form: options.Format = "table",
) -> None:
    """Time the kernels of a problem or of a set.

    The speeds of one problem are shown beside this machine's peaks.

    The peaks of a CPU are measured: fp32 multiply-adds between registers, and sequential reads of memory. The medians
    of a set are recorded for selection. Files are written even if Ctrl-C ends the command.

    Exits with 1 if a kernel is wrong or nothing could be timed, 130 after Ctrl-C.

    Example: catalog bench --batch 1 --nhead-q 8 --seqlen-q 2048 --hdim-q 128 --dtype fp32 --candidates 3

    Example: catalog bench --shapes smoke --csv smoke.csv --verify
    """
    from catalog.errors import UsageError
    from catalog.runtime.bench_files import BenchFiles, BenchRun
    from catalog.runtime.bench_shapes import ONE_PROBLEM, BenchOptions, shape_of
    from catalog.runtime.measure import StopRule
    from catalog.schema.shapes import load_shapes

    files, stated = BenchFiles(csv, json), stated_problem(context)
    if shapes is not None and stated:
        raise UsageError(
            "give either the options of a problem or --shapes SET", hint="For example: catalog bench --shapes smoke"
        )
    asked = (shape_of(stated.problem()),) if shapes is None else load_shapes(shapes).shapes
    catalog = open_catalog(context, num_threads=threads)
    policy = options.policy(measured_as, cold)
    how = BenchOptions(
        arch, candidates, StopRule(least=runs, cold=policy.cold, measured_as=policy.measured_as), verify, jobs
    )
    catalog.spec(arch)  # an unknown arch is reported before a missing device
    run = BenchRun(shapes or ONE_PROBLEM, asked, how, catalog.device_info(arch))
    if shapes is None:
        _bench_problem(catalog, run, files, form)
    else:
        _bench_set(catalog, run, files, form)
    if run.noise_remedy:
        note(f"Too noisy: {run.noise_remedy}")
    raise typer.Exit(run.exit_code)


def _bench_problem(catalog: Catalog, run: BenchRun, files: BenchFiles, form: str) -> None:
    from catalog.runtime.bench import COLUMNS, bench_problem

    def on_done(outcome: Outcome) -> None:
        run.outcomes.append(outcome)
        if not outcome.timed:
            note(outcome.about)

    with files.of(run):
        report = bench_problem(catalog, run.shapes[0].problem, run.options, on_done)
    print_rows(COLUMNS, [benchmark.row for benchmark in report.benchmarks], form)
    note(report.about)


def _bench_set(catalog: Catalog, run: BenchRun, files: BenchFiles, form: str) -> None:
    from catalog.ops import operation_of
    from catalog.runtime.bench_files import columns_of, printed
    from catalog.runtime.bench_shapes import bench_shapes

    with suppress(KeyboardInterrupt), files.of(run), each_timed("timing", len(run.shapes)) as (advance, say):

        def on_done(outcome: Outcome) -> None:
            run.outcomes.append(outcome)
            advance(run.shapes_seen, outcome.about)
            if not outcome.timed:
                say(f"{outcome.shape.name}: {outcome.about}")

        bench_shapes(catalog, run.shapes, run.options, on_done)
    shown = columns_of(operation_of(run.shapes[0].problem)).shown
    print_rows(shown, printed(run.rows, shown), form)
    note(run.summary)


@timings.command("clear")
def drop_timings(
    context: typer.Context,
    where: Annotated[
        str, typer.Option("--where", metavar="EXPR", help="SQL expression: which kernels. Default: all.")
    ] = "",
    foreign: Annotated[
        bool, typer.Option("--foreign", help="Drop imported timings instead; EXPR uses columns of foreign_timings.")
    ] = False,
    yes: options.Yes = False,
    form: options.Format = "table",
) -> None:
    """Drop measured times; libraries are kept.

    To drop libraries, use catalog cache clear.

    Example: catalog timings clear --where "arch='gfx942' AND family='fwd'" --yes
    """
    from catalog.messages import counted
    from catalog.registry.clear import clear_foreign, clear_timings

    path = db_path(context)
    if not yes:
        kernels = "other projects' kernels" if foreign else "kernels"
        typer.confirm(f"Drop the times of {where or 'all ' + kernels} in {path}?", abort=True)
    dropped = (clear_foreign if foreign else clear_timings)(path, where)
    print_result(f"Dropped {counted(dropped, 'timing')}", ["dropped"], [[dropped]], form)
