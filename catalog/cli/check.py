"""Commands that check: doctor, parity, diff, conformance."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from catalog.cli import options
from catalog.cli.demand import DemandCommand, stated_demand
from catalog.cli.options import db_path, open_catalog
from catalog.cli.printing import note, print_rows
from catalog.errors import UsageError

if TYPE_CHECKING:
    from catalog.ops.protocol import Operation
    from catalog.runtime.catalog import Catalog

app = typer.Typer()


@app.command()
def doctor(
    context: typer.Context,
    retry: Annotated[bool, typer.Option("--retry", help="Try all compilers again, even those that worked.")] = False,
    form: options.Format = "table",
) -> None:
    """Show settings, the catalog file and toolchains.

    For each arch it shows the compiler that would be used, or what is missing. A compiler is tried on a small program;
    if that works, it is tried again only when the compiler, its flags or its headers change.

    Example: catalog doctor
    """
    from catalog.doctor import Finding, diagnose, forget_trials

    if retry:
        forget_trials()
    print_rows(Finding._fields, diagnose(db_path(context)), form)


@app.command(cls=DemandCommand)
def check(
    context: typer.Context,
    choices: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The libraries that catalog freeze wrote to this file.")
    ] = None,
    arch: Annotated[
        str | None, options.arch_option("Arch: gfx950, host, ... Default: host, or the archs of the trace.")
    ] = None,
    form: options.Format = "table",
) -> None:
    """Check that the cache has the kernels for problems.

    The problems come from a trace, a set, a model or a file of choices.

    Lists each library that is absent, unsound, or of another ABI. No compiler is started: a library of any compiler
    counts, as it does when compiling is disabled. A file of choices needs exactly the libraries that it names.

    Exits with 1 when a library is not usable or a problem has no kernels.

    Example: catalog check --trace calls.jsonl

    Example: catalog check --model config.json --tp 8 --arch gfx942
    """
    from catalog.errors import UsageError
    from catalog.messages import counted
    from catalog.runtime.catalog import Catalog
    from catalog.runtime.readiness import COLUMNS, faults_of_choices, faults_of_kernels

    stated, notes, complete = stated_demand(context), list[str](), True
    if choices is not None:
        if stated or arch is not None:
            raise UsageError("--choices cannot be combined with another source of problems or with --arch")
        faults = faults_of_choices(choices)
    else:
        # Selection that may compile ignores what the cache has, and so shows what it should have.
        catalog = Catalog(db_path(context), compile=True)
        answers = stated.read(arch).answers(catalog)
        notes, complete = [*answers.reasons, answers.about], answers.complete
        faults = faults_of_kernels(catalog, answers.kernels)
    if faults or form != "table":
        print_rows(COLUMNS, faults, form)
    for line in (*notes, f"{counted(len(faults), 'library')} missing or unusable"):
        note(line)
    if faults or not complete:
        raise typer.Exit(1)


@app.command()
def parity(
    context: typer.Context,
    receipt: Annotated[str, typer.Option(help="Receipt by number or name: 0, flash, pytorch, ...")] = "0",
    arch: Annotated[list[str] | None, options.arch_option("Arch; may be repeated. Default: gfx950.")] = None,
    mask_impl: options.MaskImpl = "generic",
    revision: options.Revision = None,
    ck_root: Annotated[
        Path | None, typer.Option(help="Your CK checkout: run its generator instead of reading the built-in lists.")
    ] = None,
    timeout: options.GeneratorTimeout = 600.0,
    operation: options.Operation = None,
    space: Annotated[str | None, typer.Option(help="GEMM: tile_engine or dispatcher. Default: tile_engine.")] = None,
    family: Annotated[list[str] | None, typer.Option(help="GEMM: only lists of this family; may be repeated.")] = None,
    form: options.Format = "table",
) -> None:
    """Compare kernel names with upstream's generator.

    With --ck-root the generator of that checkout is run, and the revision is detected from the checkout unless
    --revision names one. If names differ, they are compared with the nearest known revision, and the last line is the
    command that adopts the checkout. Nothing is written into the checkout.

    Attention's names are compared by receipt. GEMM's are compared list by list, one list for each family, type and
    layout, without storing any kernel.

    Exits with 1 when names differ, with 2 when there is no reference to compare with.

    Example: catalog parity --receipt 0 --arch gfx950

    Example: catalog parity --operation gemm --revision 2025-11 --arch gfx950
    """
    from catalog import ops as operations

    of = operations.operation(operation or operations.DEFAULT)
    archs = arch or ["gfx950"]
    if of.lists:
        _compare_lists(open_catalog(context), of, _Asked(archs, revision, space, family or []), ck_root, timeout, form)
        return
    if space or family:
        raise UsageError("--space and --family are options of operations that are compared by lists, such as gemm")
    from catalog.errors import MissingReferenceError
    from catalog.messages import counted
    from catalog.rules.parity import COLUMNS, Comparison, Live, exit_code
    from catalog.rules.receipts import resolve_receipts
    from catalog.schema.lineage import Wanted

    catalog, reference, its, advice = open_catalog(context), None, revision, dict[str, str]()
    if ck_root is not None:
        reference = Live(of.generator(ck_root, timeout))
        its = revision or reference.generator.revision
        note(reference.generator.about)
    found: list[Comparison | MissingReferenceError] = []
    for name in archs:
        for number in resolve_receipts(catalog.spec(name, its), receipt):
            try:
                wanted = Wanted(name, its, mask_impl)
                comparison, nearest = (
                    (catalog.rows.parity(wanted, number, reference), None)
                    if reference is None or revision is not None
                    else catalog.rows.parity_of_checkout(wanted, number, reference)
                )
                if nearest is not None:
                    advice[name] = (
                        f"Nearest known revision: {nearest.revision}, with {nearest.common:,} of "
                        f"{counted(len(comparison.reference), 'name')} in common. To make the kernels of the checkout "
                        f"rows:\n  catalog populate --ck-root {shlex.quote(str(ck_root))} --arch {name}"
                        f"{'' if mask_impl == 'generic' else f' --mask-impl {mask_impl}'}"
                    )
            except MissingReferenceError as error:
                note(error.printed)
                found.append(error)
            else:
                found.append(comparison)
                if form == "table":
                    print(comparison.report())
    if form != "table":
        print_rows(COLUMNS, [one.row for one in found if isinstance(one, Comparison)], form)
    for lines in advice.values():
        note(lines)
    raise typer.Exit(exit_code(found))


class _Asked(NamedTuple):
    archs: list[str]
    revision: str | None
    space: str | None
    families: list[str]


def _compare_lists(
    catalog: Catalog, of: Operation, asked: _Asked, ck_root: Path | None, timeout: float, form: str
) -> None:
    from catalog.errors import MissingReferenceError
    from catalog.rules.lists import columns_of, compare_lists, listings_of, report
    from catalog.schema.trait_text import read_family

    families = [read_family(family, of.traits) for family in asked.families]
    generator, reference, revision = None, None, asked.revision
    if ck_root is not None:
        generator = of.generator(ck_root, timeout)
        revision = revision or generator.revision
        note(generator.about)
    rows, codes = [], {0}
    for arch in asked.archs:
        try:
            spec = catalog.spec(arch, revision, asked.space, operation=of.name)
            if generator is not None:
                runs = generator.runs(str(spec.arch), spec.lineage().variant, ())
                runs = [run for run in runs if not families or run.traits["family"] in families]
                reference = listings_of(generator.lists(runs, lambda done: None), of)
            found = compare_lists(spec, families, reference)
        except MissingReferenceError as error:
            note(error.printed)
            codes.add(error.exit_code)
            continue
        codes.add(int(not all(one.passed for one in found)))
        rows += [one.row for one in found]
        if form == "table":
            print(report(found))
    if form != "table":
        print_rows(columns_of(of), rows, form)
    raise typer.Exit(1 if 1 in codes else max(codes))


@app.command()
def diff(
    context: typer.Context,
    arch: options.Arch,
    before: Annotated[str, typer.Option("--from", help="Upstream revision to start from, for example 2025-07.")],
    after: Annotated[str, typer.Option("--to", help="Upstream revision to compare with, for example 2026-05.")],
    mask_impl: options.MaskImpl = "generic",
    receipt: Annotated[str | None, typer.Option(help="Only the kernels of this receipt, by number or name.")] = None,
    names: Annotated[
        bool, typer.Option("--names", help="Print every kernel: + appeared, - vanished, ~ changed.")
    ] = False,
    operation: options.Operation = None,
    form: options.Format = "table",
) -> None:
    """Compare the kernels of two upstream revisions.

    Shows the kernels that appeared, vanished or changed, counted by family.

    Example: catalog diff --from 2025-07 --to 2026-05 --arch gfx942 --receipt 0
    """
    from catalog.ops import DEFAULT
    from catalog.rules import diff as difference
    from catalog.rules.receipts import resolve_receipts

    catalog, of, rows = open_catalog(context), operation or DEFAULT, list[list[Any]]()
    spec = catalog.spec(arch, after, operation=of)
    for number in resolve_receipts(spec, receipt) if receipt is not None else (None,):
        found = catalog.diff(arch, before, after, mask_impl=mask_impl, receipt=number, operation=of)
        if form == "table":
            print(found.listing() if names else found.report())
        rows += found.kernel_rows() if names else found.family_rows()
    if form != "table":
        print_rows(difference.KERNEL_COLUMNS if names else difference.FAMILY_COLUMNS, rows, form)


@app.command()
def conformance(
    arch: Annotated[
        list[str] | None, options.arch_option("Arch to check; may be repeated. Default: every arch, in each revision.")
    ] = None,
    revision: options.Revision = None,
    build: Annotated[
        bool, typer.Option("--build/--no-build", help="Build and run a kernel of each family. Default: build.")
    ] = True,
    problems_only: Annotated[
        bool, typer.Option("--failures", help="Print only checks that failed, were skipped or have a note.")
    ] = False,
    ck_root: options.CkRoot = None,
    jobs: options.Jobs = None,
    operation: options.Operation = None,
    form: options.Format = "table",
) -> None:
    """Check that archs meet all requirements.

    Checks the spec, names, ids, rules, and a kernel of each family.

    It works in a scratch catalog; compiled kernels stay in the cache. Steps that need something this machine lacks are
    skipped, with the reason. Exits with 1 when a check failed.

    Example: catalog conformance --arch host
    """
    from catalog.conformance.check import ConformanceOptions, asked_archs, check_arch
    from catalog.conformance.findings import COLUMNS, Finding, Verdict
    from catalog.ops import DEFAULT
    from catalog.settings import choose

    choose(ck_root=ck_root)

    def on_finding(finding: Finding) -> None:
        if sys.stderr.isatty() and finding.verdict is Verdict.FAILED:
            note(f"{finding.check}, {finding.subject}: {finding.about}")

    of = operation or DEFAULT
    asked = asked_archs(arch or (), revision, of)
    reports = [check_arch(ConformanceOptions(name, its, build, jobs, of), on_finding) for name, its in asked]
    shown = [verdict for verdict in Verdict if not (problems_only and verdict is Verdict.PASSED)]
    print_rows(COLUMNS, [row for report in reports for row in report.rows(*shown)], form)
    for report in reports:
        note(report.summary)
    if not all(report.conforms for report in reports):
        raise typer.Exit(1)
