"""Commands that create kernels: populate, build, fallback."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from catalog.cli import cache, options
from catalog.cli.demand import DemandCommand, stated_demand
from catalog.cli.options import open_catalog
from catalog.cli.printing import note, print_result, print_rows
from catalog.cli.progress import each_built, fraction_done

if TYPE_CHECKING:
    from catalog.build.builder import Artifact
    from catalog.build.pools import Pool
    from catalog.runtime.catalog import Catalog
    from catalog.schema.kernel import Kernel

app = typer.Typer()
app.add_typer(cache.app)


@app.command()
def populate(
    context: typer.Context,
    *,
    named: Annotated[
        str | None, typer.Argument(metavar="[OPERATION]", help="What the kernels compute. Default: attention.")
    ] = None,
    arch: options.Arch,
    revision: options.Revision = None,
    mask_impl: options.MaskImpl = "generic",
    receipt: Annotated[
        list[str] | None,
        typer.Option("--receipt", "--rule-set", help="Only the kernels of this receipt or rule set; may be repeated."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Populate even if nothing has changed.")] = False,
    space: Annotated[
        str | None,
        typer.Option(
            help="ck: upstream's codegen; rules, exhaustive: the dispatcher's sweeps; GEMM: tile_engine, dispatcher."
        ),
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option(
            help="Only the kernels that this sweep file lists; may be repeated. GEMM: the axes of this configuration."
        ),
    ] = None,
    family: Annotated[list[str] | None, typer.Option(help="Only kernels of this family; may be repeated.")] = None,
    where: Annotated[str, typer.Option(metavar="EXPR", help="Only kernels that meet this SQL expression.")] = "",
    filter_file: Annotated[
        Path | None, typer.Option(help="Only kernels that filter_config(c) of this Python file keeps.")
    ] = None,
    operation: options.Operation = None,
    ck_root: Annotated[
        Path | None, typer.Option(help="Adopt this CK checkout: the kernels that its own generator lists.")
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="With --ck-root: name of the new revision. Default: ck- and the git commit.")
    ] = None,
    timeout: options.GeneratorTimeout = 600.0,
    form: options.Format = "table",
) -> None:
    """Add every valid kernel of an arch to the catalog.

    With --ck-root, adds the kernels that the generator of that checkout lists, as a revision of their own. Nothing is
    written into the checkout.

    Example: catalog populate --arch gfx950

    Example: catalog populate gemm --arch gfx950 --revision 2025-11

    Example: catalog populate --arch gfx942 --ck-root ~/composable_kernel --label my-ck

    Example: catalog populate gemm --arch gfx942 --ck-root ~/composable_kernel
    """
    from catalog.errors import UsageError
    from catalog.messages import counted
    from catalog.ops import DEFAULT
    from catalog.ops import operation as find_operation
    from catalog.rules.adopt import Adopted
    from catalog.rules.populate import count_by_family
    from catalog.rules.receipts import resolve_receipts
    from catalog.rules.restriction import restriction

    catalog = open_catalog(context)
    if named and operation and named != operation:
        raise UsageError(f"{named} and --operation {operation} contradict each other", hint="State one of them.")
    of = named or operation or DEFAULT
    spec = catalog.spec(arch, revision, space, operation=of)
    restricted = restriction(spec, tuple(config or ()), where, filter_file, tuple(family or ()))
    numbers = (
        # A checkout may have other receipts than the spec; it is asked for them later.
        (int(text),) if ck_root is not None and text.isdecimal() else resolve_receipts(spec, text)
        for text in receipt or ()
    )
    receipts = tuple(dict.fromkeys(chain.from_iterable(numbers)))
    with fraction_done(f"{spec.arch} {spec.space if ck_root is None else ck_root}") as on_progress:
        done = catalog.populate(
            arch,
            revision=revision,
            mask_impl=mask_impl,
            receipts=receipts,
            force=force,
            space=space,
            restriction=restricted,
            on_progress=on_progress,
            operation=of,
            ck_root=ck_root,
            label=label,
            timeout=timeout,
        )
    if isinstance(done, Adopted):
        for line in done.notes:
            note(line)
    spec, variant = done.request.spec, find_operation(of).about_variant(mask_impl)
    what = f"{spec.arch} (revision {spec.revision}, space {spec.space}{variant})"
    if done.unchanged and form == "table":
        print(f"Unchanged: {what} already has its {counted(done.kernels, 'kernel')}; --force populates again.")
        return
    counts = {"kernels": done.families}
    if 0 in spec.receipt_numbers:
        counts["receipt 0"] = count_by_family(catalog.connection, done.request, receipt=0)
    rows: list[list[Any]] = [[family, *(its.get(family, 0) for its in counts.values())] for family in done.families]
    if form != "table":
        print_rows(["family", *(column.replace(" ", "_") for column in counts)], rows, form)
        return
    rows.append(["total", *(sum(its.values()) for its in counts.values())])
    print_rows(
        ["family", *counts], [[family, *(f"{number:,}" for number in numbers)] for family, *numbers in rows], form
    )
    print(f"{counted(done.kernels, 'kernel')} of {what} in {done.seconds:.2f} s -> {catalog.path}")


@app.command()
def forget(
    context: typer.Context,
    revision: Annotated[str, typer.Argument(metavar="REVISION", help="An adopted revision; see catalog adopted.")],
    yes: options.Yes = False,
    operation: options.Operation = None,
    form: options.Format = "table",
) -> None:
    """Delete an adopted revision.

    Deletes its kernels, rules, build records and timings for every arch. Libraries stay in the cache until it is
    trimmed. The checkout can be adopted again; its timings cannot be measured again without the GPU.

    Example: catalog forget my-ck --yes
    """
    from catalog.ops import DEFAULT
    from catalog.registry.adopted import count_adopted

    catalog, of = open_catalog(context), operation or DEFAULT
    catalog.adopted(revision, operation=of)  # report an unknown revision before the question
    if not yes:
        gone = count_adopted(catalog.connection, of, revision)
        typer.confirm(f"Delete {gone} of revision {revision} in {catalog.path}?", abort=True)
    done = catalog.forget_revision(revision, operation=of)
    print_result(f"Deleted {done} of revision {revision}", list(vars(done)), [list(vars(done).values())], form)


@app.command(cls=DemandCommand)
def build(
    context: typer.Context,
    where: Annotated[str | None, typer.Argument(metavar="EXPR", help="SQL expression: which kernels.")] = None,
    arch: Annotated[
        str | None, options.arch_option("Arch: gfx950, host, ... Default: host, or the archs of the trace.")
    ] = None,
    jobs: options.Jobs = None,
    limit: Annotated[int | None, typer.Option(help="At most N kernels.", metavar="N")] = None,
    shard: Annotated[
        str,
        typer.Option(metavar="I/N", help="Build part I of N; other builders of the same cache build the others."),
    ] = "1/1",
    ck_root: options.CkRoot = None,
    scheduler: options.Scheduler = None,
    keep_going: Annotated[
        bool,
        typer.Option(
            "--keep-going/--fail-fast",
            help="After a failure, build the remaining kernels, or stop. Default: keep going.",
        ),
    ] = True,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Print one line per kernel: compiled, cached or failed, seconds, size, name."
        ),
    ] = False,
    operation: options.Operation = None,
    compile_only: Annotated[
        bool,
        typer.Option("--compile-only", help="No effect: a build never loads or runs kernels. For scripts."),
    ] = False,
    form: options.Format = "table",
) -> None:
    """Compile kernels into the cache, in parallel.

    Compiles the kernels that meet an expression, or every stage of the plans for the problems of a trace, a set or a
    model. If a kernel of a plan fails, the one that is selected instead is compiled.

    Kernels of AMD archs are compiled from a CK checkout. No GPU is needed: nothing is loaded or run. Rows that the
    hardware cannot run, or that are known to be wrong, are left out unless EXPR names hw_valid.

    Kernels in the cache are not compiled again, so the same command continues after Ctrl-C, which stops the running
    compilers and keeps finished kernels. Exits with 1 when a kernel failed or a problem has no kernels, 130 after
    Ctrl-C.

    Example: catalog build "hdim_q=64 AND dtype='fp32' AND mask='causal'" --jobs 2

    Example: catalog build --trace calls.jsonl

    Example: catalog build --model config.json --tp 8 --max-len 32768 --arch gfx942
    """
    from catalog.errors import UsageError
    from catalog.runtime.build_run import Shard
    from catalog.settings import choose

    stated = stated_demand(context)
    if (where is None) is not bool(stated) or (stated and (limit, operation) != (None, None)):
        raise UsageError(
            "give either EXPR, perhaps with --limit or --operation, or one of --trace, --shapes and --model",
            hint="For example: catalog build --trace calls.jsonl",
        )
    part = Shard.parse(shard)
    choose(ck_root=ck_root)
    catalog = open_catalog(context)
    if where is None:
        demand = stated.read(arch)
        code = _build(catalog, demand.rounds(catalog, part), scheduler, jobs, keep_going, verbose, form)
        answers = demand.answers(catalog)
        for line in (*answers.reasons, answers.about):
            note(line)
        raise typer.Exit(code or int(not answers.complete))
    kernels = _kernels_meeting(catalog, where, arch or "host", limit, operation)
    raise typer.Exit(_build(catalog, [part.part(kernels)], scheduler, jobs, keep_going, verbose, form))


def _kernels_meeting(
    catalog: Catalog, where: str, arch: str, limit: int | None, operation: str | None
) -> Sequence[Kernel]:
    """The kernels to build, with hints if there are none."""
    from catalog.registry.query import Query, hints
    from catalog.runtime.build_run import about_left_out, kernels_to_build
    from catalog.runtime.here import resolve_arch

    kernels, left_out = kernels_to_build(catalog, where, arch, limit, operation)
    if left_out:
        note(about_left_out(left_out, arch, operation))
    elif not kernels:
        note(f"No kernel of {resolve_arch(arch)} meets the expression.")
        for hint in hints(Query(where)):
            note(f"Hint: {hint}")
    return kernels


def _build(
    catalog: Catalog,
    rounds: Iterable[Sequence[Kernel]],
    scheduler: str | None,
    jobs: int | None,
    keep_going: bool,
    verbose: bool,
    form: str,
) -> int:
    """Build one list of kernels after another, print the results, and return the exit code."""
    from catalog.build.builder import BuildFailure
    from catalog.messages import counted
    from catalog.runtime.build_run import COLUMNS, BuildRun

    run = BuildRun(catalog)
    try:
        with _pool(scheduler, jobs) as pool:
            for kernels in rounds:
                run.add(kernels)
                total = len(kernels)
                with each_built(total, pool.at_once) as (advance, say):
                    before = catalog.rows.built(kernels, catalog.builder.cache.all_keys())
                    if before:
                        say(f"{before:,} of {counted(total, 'kernel')} already built, {total - before:,} left")

                    def on_done(
                        ended: Artifact | BuildFailure,
                        advance: Callable[[bool], None] = advance,
                        say: Callable[[str], None] = say,
                    ) -> None:
                        run.ended.append(ended)
                        advance(isinstance(ended, BuildFailure) or not ended.cached)
                        if verbose or isinstance(ended, BuildFailure):
                            say(run.line(ended))

                    catalog.builder.build_many(kernels, on_done=on_done, fail_fast=not keep_going, pool=pool)
                if run.failures and not keep_going:
                    break
    except KeyboardInterrupt:
        run.interrupted = True
    for line in run.reasons:
        note(line)
    print_result(run.summary, COLUMNS, run.rows, form)
    return run.exit_code


@contextmanager
def _pool(scheduler: str | None, jobs: int | None) -> Iterator[Pool]:
    from catalog.build.pools import Threads

    if scheduler is None:
        yield Threads(jobs)
        return
    from catalog.build.cluster import connect

    with connect(scheduler) as cluster:
        for line in cluster.notes:
            note(line)
        yield cluster


@app.command()
def fallback(
    context: typer.Context,
    arch: Annotated[str, typer.Option("--arch", help="AMD arch: gfx90a, gfx942, ...")],
    operation: options.Operation = None,
    ck_root: options.CkRoot = None,
    form: options.Format = "table",
) -> None:
    """Compile a known-good AMD kernel for smoke tests.

    Prints the path of its library.

    Example: catalog fallback --arch gfx90a --ck-root ~/composable_kernel
    """
    from catalog.ops import DEFAULT
    from catalog.runtime.build_run import build_fallback
    from catalog.settings import choose

    choose(ck_root=ck_root)
    library = str(build_fallback(open_catalog(context), arch, operation or DEFAULT))
    print_result(library, ["arch", "library"], [[arch, library]], form)
