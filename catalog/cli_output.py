"""How commands print rows: the option ``--format``, and the printing itself."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from catalog.output import Format

FORMATS = "table, json, jsonl or csv."

FormatOption = Annotated[str, typer.Option("--format", help=f"Output: {FORMATS}")]


def read_format(name: str) -> Format:
    """The format called ``name``.

    Raises:
        UsageError: there is none.
    """
    from catalog.errors import UsageError
    from catalog.output import Format

    if name not in [form.value for form in Format]:
        raise UsageError(f"--format {name}: it is one of {FORMATS}")
    return Format(name)


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[Any]], form: str) -> None:
    """Print ``rows`` to stdout in the format called ``form``.

    Raises:
        UsageError: there is no such format.
    """
    from catalog.output import write_rows

    write_rows(columns, rows, read_format(form), sys.stdout)
