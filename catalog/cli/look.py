"""Commands that look: kernels, columns, rules, sets of problems, reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from catalog.cli.options import (
    ArchOption,
    FormatOption,
    MaskImplOption,
    OneArchOption,
    RevisionOption,
    arch_names,
    db_path,
    open_catalog,
    split_columns,
)
from catalog.cli.printing import note, print_result, print_rows
from catalog.cli.problem import ProblemCommand, stated_problem

if TYPE_CHECKING:
    from catalog.rules.explain import Explanation
    from catalog.runtime.catalog import Catalog
    from catalog.schema.problem import Problem

app = typer.Typer()


@app.command()
def query(
    context: typer.Context,
    where: Annotated[
        str, typer.Argument(metavar="EXPR", help="SQL expression over the columns; empty: every row.")
    ] = "",
    arch: OneArchOption = None,
    columns: Annotated[str | None, typer.Option(help="Columns, separated by commas; all: every column.")] = None,
    order_by: Annotated[
        str | None, typer.Option(help="SQL expressions to sort by, for example hdim_q, tile_m0 DESC.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="At most N rows.", metavar="N")] = None,
    count: Annotated[bool, typer.Option("--count", help="Print the number of rows.")] = False,
    form: FormatOption = "table",
) -> None:
    """List the kernels that meet a SQL expression.

    Example: catalog query "hdim_q=128 AND pipeline='qr_async'" --limit 5
    """
    from catalog.registry import query as engine
    from catalog.runtime.devices.here import resolve_arch

    chosen = split_columns(columns) or ("arch", "family", "dtype", "hdim_q", "hdim_v", "mask", "built", "name")
    asked = engine.Query(
        where=where,
        arch=resolve_arch(arch) if arch is not None else None,
        columns=() if columns == "all" else chosen,
        order_by=order_by,
        limit=limit,
    )
    if count:
        found = engine.count(db_path(context), asked)
        print(found)
    else:
        with engine.run(db_path(context), asked) as result:
            found = print_rows(result.columns, result, form)
    if not found:
        hints = engine.hints(asked)
        for hint in hints:
            note(f"Hint: {hint}")
        if not hints and not count:
            note("No kernel meets the expression.")


@app.command("columns")
def list_columns(form: FormatOption = "table") -> None:
    """List the columns that an expression may use.

    With their types, domains, defaults and meanings.

    Example: catalog columns
    """
    from catalog.ops import operation
    from catalog.schema.columns import Column, columns_of

    _, *described = Column._fields
    print_rows(["column", *described], columns_of(operation()), form)


@app.command(cls=ProblemCommand)
def explain(
    context: typer.Context,
    *,
    traits: Annotated[
        list[str] | None, typer.Argument(metavar="TRAIT=VALUE", help="Traits of a kernel, its family among them.")
    ] = None,
    arch: ArchOption = "host",
    revision: RevisionOption = None,
    mask_impl: MaskImplOption = "generic",
    limit: Annotated[int, typer.Option(min=1, help="At most N kernels.", metavar="N")] = 5,
    form: FormatOption = "table",
) -> None:
    """Say why a kernel exists or not, or was selected.

    For traits: whether each rule holds, is violated (rejected), or depends on traits that are not stated. For the
    options of a problem: how many kernels each trait and each rule drops.

    Example: catalog explain --arch gfx950 family=fwd hdim_q=128 hdim_v=128 mode=group pad_s=0

    Example: catalog explain --arch gfx950 --batch 1 --nhead-q 8 --seqlen-q 2048 --hdim-q 128
    """
    from catalog.errors import UsageError
    from catalog.ops import DEFAULT, operation
    from catalog.schema.trait_text import read_traits

    stated = stated_problem(context)
    if bool(traits) == bool(stated):
        raise UsageError(
            "both traits and options of a problem are stated" if traits else "there is nothing to explain",
            hint="State a kernel (catalog explain family=fwd hdim_q=128) or a problem (catalog explain --batch 1 ...).",
        )
    catalog = open_catalog(context)
    where: dict[str, Any] = {"arch": arch, "revision": revision, "mask_impl": mask_impl, "limit": limit}
    if traits:
        _print_explanation(
            catalog.explain(read_traits(traits, operation(stated.operation or DEFAULT).traits), **where), form
        )
    else:
        _print_narrowing(catalog, stated.problem(), where, form)


def _print_explanation(explained: Explanation, form: str) -> None:
    findings = _Table(
        ("kind", "id", "verdict", "traits", "reason", "source", "quirk"),
        [(f.kind, f.id, f.verdict.value, " ".join(f.traits), f.reason, f.source, f.quirk) for f in explained.findings],
    )
    matches = _Table(
        ("changes", "kernels", "receipts", "name", "id"),
        [(" ".join(m.changes), m.kernels, m.receipts, m.name, m.id) for m in explained.matches],
    )
    nearest = "" if explained.kernels or not matches.rows else "\nThe nearest kernels, and what to change for them:"
    _print_answer(explained.summary + nearest, findings, matches, form)


def _print_narrowing(catalog: Catalog, problem: Problem, where: Mapping[str, Any], form: str) -> None:
    from catalog.ops import operation_of

    families = operation_of(problem).stages(problem)
    stages = [(family, *catalog.narrowing(problem, family=family, **where)) for family in families]
    steps = _Table(
        ("stage", "kind", "id", "rejects", "left", "reason", "source"),
        [
            (family, step.kind, step.id, step.rejects, step.left, step.reason, step.source)
            for family, narrowed, _ in stages
            for step in narrowed
        ],
    )
    kept = _Table(
        ("stage", "rank", "median_ms", "name", "id"),
        [
            (family, rank, found.median_ms, found.kernel.name, found.kernel.id)
            for family, _, candidates in stages
            for rank, found in enumerate(candidates, start=1)
        ],
    )
    counts = ", ".join(f"{narrowed[-1].left:,} {family}" for family, narrowed, _ in stages)
    answer = f"{counts} kernels answer the problem" + ("; the best, in order:" if kept.rows else ".")
    _print_answer(answer, steps, kept, form)


class _Table(NamedTuple):
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    @property
    def named(self) -> list[dict[str, Any]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def _print_answer(answer: str, rules: _Table, kernels: _Table, form: str) -> None:
    """Print the answer, the kernels, then the rules; other formats have one table, with kernels of kind kernel last."""
    if form == "table":
        print(answer)
        for table in (kernels, rules):
            if table.rows:
                print(flush=True)
                print_rows(*table, form)
        return
    columns = list(dict.fromkeys((*rules.columns, *kernels.columns)))
    rows = [*rules.named, *({"kind": "kernel", **row} for row in kernels.named)]
    print_rows(columns, [[row.get(column) for column in columns] for row in rows], form)


@app.command("rules")
def list_rules(
    context: typer.Context,
    arch: Annotated[
        str | None,
        typer.Option("--arch", help="Only this arch. Default: all populated archs.", autocompletion=arch_names),
    ] = None,
    revision: RevisionOption = None,
    family: Annotated[str | None, typer.Option("--family", help="Only rules for this family: fwd, ...")] = None,
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
    rules = open_catalog(context).rules(arch, revision=revision, family=shown, kind=kind and table.read_kind(kind))
    print_rows(table.COLUMNS, rules, form)
    if not rules:
        note("No rule matches.")
        note("Hint: Without --arch, rules are those of populated archs. Name one: catalog rules --arch gfx950")


@app.command()
def shapes(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[SET]", help="smoke, full, nightly, or a YAML file. Default: list the sets."),
    ] = None,
    columns: Annotated[str | None, typer.Option(help="Columns, separated by commas. Default: all.")] = None,
    form: FormatOption = "table",
) -> None:
    """List the problem sets to tune and benchmark with.

    Or the problems of one: name, work, fields.

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
def report(
    context: typer.Context,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder for index.html; created if it does not exist.")
    ],
    arch: OneArchOption = None,
    peaks: Annotated[
        bool, typer.Option("--peaks", help="Measure the peaks of this machine's CPU, for its rooflines.")
    ] = False,
    form: FormatOption = "table",
) -> None:
    """Write a page of plots of what was measured.

    Rooflines, speed by length and tile, selection, compile times, coverage.

    One self-contained file, to open in a browser, send or print. Needs the extra "report".

    Example: catalog report --out report
    """
    from catalog.report.page import write_report
    from catalog.runtime.devices.here import resolve_arch

    page = write_report(open_catalog(context), out, arch and resolve_arch(arch), peaks=peaks)
    print_result(str(page), ["page"], [[str(page)]], form)


@app.command()
def datasette_metadata(
    context: typer.Context,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="File to write. Default: stdout.")] = None,
) -> None:
    """Write metadata for Datasette, a SQLite browser.

    The meanings of columns, and queries to start from.

    Then: datasette catalog.db --metadata metadata.json

    Example: catalog datasette-metadata --out metadata.json
    """
    from catalog.files import write_file
    from catalog.report.datasette import metadata_text

    text = metadata_text(db_path(context))
    print(text, end="") if out is None else print(write_file(out, text))
