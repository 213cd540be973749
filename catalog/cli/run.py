"""Commands that run kernels: select, run, replay."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from catalog.cli import options
from catalog.cli.options import open_catalog
from catalog.cli.printing import note, print_rows
from catalog.cli.problem import ProblemCommand, stated_problem
from catalog.cli.progress import each_timed

if TYPE_CHECKING:
    from catalog.runtime.replay import Replayed

app = typer.Typer()


@app.command(cls=ProblemCommand)
def select(
    context: typer.Context,
    *,
    arch: options.Arch = "host",
    revision: options.Revision = None,
    mask_impl: options.MaskImpl = "generic",
    limit: Annotated[int, typer.Option(min=1, help="At most N candidates of each stage, best first.", metavar="N")] = 1,
    allow: Annotated[
        str | None,
        typer.Option(metavar="foreign", help="foreign: also show another project's implementation that is faster."),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show which measurements decide.")] = False,
    form: options.Format = "table",
) -> None:
    """Show the kernels that answer a problem.

    Shows one kernel per stage, and with --limit the next best ones. The medians are those that selection uses, from
    this problem or from the nearest measured one. If catalog learn found that predicted times choose better,
    these are shown. With frozen choices, only the kernels that they name are shown.

    Example: catalog select --batch 1 --nhead-q 8 --seqlen-q 2048 --hdim-q 128 --mask causal --arch gfx950
    """
    from catalog.errors import UsageError
    from catalog.ops.families import mains
    from catalog.schema.lineage import Wanted
    from catalog.settings import choose, settings

    if allow not in (None, "foreign"):
        raise UsageError(f"--allow {allow} is not allowed", hint="Allowed: foreign.")
    choose(allow_foreign=True if allow else None)
    problem, catalog = stated_problem(context).problem(), open_catalog(context)
    wanted = Wanted(arch, revision, mask_impl).keywords
    plan = catalog.select(problem, **wanted)
    main = mains(problem)
    rows: list[list[Any]]
    if settings().choices is not None:
        rows = [[kernel.family, 1, kernel.name, None, None, kernel.id] for kernel in plan.kernels]
    else:
        rows = [
            [one.kernel.family, place, one.kernel.name, one.median_ms, one.predicted_ms, one.kernel.id]
            for family in (None if kernel.family in main else kernel.family for kernel in plan.kernels)
            for place, one in enumerate(catalog.candidates(problem, **wanted, family=family, limit=limit), start=1)
        ]
    if plan.instead is not None:
        rival = plan.instead.rival
        rows = [[*row[:1], row[1] + (row[0] in main), *row[2:]] for row in rows]
        first = next(place for place, row in enumerate(rows) if row[0] in main)
        rows.insert(first, [rows[first][0], 1, rival.title, rival.median_ms, None, rival.id])
    columns = ["stage", "rank", "name", "median_ms", "predicted_ms", "id"]
    if all(row[4] is None for row in rows):
        columns, rows = columns[:4] + columns[5:], [row[:4] + row[5:] for row in rows]
    print_rows(columns, rows, form)
    if plan.instead is not None:
        note(f"{plan.instead.rival.title} is faster here: its {plan.instead.rival.name} beats the catalog's kernels.")
    if plan.kernels[0].base:
        note(f"Rules and dispatch order are those of {plan.kernels[0].base}, the nearest known revision.")
    if explain:
        note(plan.explain().about)


@app.command(cls=ProblemCommand)
def run(
    context: typer.Context,
    *,
    arch: options.Arch = "host",
    revision: options.Revision = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random inputs.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Number of launches; the time is their median.")] = 5,
    validate: Annotated[bool, typer.Option("--validate", help="Compare with the float64 reference.")] = False,
    form: options.Format = "table",
) -> None:
    """Run the kernel for a problem on random inputs.

    The kernel is selected, and built if it is not in the cache.

    Exits with 1 when --validate finds an error above the tolerance of the dtype.

    Example: catalog run --batch 1 --nhead-q 8 --seqlen-q 512 --hdim-q 64 --dtype fp32 --validate
    """
    from catalog.runtime.validate import run_problem

    problem = stated_problem(context).problem()
    facts, passed = run_problem(
        open_catalog(context),
        problem,
        arch=arch,
        revision=revision,
        seed=seed,
        repeats=repeats,
        validate=validate,
    )
    if form == "table":
        print_rows(["what", "value"], facts.items(), form)
    else:
        print_rows(list(facts), [list(facts.values())], form)
    if not passed:
        raise typer.Exit(1)


@app.command()
def replay(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A trace, written by CATALOG_TRACE or catalog.trace.")],
    arch: Annotated[str | None, options.arch_option("Run on this arch. Default: the recorded one.")] = None,
    bench: Annotated[bool, typer.Option("--bench", help="Time each problem until its median is precise.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare the outputs with the float64 reference.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Launches of each problem, without --bench.")] = 5,
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most N problems, those that took the most time first.", metavar="N")
    ] = None,
    jobs: options.Jobs = None,
    form: options.Format = "table",
) -> None:
    """Run the calls of a trace again.

    Each problem runs once, with the kernels that selection chooses now.

    CATALOG_TRACE=calls.jsonl python train.py writes a trace. Inputs are those stored with it, else seeded random ones.
    Exits with 1 when a problem does not run or is wrong, 130 after Ctrl-C.

    Example: catalog replay calls.jsonl --bench --verify
    """
    from catalog.runtime.measure import StopRule
    from catalog.runtime.replay import COLUMNS, ReplayOptions, exit_code
    from catalog.runtime.replay import replay as replay_calls
    from catalog.runtime.traces import read_trace

    trace = read_trace(file)
    catalog = open_catalog(context)
    how = ReplayOptions(arch, repeats, StopRule() if bench else None, verify, jobs)
    asked = trace.used[:limit]
    done: list[Replayed] = []
    with suppress(KeyboardInterrupt), each_timed("replaying", len(asked)) as (advance, say):

        def on_done(replayed: Replayed) -> None:
            done.append(replayed)
            advance(len(done), replayed.about)
            if not replayed.passed:
                say(f"{replayed.used.name}: {replayed.about}")

        replay_calls(catalog, asked, how, on_done)
    print_rows(COLUMNS, [replayed.row for replayed in done], form)
    note(trace.about)
    raise typer.Exit(exit_code(asked, done))
