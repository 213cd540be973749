"""How commands print rows: the option ``--format``, and the printing itself."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from catalog.cli.rows_out import Format

FORMATS = ("table", "json", "jsonl", "csv")
_IN_WORDS = "table, json, jsonl or csv"


def _offered() -> list[str]:
    return list(FORMATS)


def _known(name: str) -> str:
    """``name``, which is a format: a wrong one is told before the work."""
    from catalog.errors import UsageError
    from catalog.messages import did_you_mean

    if name not in FORMATS:
        raise UsageError(f"--format {name} is not allowed{did_you_mean(name, FORMATS)}", hint=f"Allowed: {_IN_WORDS}.")
    return name


FormatOption = Annotated[
    str, typer.Option("--format", help=f"Output: {_IN_WORDS}.", callback=_known, autocompletion=_offered)
]


def read_format(name: str) -> Format:
    """The format called ``name``, one of :data:`FORMATS`."""
    from catalog.cli.rows_out import Format

    return Format(name)


def print_told(text: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], form: str) -> None:
    """Print ``text`` for people; in other formats than a table ``rows``, which say the same."""
    if form == "table":
        print(text)
    else:
        print_rows(columns, rows, form)


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[Any]], form: str) -> None:
    """Print ``rows`` to stdout in the format called ``form``."""
    from catalog.cli.rows_out import write_rows

    write_rows(columns, rows, read_format(form), sys.stdout)
