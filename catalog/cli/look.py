"""Commands that show kernels, columns, rules, problem sets and reports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from catalog.cli import options
from catalog.cli.options import db_path, open_catalog, split_columns
from catalog.cli.printing import note, print_result, print_rows
from catalog.cli.problem import ProblemCommand, stated_problem

if TYPE_CHECKING:
    from catalog.runtime.explained import Explained, Table

app = typer.Typer()


@app.command()
def query(
    context: typer.Context,
    where: Annotated[
        str, typer.Argument(metavar="EXPR", help="SQL expression over the columns; empty: every row.")
    ] = "",
    arch: options.OneArch = None,
    columns: Annotated[str | None, typer.Option(help="Columns, separated by commas; all: every column.")] = None,
    order_by: Annotated[
        str | None, typer.Option(help="SQL expressions to sort by, for example hdim_q, tile_m0 DESC.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="At most N rows.", metavar="N")] = None,
    count: Annotated[bool, typer.Option("--count", help="Print the number of rows.")] = False,
    operation: options.Operation = None,
    foreign: Annotated[
        bool, typer.Option("--foreign", help="List imported timings of other projects' kernels instead.")
    ] = False,
    form: options.Format = "table",
) -> None:
    """List the kernels that meet a SQL expression.

    Without --operation, lists those of every operation that has the columns. With --foreign, the columns are those of
    the view foreign_timings.

    Example: catalog query "hdim_q=128 AND pipeline='qr_async'" --limit 5
    """
    from catalog import ops as operations
    from catalog.errors import UsageError
    from catalog.registry import foreign as others
    from catalog.registry import query as engine
    from catalog.runtime.here import resolve_arch

    if foreign and operation is not None:
        raise UsageError("--operation and --foreign exclude each other", hint="Ask for: operation = 'gemm'")
    path = db_path(context)
    shared = engine.Query(
        where=where, arch=resolve_arch(arch) if arch is not None else None, order_by=order_by, limit=limit
    )
    if foreign:
        asked = [replace(shared, view=others.VIEW, columns=_chosen(columns, others.LISTED))]
    else:
        named = "" if columns in (None, "all") else columns or ""
        asked = [
            replace(shared, operation=name, columns=_chosen(columns, operations.operation(name).listed))
            for name in ([operation] if operation else engine.operations_asked(path, where, order_by or "", named))
        ]
    if count:
        found = sum(engine.count(path, one) for one in asked)
        print(found)
    else:
        found = 0
        for one in asked:
            with engine.run(path, one) as result:
                found += print_rows(result.columns, result, form)
    if not found:
        hints = [hint for one in asked for hint in engine.hints(one)]
        for hint in hints:
            note(f"Hint: {hint}")
        if not hints and not count:
            note("No kernel meets the expression.")


def _chosen(columns: str | None, listed: tuple[str, ...]) -> tuple[str, ...]:
    """The columns that ``--columns`` names, by default ``listed``; empty for all."""
    return () if columns == "all" else split_columns(columns) or listed


@app.command("columns")
def list_columns(operation: options.Operation = None, form: options.Format = "table") -> None:
    """List the columns that an expression may use.

    Shows their types, domains, defaults and meanings.

    Example: catalog columns
    """
    from catalog import ops as operations
    from catalog.schema.columns import Column, columns_of

    _, *described = Column._fields
    print_rows(["column", *described], columns_of(operations.operation(operation or operations.DEFAULT)), form)


@app.command(cls=ProblemCommand)
def explain(
    context: typer.Context,
    *,
    traits: Annotated[
        list[str] | None, typer.Argument(metavar="TRAIT=VALUE", help="Traits of a kernel, including its family.")
    ] = None,
    arch: options.Arch = "host",
    revision: options.Revision = None,
    mask_impl: options.MaskImpl = "generic",
    space: Annotated[str | None, typer.Option(help="With traits: a dispatcher sweep, rules or exhaustive.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most N kernels.", metavar="N")] = 5,
    form: options.Format = "table",
) -> None:
    """Explain why a kernel exists or not, or was selected.

    Given traits, shows whether each rule holds, is violated (rejected), or depends on traits that are not stated. Given
    the options of a problem, shows how many kernels each trait and each rule drops.

    Example: catalog explain --arch gfx950 family=fwd hdim_q=128 hdim_v=128 mode=group pad_s=0

    Example: catalog explain --arch gfx950 --batch 1 --nhead-q 8 --seqlen-q 2048 --hdim-q 128
    """
    from catalog.errors import UsageError
    from catalog.ops import DEFAULT, operation
    from catalog.runtime.explained import explained_problem, explained_traits
    from catalog.schema.lineage import Wanted
    from catalog.schema.trait_text import read_traits

    stated = stated_problem(context)
    of = operation(stated.operation or DEFAULT)
    if bool(traits) == bool(stated):
        raise UsageError(
            "traits cannot be combined with options of a problem" if traits else "there is nothing to explain",
            hint=f"Give traits, as in family={of.traits.families[0]}, or a problem by its options.",
        )
    catalog = open_catalog(context)
    wanted = Wanted(arch, revision, mask_impl, of.name)
    if traits:
        explanation = catalog.explain(
            read_traits(traits, of.traits), **wanted.keywords, operation=of.name, space=space, limit=limit
        )
        explained = explained_traits(explanation)
    else:
        explained = explained_problem(catalog, stated.problem(), wanted, limit)
    _print_explained(explained, form)


def _print_explained(explained: Explained, form: str) -> None:
    """Print the answer, the kernels, the rules, then the timings of other projects' kernels.

    Other formats are one table that ends with rows of kind kernel, then of kind foreign.
    """
    kernels, rules, foreign = explained.kernels, explained.rules, explained.foreign
    if form != "table":
        columns = dict.fromkeys((*rules.columns, *kernels.columns, *foreign.columns))
        listed = [
            {"kind": kind, **row} for kind, table in (("kernel", kernels), ("foreign", foreign)) for row in table.rows
        ]
        _print_table(replace(rules, columns=tuple(columns), rows=[*rules.rows, *listed]), form)
        return
    print(explained.answer)
    for table in (kernels, rules):
        if table.rows:
            print(flush=True)
            _print_table(table, form)
    if foreign.rows:
        print("\nTimings of other projects' kernels, which selection ignores:", flush=True)
        _print_table(foreign, form)


def _print_table(table: Table, form: str) -> None:
    print_rows(table.columns, table.values, form)


@app.command("rules")
def list_rules(
    context: typer.Context,
    arch: Annotated[str | None, options.arch_option("Only this arch. Default: all populated archs.")] = None,
    revision: options.Revision = None,
    family: Annotated[str | None, typer.Option("--family", help="Only rules for this family: fwd, ...")] = None,
    kind: Annotated[str | None, typer.Option("--kind", help="Only this kind: constraint, invariant, ...")] = None,
    operation: options.Operation = None,
    form: options.Format = "table",
) -> None:
    """List the rules that create and select kernels.

    Shows their expressions, reasons, and upstream sources.

    Example: catalog rules --arch gfx950 --family fwd --kind constraint
    """
    from catalog import ops as operations
    from catalog.rules import table
    from catalog.schema.trait_text import read_family

    of = operations.operation(operation or operations.DEFAULT)
    shown = None if family is None else read_family(family, of.traits)
    chosen = kind and table.read_kind(kind)
    rules = open_catalog(context).rules(arch, revision=revision, family=shown, kind=chosen, operation=of.name)
    print_rows(table.COLUMNS, rules, form)
    if not rules:
        note("No rule matches.")
        of_it = f"--operation {operation} " if operation else ""
        note(f"Hint: Without --arch only rules of populated archs are listed. Try catalog rules {of_it}--arch gfx950")


@app.command()
def adopted(
    context: typer.Context,
    revision: Annotated[
        str | None, typer.Argument(metavar="[REVISION]", help="Only this adopted revision. Default: all.")
    ] = None,
    unknown: Annotated[
        bool, typer.Option("--unknown", help="List the names that could not be read, and what is new in them.")
    ] = False,
    operation: options.Operation = None,
    form: options.Format = "table",
) -> None:
    """List the revisions adopted from checkouts.

    Shows the nearest known revision, the checkout with its git commit, and the number of kernels and of unknown names.

    Example: catalog adopted my-ck --unknown
    """
    from catalog.ops import DEFAULT
    from catalog.registry.adopted import COLUMNS, UNKNOWN_COLUMNS, unknown_names

    catalog, of = open_catalog(context), operation or DEFAULT
    if unknown:
        rows = unknown_names(catalog.connection, of, revision)
        print_rows(UNKNOWN_COLUMNS, rows, form)
    else:
        rows = catalog.adopted(revision, operation=of)
        print_rows(COLUMNS, rows, form)
    if not rows:
        note("Every name was read." if unknown else "No checkout was adopted: catalog populate --ck-root PATH does it.")


@app.command()
def shapes(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[SET]", help="Name of a set, or a YAML file. Default: list the sets."),
    ] = None,
    columns: Annotated[str | None, typer.Option(help="Columns, separated by commas. Default: all.")] = None,
    form: options.Format = "table",
) -> None:
    """List the sets of problems, or the problems of one.

    The sets are for tuning and benchmarks. A problem is listed with its name, work and fields.

    Example: catalog shapes smoke --columns name,gflop,mb
    """
    from catalog.schema import shapes as library

    if name is None:
        print_rows(library.SET_COLUMNS, library.list_sets(), form)
        return
    found = library.load_shapes(name)
    chosen = library.choose_columns(found, split_columns(columns))
    print_rows(chosen, library.rows_of(found, chosen), form)


@app.command()
def top(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A trace.")],
    by: Annotated[
        str, typer.Option("--by", help="Group calls by problem, kind, kernels, operation or arch.")
    ] = "problem",
    limit: Annotated[int, typer.Option(min=1, help="At most N rows.", metavar="N")] = 20,
    form: options.Format = "table",
) -> None:
    """Show where a traced program spends its time.

    The share is a percentage of the time of all calls. The times are sums over all launches: as recorded by the trace,
    and for the kernels alone, as far as tuning has measured them.

    Example: catalog top calls.jsonl

    Example: catalog top calls.jsonl --by kernels --limit 5
    """
    from catalog.errors import UsageError
    from catalog.messages import did_you_mean
    from catalog.report.top import BY, columns_of, rows_of
    from catalog.report.traced import read_traced

    if by not in BY:
        raise UsageError(f"--by {by} is not allowed{did_you_mean(by, BY)}", hint=f"Allowed: {', '.join(BY)}.")
    traced = read_traced(open_catalog(context), file)
    print_rows(columns_of(by), rows_of(traced, by)[:limit], form)
    note(traced.about)


@app.command()
def serve(
    context: typer.Context,
    host: Annotated[
        str, typer.Option(help="Address to listen on. The default is reachable only from this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one.")] = 8001,
    browser: Annotated[bool, typer.Option("--browser", help="Open the page in a browser.")] = False,
) -> None:
    """Show the catalog in a browser.

    Datasette serves the file, which is only read, until Ctrl-C. It also has the plots of catalog report, explanations,
    and a page for each kernel: its source, libraries, timings, and similar kernels. Needs the extras "datasette" and
    "report".

    Example: catalog serve --browser
    """
    import webbrowser

    from catalog.report.serve import serve as serve_file

    def on_start(address: str) -> None:
        print(f"{address} (Ctrl-C stops it)", flush=True)
        if browser:
            webbrowser.open(address)

    serve_file(db_path(context), host, port, on_start)


@app.command()
def report(
    context: typer.Context,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder for index.html; created if it does not exist."),
    ] = None,
    winners: Annotated[
        bool, typer.Option("--winners", help="Print the fastest of the compared implementations instead.")
    ] = False,
    arch: options.OneArch = None,
    peaks: Annotated[
        bool, typer.Option("--peaks", help="Measure the peaks of this machine's CPU, for its rooflines.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Show the end-to-end and kernel time of the program that wrote this trace."),
    ] = None,
    form: options.Format = "table",
) -> None:
    """Write a page of plots of the measurements.

    It shows rooflines, speed by length and tile, selection, compile times, winners, and coverage. The page is one
    self-contained HTML file. Needs the extra "report".

    With --winners, prints the fastest implementation, the catalog's kernels or another project's, and its margin over
    the next one, for each arch, policy and kind of problem that was tuned with --against.

    Example: catalog report --out report

    Example: catalog report --winners --format csv
    """
    from catalog.errors import UsageError
    from catalog.runtime.here import resolve_arch

    if (out is None) != winners:
        raise UsageError("give either --out DIR or --winners", hint="For a page: catalog report --out report")
    where = arch and resolve_arch(arch)
    if out is not None:
        from catalog.report.page import write_report

        page = write_report(open_catalog(context), out, where, peaks=peaks, trace=trace)
        print_result(str(page), ["page"], [[str(page)]], form)
        return
    from catalog.report.collect import REPORT_SECONDS
    from catalog.report.winners import table_of, winners_in

    found = winners_in(db_path(context), where, REPORT_SECONDS)
    print_rows(*table_of(found), form)
    if not found:
        note("No other project's implementation was timed yet.")
        note("Hint: catalog tune --shapes smoke --against sdpa")


@app.command()
def datasette_metadata(
    context: typer.Context,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="File to write. Default: stdout.")] = None,
) -> None:
    """Write metadata for Datasette, a SQLite browser.

    It describes the columns and has example queries.

    Then: datasette catalog.db --metadata metadata.json

    Example: catalog datasette-metadata --out metadata.json
    """
    from catalog.files import write_file
    from catalog.report.datasette import metadata_text

    text = metadata_text(db_path(context))
    print(text, end="") if out is None else print(write_file(out, text))
