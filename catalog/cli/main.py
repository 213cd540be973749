"""The command line: parse, call, print. What a command does lies in the library.

Heavy modules are imported inside the commands: ``catalog --help`` pays for typer alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from catalog.cli import bundle as cli_bundle  # noqa: F401 - their commands register themselves
from catalog.cli import options
from catalog.cli import quarantine as cli_quarantine  # noqa: F401 - their commands register themselves
from catalog.cli.bench import bench
from catalog.cli.cache import cache_app, timings_app
from catalog.cli.conformance import conformance
from catalog.cli.export import export
from catalog.cli.options import ArchOption, CkRootOption, MaskImplOption, RevisionOption
from catalog.cli.printing import FormatOption, print_told
from catalog.cli.printing import print_rows as _print
from catalog.cli.printing import read_format as _format
from catalog.cli.problem import with_problem
from catalog.cli.replay import replay
from catalog.cli.report import datasette_metadata, report
from catalog.cli.sections import Sections
from catalog.cli.shapes import shapes
from catalog.cli.tune import tune

if TYPE_CHECKING:
    from catalog.runtime.catalog import Catalog

app = typer.Typer(
    name="catalog",
    cls=Sections,
    help="One queryable catalog of every attention kernel that can exist: whether it is built, and how fast it is."
    "\n\nExample: catalog run --batch 1 --nhead-q 8 --seqlen-q 512 --hdim-q 64 --dtype fp32 --validate",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(export, name="export")
app.add_typer(cache_app)
app.add_typer(timings_app)


def _tell_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"catalog {version('kernel-catalog')}")
        raise typer.Exit


@app.callback()
def _options(
    db: Annotated[Path | None, typer.Option("--db", help="The catalog's SQLite file. Default: CATALOG_DB.")] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    _State.db = db


class _State:
    """The options before the command."""

    db: Path | None = None


def _db() -> Path:
    from catalog.settings import settings

    return _State.db or settings().db


def _catalog() -> Catalog:
    from catalog.runtime.catalog import Catalog

    return Catalog(_db())


def _note(text: str) -> None:
    print(text, file=sys.stderr)


@app.command()
def populate(
    arch: ArchOption,
    revision: RevisionOption = None,
    mask_impl: MaskImplOption = "generic",
    receipt: Annotated[
        list[str] | None, typer.Option(help="Only the kernels of this receipt; may be repeated.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Do it again although nothing changed.")] = False,
    space: Annotated[
        str, typer.Option(help="ck: upstream's codegen; rules, exhaustive: the dispatcher's sweeps.")
    ] = "ck",
    config: Annotated[
        list[Path] | None, typer.Option(help="Only what this sweep file asks for; may be repeated.")
    ] = None,
    where: Annotated[str, typer.Option(metavar="EXPR", help="Only kernels that meet this SQL expression.")] = "",
    filter_file: Annotated[
        Path | None, typer.Option(help="Only kernels that filter_config(c) of this Python file keeps.")
    ] = None,
    form: FormatOption = "table",
) -> None:
    """Add every valid kernel of an arch to the catalog.

    Example: catalog populate --arch gfx950
    """
    from catalog.cli.progress import fraction_done
    from catalog.messages import counted
    from catalog.rules.populate import count_by_family
    from catalog.rules.receipts import resolve_receipts
    from catalog.rules.restriction import restriction

    catalog = _catalog()
    spec = catalog.spec(arch, revision, space)
    restricted = restriction(spec, tuple(config or ()), where, filter_file)
    receipts = tuple(dict.fromkeys(number for text in receipt or () for number in resolve_receipts(spec, text)))
    with fraction_done(f"{spec.arch} {spec.space}") as on_progress:
        done = catalog.populate(
            arch,
            revision=revision,
            mask_impl=mask_impl,
            receipts=receipts,
            force=force,
            space=space,
            restriction=restricted,
            on_progress=on_progress,
        )
    what = f"{spec.arch} (revision {spec.revision}, space {spec.space}, masks {mask_impl})"
    if done.unchanged and form == "table":
        print(f"Unchanged: {what} has its {counted(done.kernels, 'kernel')} already; --force makes them again.")
        return
    columns = ["family", "kernels"]
    rows: list[list[Any]] = [[family, n] for family, n in done.families.items()]
    if 0 in spec.receipt_numbers:
        columns.append("receipt 0")
        default = count_by_family(catalog.connection, done.request, receipt=0)
        rows = [[family, n, default.get(str(family), 0)] for family, n in rows]
    if form != "table":
        _print([column.replace(" ", "_") for column in columns], rows, form)
        return
    rows.append(["total", *(sum(row[i] for row in rows) for i in range(1, len(columns)))])
    _print(columns, [[family, *(f"{n:,}" for n in counts)] for family, *counts in rows], form)
    print(f"{counted(done.kernels, 'kernel')} of {what} in {done.seconds:.2f} s -> {catalog.path}")


@app.command()
def query(
    where: Annotated[
        str, typer.Argument(metavar="EXPR", help="SQL expression over the columns; empty: every row.")
    ] = "",
    arch: Annotated[str | None, typer.Option("--arch", help="Only this arch; host is this machine's CPU.")] = None,
    columns: Annotated[str | None, typer.Option(help="Columns, separated by commas; all: every column.")] = None,
    order_by: Annotated[str | None, typer.Option(help="SQL expressions to sort by, as: hdim_q, tile_m0 DESC.")] = None,
    limit: Annotated[int | None, typer.Option(help="At most so many rows.")] = None,
    count: Annotated[bool, typer.Option("--count", help="Print how many rows there are.")] = False,
    form: FormatOption = "table",
) -> None:
    """List the kernels that meet a SQL expression.

    Example: catalog query "hdim_q=128 AND pipeline='qr_async'" --limit 5
    """
    from catalog.cli.rows_out import write_rows
    from catalog.registry import query as engine
    from catalog.runtime.devices.here import resolve_arch

    shown = _format(form)
    chosen = columns.split(",") if columns else ["arch", "family", "dtype", "hdim_q", "hdim_v", "mask", "built", "name"]
    asked = engine.Query(
        where=where,
        arch=resolve_arch(arch) if arch is not None else None,
        columns=() if columns == "all" else tuple(chosen),
        order_by=order_by,
        limit=limit,
    )
    if count:
        found = engine.count(_db(), asked)
        print(found)
    else:
        with engine.run(_db(), asked) as result:
            found = write_rows(result.columns, result, shown, sys.stdout)
    if not found:
        hints = engine.hints(asked)
        for hint in hints:
            _note(f"Hint: {hint}")
        if not hints and not count:
            _note("No kernel meets the expression.")


@app.command("columns")
def list_columns(form: FormatOption = "table") -> None:
    """List the columns that an expression may use.

    With their types, domains, defaults and meanings.

    Example: catalog columns
    """
    from catalog.ops import operation
    from catalog.schema.columns import columns_of

    _print(
        ["column", "type", "domain", "default", "meaning"],
        [list(column) for column in columns_of(operation())],
        form,
    )


@app.command()
def parity(
    receipt: Annotated[str, typer.Option(help="Receipt by number or name: 0, flash, pytorch, ...")] = "0",
    arch: Annotated[list[str] | None, typer.Option("--arch", help="Arch; may be repeated. Default: gfx950.")] = None,
    mask_impl: MaskImplOption = "generic",
    revision: RevisionOption = None,
    ck_root: Annotated[
        Path | None, typer.Option(help="Your CK checkout: ask its generator instead of the lists that come along.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that its generator may take for one API.")] = 600.0,
    form: FormatOption = "table",
) -> None:
    """Compare kernel names with upstream's generator.

    With --ck-root the generator of that checkout runs now, and the revision is the one that it looks like, unless
    --revision names another. Nothing is written into the checkout.

    Exits with 1 when names differ, with 2 when there is nothing to compare with.

    Example: catalog parity --receipt 0 --arch gfx950
    """
    from catalog.errors import MissingReferenceError
    from catalog.rules.parity import COLUMNS
    from catalog.rules.receipts import resolve_receipts

    catalog, generator = _catalog(), None
    if ck_root is not None:
        from catalog.ops.attention.upstream.live import find_generator

        generator = find_generator(ck_root, timeout)
        revision = revision or generator.revision
        _note(generator.about)
    worst, rows = 0, []
    for name in arch or ["gfx950"]:
        for number in resolve_receipts(catalog.spec(name, revision), receipt):
            try:
                comparison = catalog.parity(name, number, revision=revision, mask_impl=mask_impl, reference=generator)
            except MissingReferenceError as error:
                _note(error.printed)
                worst = worst or error.exit_code
                continue
            rows.append(comparison.row)
            if form == "table":
                print(comparison.report())
            worst = worst if comparison.passed else 1
    if form != "table":
        _print(COLUMNS, rows, form)
    if worst:
        raise typer.Exit(worst)


@app.command()
def diff(
    arch: ArchOption,
    before: Annotated[str, typer.Option("--from", help="Upstream revision to start from, as 2025-07.")],
    after: Annotated[str, typer.Option("--to", help="Upstream revision to compare with, as 2026-05.")],
    mask_impl: MaskImplOption = "generic",
    receipt: Annotated[str | None, typer.Option(help="Only the kernels of this receipt, by number or name.")] = None,
    names: Annotated[
        bool, typer.Option("--names", help="Print every kernel: + appeared, - vanished, ~ changed.")
    ] = False,
    form: FormatOption = "table",
) -> None:
    """Compare the kernels of two upstream revisions.

    Kernels that appeared, vanished or changed, counted by family.

    Example: catalog diff --from 2025-07 --to 2026-05 --arch gfx942 --receipt 0
    """
    from catalog.rules import diff as difference
    from catalog.rules.receipts import resolve_receipts

    catalog, rows = _catalog(), list[list[Any]]()
    receipts = resolve_receipts(catalog.spec(arch, after), receipt) if receipt is not None else (None,)
    for number in receipts:
        found = catalog.diff(arch, before, after, mask_impl=mask_impl, receipt=number)
        if form == "table":
            print(found.listing() if names else found.report())
        rows += found.kernel_rows() if names else found.family_rows()
    if form != "table":
        _print(difference.KERNEL_COLUMNS if names else difference.FAMILY_COLUMNS, rows, form)


@app.command()
def build(
    where: Annotated[str, typer.Argument(metavar="EXPR", help="SQL expression: which kernels.")],
    arch: ArchOption = "host",
    jobs: options.Jobs = None,
    limit: Annotated[int | None, typer.Option(help="At most so many kernels.")] = None,
    ck_root: CkRootOption = None,
    scheduler: options.Scheduler = None,
    keep_going: options.KeepGoing = True,
    verbose: options.Verbose = False,
    compile_only: options.CompileOnly = False,
    form: FormatOption = "table",
) -> None:
    """Compile kernels into the cache, in parallel.

    Those of AMD arches come from a CK checkout. No GPU is needed: nothing is loaded or run.

    Kernels that are in the cache are not compiled again, so the same command goes on where Ctrl-C ended it: running
    compilers end, what is finished stays. Exits with 1 when a kernel failed, 130 after Ctrl-C.

    Example: catalog build "hdim_q=64 AND dtype='fp32' AND mask='causal'" --jobs 2
    """
    from catalog.cli.build import Asked, build_with_progress
    from catalog.settings import choose

    choose(ck_root=ck_root)
    fail_fast = not keep_going
    asked = Asked(where, arch, jobs, limit, scheduler=scheduler, fail_fast=fail_fast, verbose=verbose, form=form)
    code = build_with_progress(_catalog(), asked)
    if code:
        raise typer.Exit(code)


@app.command()
def fallback(
    arch: Annotated[str, typer.Option("--arch", help="AMD arch: gfx90a, gfx942, ...")],
    ck_root: CkRootOption = None,
    form: FormatOption = "table",
) -> None:
    """Compile a known-good AMD kernel for smoke tests.

    A forward kernel (fp16, hdim 128); prints the path of its library.

    Example: catalog fallback --arch gfx90a --ck-root ~/composable_kernel
    """
    from catalog.cli.build import build_fallback
    from catalog.settings import choose

    choose(ck_root=ck_root)
    built = build_fallback(_catalog(), arch)
    print_told(str(built), ["arch", "library"], [[arch, str(built)]], form)


@app.command()
def merge(
    others: Annotated[list[Path], typer.Argument(metavar="OTHER.db...", help="Catalogs of other machines; only read.")],
    form: FormatOption = "table",
) -> None:
    """Take over the records of other machines' catalogs.

    Records of builds and timings, all of them or nothing.

    Example: catalog merge mi300.db epyc.db
    """
    from catalog.registry.merge import COLUMNS

    merged = _catalog().merge(others)
    _print(list(COLUMNS), [row for one in merged for row in one.rows], form)
    for note in (note for one in merged for note in one.notes):
        _note(note)


@app.command()
@with_problem
def select(
    *,
    arch: ArchOption = "host",
    revision: RevisionOption = None,
    mask_impl: MaskImplOption = "generic",
    limit: Annotated[int, typer.Option(min=1, help="How many candidates to show, best first.")] = 1,
    explain: Annotated[bool, typer.Option("--explain", help="Say what the choice goes by.")] = False,
    form: FormatOption = "table",
    fields: dict[str, Any],
) -> None:
    """Show the kernels that answer a problem.

    One for each stage, and with --limit the next best ones. The medians are those that selection uses: of this
    problem, or of the nearest measured one.

    Example: catalog select --batch 1 --nhead-q 8 --seqlen-q 2048 --hdim-q 128 --mask causal --arch gfx950
    """
    from catalog.ops.attention.problem import Problem

    problem, catalog = Problem(**fields), _catalog()
    plan = catalog.select(problem, arch=arch, revision=revision, mask_impl=mask_impl)
    rows = [
        [family, place, candidate.kernel.name, candidate.median_ms, candidate.kernel.id]
        for family in (kernel.family for kernel in plan.kernels)
        for place, candidate in enumerate(
            catalog.candidates(problem, arch=arch, revision=revision, mask_impl=mask_impl, family=family, limit=limit),
            start=1,
        )
    ]
    _print(["stage", "rank", "name", "median_ms", "id"], rows, form)
    if explain:
        _note(plan.explain().about)


@app.command()
@with_problem
def explain(
    *,
    traits: Annotated[
        list[str] | None, typer.Argument(metavar="TRAIT=VALUE", help="Traits of a kernel, its family among them.")
    ] = None,
    arch: ArchOption = "host",
    revision: RevisionOption = None,
    mask_impl: MaskImplOption = "generic",
    limit: Annotated[int, typer.Option(min=1, help="How many kernels to show.")] = 5,
    form: FormatOption = "table",
    fields: dict[str, Any],
) -> None:
    """Say why a kernel exists or not, or was selected.

    Traits as words: each rule holds, is violated (rejected), or depends on traits that are not stated. A problem, by
    its options: how many kernels each trait and each rule drops.

    Example: catalog explain --arch gfx950 family=fwd hdim_q=128 hdim_v=128 mode=group pad_s=0

    Example: catalog explain --arch gfx950 --batch 1 --nhead-q 8 --seqlen-q 2048 --hdim-q 128
    """
    from catalog.cli import explain as cli_explain

    cli_explain.explain(
        _catalog(), traits or [], fields, _format(form), limit=limit, arch=arch, revision=revision, mask_impl=mask_impl
    )


@app.command("rules")
def list_rules(
    arch: Annotated[str | None, typer.Option("--arch", help="Only this arch. Default: all that are populated.")] = None,
    revision: RevisionOption = None,
    family: Annotated[str | None, typer.Option("--family", help="Only what concerns it: fwd, ...")] = None,
    kind: Annotated[str | None, typer.Option("--kind", help="Only this kind: constraint, invariant, ...")] = None,
    form: FormatOption = "table",
) -> None:
    """List the rules that make and select kernels.

    With their expressions, reasons, and sources upstream.

    Example: catalog rules --arch gfx950 --family fwd --kind constraint
    """
    from catalog.ops import operation
    from catalog.rules import table
    from catalog.schema.trait_text import read_family

    shown = None if family is None else read_family(family, operation().traits)
    rules = _catalog().rules(arch, revision=revision, family=shown, kind=kind and table.read_kind(kind))
    _print(list(table.COLUMNS), rules, form)
    if not rules:
        _note("No rule is so.")
        _note("Hint: Without --arch, rules are those of populated archs. Name one: catalog rules --arch gfx950")


app.command()(shapes)
app.command()(tune)
app.command()(report)
app.command()(datasette_metadata)


@app.command()
@with_problem
def run(
    *,
    arch: ArchOption = "host",
    seed: Annotated[int, typer.Option(min=0, help="Of the random inputs.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Launches; the time is their median.")] = 5,
    validate: Annotated[bool, typer.Option("--validate", help="Compare with the float64 reference.")] = False,
    form: FormatOption = "table",
    fields: dict[str, Any],
) -> None:
    """Run the kernel for a problem on random inputs.

    It is selected, and built when it is not in the cache.

    Exits with 1 when --validate finds an error above the tolerance of the dtype.

    Example: catalog run --batch 1 --nhead-q 8 --seqlen-q 512 --hdim-q 64 --dtype fp32 --validate
    """
    from catalog.ops.attention.problem import Problem
    from catalog.runtime.validate import run_problem

    facts, passed = run_problem(_catalog(), Problem(**fields), arch=arch, seed=seed, repeats=repeats, validate=validate)
    if form == "table":
        _print(["what", "value"], [[name, value] for name, value in facts.items()], form)
    else:
        _print(list(facts), [list(facts.values())], form)
    if not passed:
        raise typer.Exit(1)


app.command()(bench)
app.command()(conformance)
app.command()(replay)


@app.command()
def doctor(form: FormatOption = "table") -> None:
    """Show settings, the catalog file and toolchains.

    For each arch: the compiler that it would use, or what it lacks.

    Example: catalog doctor
    """
    from catalog.doctor import diagnose

    _print(["what", "value", "about"], [list(finding) for finding in diagnose(_db())], form)
