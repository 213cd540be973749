"""``catalog report`` and ``catalog datasette-metadata``: the catalog for people to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from catalog.cli.printing import FormatOption, print_told


def report(
    context: typer.Context,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder for index.html; made when it is not there.")
    ],
    arch: Annotated[str | None, typer.Option("--arch", help="Only this arch; host is this machine's CPU.")] = None,
    peaks: Annotated[
        bool, typer.Option("--peaks", help="Measure what this machine's CPU reaches, for its rooflines.")
    ] = False,
    form: FormatOption = "table",
) -> None:
    """Write a page of plots of what was measured.

    Rooflines, speed by length and tile, selection, compile times, coverage.

    One file that needs nothing else, to open in a browser, send or print. It needs the extra "report".

    Example: catalog report --out report
    """
    from catalog.report.page import write_report
    from catalog.runtime.catalog import Catalog
    from catalog.runtime.devices.here import resolve_arch
    from catalog.settings import settings

    catalog = Catalog(context.find_root().params["db"] or settings().db)
    page = write_report(catalog, out, arch and resolve_arch(arch), peaks=peaks)
    print_told(str(page), ["page"], [[str(page)]], form)


def datasette_metadata(
    context: typer.Context,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write it there. Default: print it.")
    ] = None,
) -> None:
    """Write metadata for Datasette, a SQLite browser.

    The meanings of columns, and queries to start from.

    Then: datasette catalog.db --metadata metadata.json

    Example: catalog datasette-metadata --out metadata.json
    """
    from catalog.cli.rows_out import write_file
    from catalog.report.datasette import metadata_text
    from catalog.settings import settings

    text = metadata_text(context.find_root().params["db"] or settings().db)
    print(text, end="") if out is None else print(write_file(out, text))
