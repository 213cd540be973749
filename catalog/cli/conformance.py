"""``catalog conformance``: what every new arch must pass."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from catalog.cli.options import CkRootOption, Jobs, RevisionOption, arch_names
from catalog.cli.printing import FormatOption, print_rows


def conformance(
    arch: Annotated[
        list[str] | None,
        typer.Option(
            help="Arch to check, may be repeated; host is this machine's CPU. Default: every arch, in each revision.",
            autocompletion=arch_names,
        ),
    ] = None,
    revision: RevisionOption = None,
    build: Annotated[
        bool, typer.Option("--build/--no-build", help="Build and run a kernel of each family. Default: build.")
    ] = True,
    problems_only: Annotated[
        bool, typer.Option("--failures", help="Print only what failed, was skipped or is noted.")
    ] = False,
    ck_root: CkRootOption = None,
    jobs: Jobs = None,
    form: FormatOption = "table",
) -> None:
    """Check that archs hold what all archs must.

    Spec, names, ids, rules, and a kernel of each family.

    It works in a scratch catalog; compiled kernels stay in the cache. Steps that this machine lacks something for are
    skipped, with the reason. Exits with 1 when something failed.

    Example: catalog conformance --arch host
    """
    from catalog.conformance.check import ConformanceOptions, asked_archs, check_arch
    from catalog.conformance.findings import COLUMNS, Finding, Verdict
    from catalog.settings import choose

    choose(ck_root=ck_root)

    def on_finding(finding: Finding) -> None:
        if sys.stderr.isatty() and finding.verdict is Verdict.FAILED:
            print(f"{finding.check}, {finding.subject}: {finding.about}", file=sys.stderr)

    asked = asked_archs(arch or (), revision)
    reports = [check_arch(ConformanceOptions(name, its, build, jobs), on_finding) for name, its in asked]
    shown = [verdict for verdict in Verdict if not (problems_only and verdict is Verdict.PASSED)]
    print_rows(COLUMNS, [row for report in reports for row in report.rows(*shown)], form)
    for report in reports:
        print(report.summary, file=sys.stderr)
    if not all(report.conforms for report in reports):
        raise typer.Exit(1)
