"""Check the SQL expressions of a spec when it is loaded, against the columns that they may use."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable
from functools import cache

from catalog.forks import Lock, forks
from catalog.messages import did_you_mean
from catalog.schema.fields import IDENTITY, TRAITS

SELECT_PARAMETERS = (
    *("batch", "nhead_q", "nhead_k", "seqlen_q", "seqlen_k", "hdim_q", "hdim_v"),
    *("tokens_k", "page_size", "num_pages", "num_splits", "seqlen_new", "rotary_dim"),
    *("dropout", "dlse", "compute_units"),
)
"""What a selection rule may ask of the problem (group mode: the longest sequences) and of the device."""

SELECT_COLUMNS = ("hw_valid", "dispatch_order")


class _Reader:
    """Lets SQLite itself say which columns an expression reads, or why it is none."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._lock = Lock()
        self._connection = sqlite3.connect(":memory:", check_same_thread=False, cached_statements=0)
        self._connection.execute(f"CREATE TABLE kernel ({', '.join((*IDENTITY, *TRAITS, *SELECT_COLUMNS))})")
        self._connection.set_authorizer(self._note)

    def _note(self, action: int, _table: str | None, column: str | None, *_: str | None) -> int:
        if action == sqlite3.SQLITE_READ and column:
            self._seen.add(column)
        return sqlite3.SQLITE_OK

    def columns(self, expression: str) -> frozenset[str]:
        """The columns that ``expression`` reads.

        Raises:
            sqlite3.Error: it is no SQL over the kernel columns and :data:`SELECT_PARAMETERS`.
        """
        with self._lock:
            self._seen.clear()
            self._connection.execute(f"EXPLAIN SELECT ({expression}) FROM kernel", dict.fromkeys(SELECT_PARAMETERS))
            return frozenset(self._seen)


@cache
def _reader(process: int) -> _Reader:
    """The reader of this process, which is so many forks away from the first one: each has a connection of its own."""
    return _Reader()


@cache
def columns_read(expression: str) -> frozenset[str]:
    """The columns that an expression of a spec reads.

    Raises:
        sqlite3.Error: it is no SQL over the kernel columns and :data:`SELECT_PARAMETERS`.
    """
    return _reader(forks()).columns(expression)


def what_is_wrong(expression: str, parameters: Iterable[str] = ()) -> str | None:
    """Why ``expression`` is no SQL over the kernel columns and ``:parameters``; None when it is."""
    allowed = list(parameters)
    unknown = [name for name in re.findall(r":(\w+)", expression) if name not in allowed]
    if unknown:
        return f"no parameter :{unknown[0]}; allowed: {', '.join(f':{name}' for name in allowed) or 'none'}"
    try:
        columns_read(expression)
    except sqlite3.Error as error:
        message = str(error)
        missing = re.fullmatch(r"no such column: (\w+)", message)
        meant = did_you_mean(missing.group(1), (*IDENTITY, *TRAITS)) if missing else ""
        return f"{message} in {expression!r}{meant}"
    return None
