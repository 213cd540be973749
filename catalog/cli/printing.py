"""Printing: results to stdout, notes to stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[Any]], form: str) -> int:
    """Print ``rows`` in the format named ``form``, and return their number."""
    from catalog.formats import Format, write_rows

    return write_rows(columns, rows, Format(form), sys.stdout)


def print_result(text: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], form: str) -> None:
    """Print ``text`` if the format is ``table``, else ``rows``, which hold the same result."""
    if form == "table":
        print(text)
    else:
        print_rows(columns, rows, form)


def note(text: str) -> None:
    """Print a line to stderr."""
    print(text, file=sys.stderr)
