"""Reading a table that anybody may have written: its lines, within limits, and every malformed line by its number."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

from catalog.errors import TableError, UsageError
from catalog.files import read_given

MOST_BYTES = 32 * 2**20
"""Size limit of a table."""

MOST_LINE = 2**18
"""Maximum number of characters of a line."""

MOST_SHOWN = 10
"""Number of malformed lines that a message shows."""

_NOTHING = "Nothing was imported."
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]{1,3})?")


class Lines:
    """The lines of a table, and the malformed ones found so far.

    Raises:
        UsageError: the file cannot be read or is too large.
        TableError: it is not text, or a line is too long.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._wrong: list[tuple[int, str]] = []
        try:
            content = read_given(path, MOST_BYTES)
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            number = content.count(b"\n", 0, error.start) + 1
            raise TableError(f"{path}:{number}: not UTF-8 text", hint=_NOTHING) from None
        self._text = text

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """Each line that is not empty, with its number."""
        for number, line in enumerate(self._all(), start=1):
            if len(line) > MOST_LINE:
                self.wrong(number, f"it has {len(line):,} characters; at most {MOST_LINE:,} are allowed")
            elif _CONTROL.search(line):
                self.wrong(number, "it has control characters")
            elif line.strip():
                yield number, line.strip()

    def _all(self) -> Iterator[str]:
        """The lines one by one: all at once, short lines would take many times the memory of the text."""
        start, end = 0, 0
        while end >= 0:
            end = self._text.find("\n", start)
            yield self._text[start : end if end >= 0 else None].removesuffix("\r")
            start = end + 1

    def wrong(self, number: int, reason: str) -> None:
        """Note that a line is malformed.

        Raises:
            TableError: with this line there are more than :data:`MOST_SHOWN`.
        """
        self._wrong.append((number, reason))
        if len(self._wrong) > MOST_SHOWN:
            self.check()

    def check(self) -> None:
        """Raise an error about all malformed lines.

        Raises:
            TableError: a line is malformed.
        """
        if not self._wrong:
            return
        shown = [f"{self.path}:{number}: {reason}" for number, reason in self._wrong[:MOST_SHOWN]]
        more = "\nMore lines are malformed." if len(self._wrong) > MOST_SHOWN else ""
        raise TableError("\n".join(shown) + more, hint=_NOTHING)


def milliseconds(text: str, unit_ms: float) -> float | None:
    """A time in units of ``unit_ms`` as ms; None if it is empty, 0 or inf, which tables use for not measured.

    Raises:
        ValueError: it is not a number, or outside the range from a nanosecond to eleven days.
    """
    if text in ("", "inf"):
        return None
    value = float(text) * unit_ms if len(text) < 60 and _NUMBER.fullmatch(text) else math.nan
    if value and not 1e-6 <= value <= 1e9:
        raise ValueError(f"{text[:40]!r} is not a time")
    return value or None
