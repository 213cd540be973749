"""``catalog shapes``: the sets of problems to tune and benchmark with."""

from __future__ import annotations

from typing import Annotated

import typer

from catalog.cli.printing import FormatOption, print_rows


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
    chosen = library.choose_columns(found, columns.split(",") if columns else ())
    print_rows(chosen, library.rows_of(found, chosen), form)
