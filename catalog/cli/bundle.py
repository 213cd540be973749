"""``catalog cache export`` and ``catalog cache import``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from catalog.cli.cache import cache_app, open_catalog
from catalog.cli.printing import FormatOption, print_told


@cache_app.command("export")
def export_command(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The bundle to write.")],
    where: Annotated[str, typer.Option(metavar="EXPR", help="SQL expression: which kernels. Default: all.")] = "",
    arch: Annotated[str | None, typer.Option("--arch", help="Only this arch; host is this machine's CPU.")] = None,
    form: FormatOption = "table",
) -> None:
    """Write built kernels into one file for other machines.

    With the records of their builds and their timings.

    Example: catalog cache export --where "hdim_q=128" --arch host kernels.bundle
    """
    from catalog.messages import counted, subject
    from catalog.runtime.devices.here import resolve_arch
    from catalog.runtime.exchange import export_bundle

    done = export_bundle(open_catalog(context), where, file, None if arch is None else resolve_arch(arch))
    what = f"{counted(done.libraries, 'library')} and {counted(done.timings, 'timing')}"
    told = f"{what} -> {file} ({done.bytes / 1e6:.1f} MB)"
    if done.unbuilt:
        told += f"\n{subject(done.unbuilt, 'more kernel')} selected, and not built."
    print_told(told, ["file", *asdict(done)], [[str(file), *asdict(done).values()]], form)


@cache_app.command("import")
def import_command(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A bundle that catalog cache export wrote.")],
    trust: Annotated[bool, typer.Option("--trust", help="I trust its source: its libraries are code.")] = False,
    form: FormatOption = "table",
) -> None:
    """Take in the built kernels of a bundle.

    Everything in it is checked before anything is written.

    Example: catalog cache import --trust kernels.bundle
    """
    from catalog.messages import counted, subject
    from catalog.runtime.exchange import import_bundle

    done = import_bundle(open_catalog(context), file, trust=trust)
    there = f"{done.present:,} {'was' if done.present == 1 else 'were'} there"
    told = f"{subject(done.new, 'library')} new, {there}; {counted(done.timings, 'new timing')}"
    if done.no_rows:
        told += f"\n{subject(done.no_rows, 'library')} of no row of this catalog: stored, not recorded."
    print_told(told, list(asdict(done)), [list(asdict(done).values())], form)
