"""Formatting of rows: a table for people; JSON, JSON Lines and CSV for programs."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from functools import cache
from itertools import chain, islice
from typing import Any, Literal, TextIO

from catalog.short_names import shortened

PAGE_ROWS = 500
"""Number of rows below each header on a terminal."""

_GAP = "  "
_NARROWEST_COLUMN = 6
_DIGITS = 6

_NAMES = ("name", "kernel")
_LONG_NAME = 48
"""Characters of a kernel name that fit beside other columns."""


_OUTCOMES = ("verified", "same_kernels", "passed", "deleted")
"""Columns of command output that are true or false."""


class Format(str, Enum):
    """An output format."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"
    CSV = "csv"


def write_rows(columns: Sequence[str], rows: Iterable[Sequence[Any]], form: Format, stream: TextIO) -> int:
    """Write ``rows`` to ``stream`` and return their number. JSON Lines, CSV and JSON are written row by row.

    If the reader goes away (``| head``), the output ends without an error. On a terminal a table fits the width and
    repeats its header, or has one line per value if there are too many columns. Long kernel names are cut to the parts
    that differ, and the common parts follow the table. Elsewhere no value is cut or wrapped.

    Raises:
        QueryError, RegistryError: raised by the iteration over ``rows``.
    """
    counted = _Counter(rows)
    try:
        for text in _TEXTS[form](columns, counted, stream):
            stream.write(text)
        stream.flush()
    except BrokenPipeError:
        _forget(stream)
    return counted.count


class _Counter:
    def __init__(self, rows: Iterable[Sequence[Any]]) -> None:
        self._rows = rows
        self.count = 0

    def __iter__(self) -> Iterator[Sequence[Any]]:
        for row in self._rows:
            self.count += 1
            yield row


def _forget(stream: TextIO) -> None:
    """Redirect the stream to nowhere; flushing its buffer at the interpreter's exit would fail again."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream.fileno())
    os.close(nothing)


@cache
def _boolean_columns() -> frozenset[str]:
    """Columns that JSON shows as true or false; other formats show 0 and 1, as in an expression."""
    from catalog.ops import operations
    from catalog.schema.columns import columns_of

    columns = (column for known in operations() for column in columns_of(known))
    return frozenset({*_OUTCOMES, *(column.name for column in columns if column.domain == "0, 1")})


def _json_objects(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    booleans = [index for index, name in enumerate(columns) if name in _boolean_columns()]
    for row in rows:
        values = list(row)
        for index in booleans:
            if isinstance(values[index], int):  # a problem's dropout is a probability
                values[index] = bool(values[index])
        try:
            yield json.dumps(dict(zip(columns, values, strict=True)), allow_nan=False)
        except ValueError:  # JSON has no infinity
            finite = [None if isinstance(value, float) and not math.isfinite(value) else value for value in values]
            yield json.dumps(dict(zip(columns, finite, strict=True)))


def _jsonl(columns: Sequence[str], rows: Iterable[Sequence[Any]], _: TextIO) -> Iterator[str]:
    for text in _json_objects(columns, rows):
        yield text + "\n"


def _json(columns: Sequence[str], rows: Iterable[Sequence[Any]], _: TextIO) -> Iterator[str]:
    separator = "[\n  "
    for text in _json_objects(columns, rows):
        yield separator + text
        separator = ",\n  "
    yield "[]\n" if separator == "[\n  " else "\n]\n"


class _Echo:
    """A file whose ``write`` returns its text, so that csv's writer returns the line."""

    def write(self, text: str) -> str:
        return text


def _csv(columns: Sequence[str], rows: Iterable[Sequence[Any]], _: TextIO) -> Iterator[str]:
    writer = csv.writer(_Echo())
    for row in chain([columns], rows):
        yield str(writer.writerow(row))


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]], stream: TextIO) -> Iterator[str]:
    return _terminal_table(columns, rows, stream) if stream.isatty() else _plain_table(columns, rows)


def _plain_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    lines = [tuple(columns), *(tuple(map(_cell, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    for line in lines:
        yield _GAP.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n"


def _terminal_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], stream: TextIO) -> Iterator[str]:
    from rich import box, console, table, text

    terminal = console.Console(file=stream)
    if len(columns) * _NARROWEST_COLUMN > terminal.width:
        yield from _records(columns, rows)
        return
    remaining = iter(rows)
    page = list(islice(remaining, PAGE_ROWS))
    while True:
        page, notes = _with_short_names(columns, page)
        grid = table.Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for index, name in enumerate(columns):
            numeric = bool(page) and all(row[index] is None or isinstance(row[index], (int, float)) for row in page)
            justify: Literal["left", "right"] = "right" if numeric else "left"
            grid.add_column(text.Text(name), overflow="fold", justify=justify, no_wrap=numeric)
        for row in page:
            grid.add_row(*(text.Text(_cell(value)) for value in row))
        with terminal.capture() as captured:
            terminal.print(grid)
            for note in notes:
                terminal.print(text.Text(note), soft_wrap=True)
        yield captured.get()
        page = list(islice(remaining, PAGE_ROWS))
        if not page:
            return


def _with_short_names(columns: Sequence[str], page: list[Sequence[Any]]) -> tuple[list[Sequence[Any]], list[str]]:
    """The rows with long kernel names cut to the parts that differ, and the notes below the table."""
    notes = []
    for index in (index for index, name in enumerate(columns) if name in _NAMES):
        names = [str(row[index]) for row in page]
        if max(map(len, names), default=0) <= _LONG_NAME:
            continue
        short, shared = shortened(names)
        page = [(*row[:index], name, *row[index + 1 :]) for row, name in zip(page, short, strict=True)]
        if shared:
            notes.append(f"In every {columns[index]}: {shared}. In full: --format csv.")
    return page, notes


def _records(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    """One line per value, for more columns than fit side by side."""
    width = max(map(len, columns))
    for row in rows:
        yield "".join(f"{name:<{width}}{_GAP}{_cell(value)}\n" for name, value in zip(columns, row, strict=True)) + "\n"


def _cell(value: Any) -> str:
    """A value for people: floats to six digits, text in one line. Other formats show the full value."""
    if isinstance(value, float) and abs(value) < 10**_DIGITS:
        return f"{value:.{_DIGITS}g}"
    return "" if value is None else " ".join(str(value).splitlines())


_TEXTS = {Format.TABLE: _table, Format.JSON: _json, Format.JSONL: _jsonl, Format.CSV: _csv}
