"""``catalog cache export`` and ``catalog cache import``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from catalog.cli_cache import cache_app
from catalog.cli_output import FormatOption, print_told


@cache_app.command("export")
def export_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The bundle to write.")],
    where: Annotated[str, typer.Option(metavar="EXPR", help="SQL expression: which kernels. Default: all.")] = "",
    arch: Annotated[str | None, typer.Option("--arch", help="Only this arch; host is this machine's CPU.")] = None,
    form: FormatOption = "table",
) -> None:
    """Write built kernels, with what is known of them, into one file for other machines.

    Example: catalog cache export --where "hdim_q=128" --arch host kernels.bundle
    """
    from catalog.cli import _catalog
    from catalog.runtime.devices.here import resolve_arch
    from catalog.runtime.exchange import export_bundle

    done = export_bundle(_catalog(), where, file, None if arch is None else resolve_arch(arch))
    told = f"{done.libraries:,} libraries and {done.timings:,} timings -> {file} ({done.bytes / 1e6:.1f} MB)"
    if done.unbuilt:
        told += f"\n{done.unbuilt:,} more kernels are selected, and not built."
    print_told(told, ["file", *asdict(done)], [[str(file), *asdict(done).values()]], form)


@cache_app.command("import")
def import_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A bundle that catalog cache export wrote.")],
    trust: Annotated[bool, typer.Option("--trust", help="I trust its source: its libraries are code.")] = False,
    form: FormatOption = "table",
) -> None:
    """Take in the built kernels of a bundle; everything in it is checked before anything is written.

    Example: catalog cache import --trust kernels.bundle
    """
    from catalog.cli import _catalog
    from catalog.runtime.exchange import import_bundle

    done = import_bundle(_catalog(), file, trust=trust)
    told = f"{done.new:,} libraries are new, {done.present:,} were there; {done.timings:,} new timings"
    if done.no_rows:
        told += f"\n{done.no_rows:,} are of no row of this catalog: they are stored, not recorded."
    print_told(told, list(asdict(done)), [list(asdict(done).values())], form)
