"""``catalog replay``: the calls of a trace again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from catalog.cli.options import Jobs
from catalog.cli.printing import FormatOption, print_rows
from catalog.cli.progress import each_timed
from catalog.errors import INTERRUPTED

if TYPE_CHECKING:
    from catalog.runtime.replay import Replayed


def replay(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A trace: what CATALOG_TRACE or catalog.trace wrote.")],
    arch: Annotated[
        str | None, typer.Option("--arch", help="Run on this arch; host is this machine's CPU. Default: as recorded.")
    ] = None,
    bench: Annotated[bool, typer.Option("--bench", help="Time each until its median is known.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare the outputs with the float64 reference.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Launches of each problem, without --bench.")] = 5,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many problems, most time first.")] = None,
    jobs: Jobs = None,
    form: FormatOption = "table",
) -> None:
    """Run the calls of a trace again.

    Each problem runs once, with the kernels that selection takes now.

    CATALOG_TRACE=calls.jsonl python train.py writes one. Inputs are those that it kept, else seeded ones. Exits with 1
    when a problem does not run or is wrong, 130 after Ctrl-C.

    Example: catalog replay calls.jsonl --bench --verify
    """
    from catalog.runtime.catalog import Catalog
    from catalog.runtime.measure import StopRule
    from catalog.runtime.replay import COLUMNS, ReplayOptions
    from catalog.runtime.replay import replay as replay_calls
    from catalog.runtime.traces import read_trace
    from catalog.settings import settings

    trace = read_trace(file)
    catalog = Catalog(context.find_root().params["db"] or settings().db)
    options = ReplayOptions(arch, repeats, StopRule() if bench else None, verify, jobs)
    asked, interrupted = trace.used[:limit], False
    done: list[Replayed] = []
    try:
        with each_timed("replaying", len(asked)) as (advance, say):

            def on_done(replayed: Replayed) -> None:
                done.append(replayed)
                advance(len(done), replayed.about)
                if not replayed.passed:
                    say(f"{replayed.used.name}: {replayed.about}")

            replay_calls(catalog, asked, options, on_done)
    except KeyboardInterrupt:
        interrupted = True
    print_rows(COLUMNS, [replayed.row for replayed in done], form)
    print(trace.about, file=sys.stderr)
    if interrupted or not all(replayed.passed for replayed in done):
        raise typer.Exit(INTERRUPTED if interrupted else 1)
