"""``catalog conformance``: what every new arch must pass."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from catalog.cli_options import CkRootOption, Jobs, RevisionOption
from catalog.cli_output import FormatOption, print_rows


def conformance(
    arch: Annotated[str, typer.Option("--arch", help="Arch to check; host is this machine's CPU.")],
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
    """Check that an arch holds what all archs must: spec, names, ids, rules, and a kernel of each family.

    It works in a scratch catalog; compiled kernels stay in the cache. Steps that this machine lacks something for are
    skipped, with the reason. Exits with 1 when something failed.

    Example: catalog conformance --arch host
    """
    from catalog.conformance.check import ConformanceOptions, check_arch
    from catalog.conformance.findings import COLUMNS, Finding, Verdict
    from catalog.settings import choose

    choose(ck_root=ck_root)

    def on_finding(finding: Finding) -> None:
        if sys.stderr.isatty() and finding.verdict is Verdict.FAILED:
            print(f"{finding.check}, {finding.subject}: {finding.about}", file=sys.stderr)

    report = check_arch(ConformanceOptions(arch, revision, build, jobs), on_finding)
    shown = [f for f in report.findings if not problems_only or f.verdict is not Verdict.PASSED]
    print_rows(COLUMNS, [finding.row for finding in shown], form)
    print(report.summary, file=sys.stderr)
    if not report.conforms:
        raise typer.Exit(1)
