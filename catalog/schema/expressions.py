"""Check the SQL expressions of specs and of restrictions when they are loaded.

They run while rows are made and while kernels are selected, in this process and without a time limit. So they may only
compute with the columns of one row: no subqueries, and no function that turns a short value into a long one.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable
from functools import cache

from catalog.forks import Lock, forks
from catalog.messages import did_you_mean
from catalog.ops.protocol import Operation

DEVICE_PARAMETERS = ("compute_units", "features")
"""Parameters about the device that a selection rule may use, in addition to those of an operation's problems."""

SELECT_COLUMNS = ("hw_valid", "dispatch_order")


_PARAMETER = re.compile(r":(\w+)")

FUNCTIONS = frozenset(
    (
        *("abs", "coalesce", "glob", "ifnull", "iif", "instr", "length", "like", "likelihood", "likely", "lower"),
        *("max", "min", "nullif", "round", "sign", "substr", "substring", "typeof", "unlikely", "upper"),
    )
)
"""Functions that an expression may call. Aggregates are excluded because they read many rows."""


class _Reader:
    """Lets SQLite itself report which columns an expression reads, or why it is invalid."""

    def __init__(self, operation: Operation) -> None:
        self._parameters = dict.fromkeys((*operation.parameters, *DEVICE_PARAMETERS))
        self._seen: set[str] = set()
        self._selects = 0
        self._refused: str | None = None
        self._lock = Lock()
        self._connection = sqlite3.connect(":memory:", check_same_thread=False, cached_statements=0)
        self._connection.execute(
            f"CREATE TABLE kernel ({', '.join((*operation.traits.identity, *operation.traits, *SELECT_COLUMNS))})"
        )
        self._connection.set_authorizer(self._note)

    def _note(self, action: int, first: str | None, second: str | None, *_: str | None) -> int:
        if action == sqlite3.SQLITE_READ and second:
            self._seen.add(second)
        elif action == sqlite3.SQLITE_SELECT:
            self._selects += 1
            if self._selects > 1:
                self._refused = "subqueries are not allowed"
        elif action == sqlite3.SQLITE_FUNCTION and second not in FUNCTIONS:
            self._refused = f"function {second} is not allowed"
        return sqlite3.SQLITE_OK if self._refused is None else sqlite3.SQLITE_DENY

    def columns(self, expression: str) -> frozenset[str]:
        """The columns that ``expression`` reads.

        Raises:
            sqlite3.Error: it is not SQL over the kernel columns and the parameters, or it reads more than one row.
        """
        with self._lock:
            self._seen.clear()
            self._selects, self._refused = 0, None
            try:
                self._connection.execute(f"EXPLAIN SELECT 1 FROM kernel WHERE ({expression})", self._parameters)
            except sqlite3.DatabaseError:
                if self._refused is None:
                    raise
                raise sqlite3.DatabaseError(self._refused) from None
            return frozenset(self._seen)


@cache
def _reader(process: int, operation: Operation) -> _Reader:
    """The reader of one process, by :func:`~catalog.forks.forks`: each process needs its own connections."""
    return _Reader(operation)


@cache
def columns_read(expression: str, operation: Operation) -> frozenset[str]:
    """The columns that an expression of a spec of ``operation`` reads.

    Raises:
        sqlite3.Error: it is not SQL over the operation's columns and the parameters of selection rules.
    """
    return _reader(forks(), operation).columns(expression)


def parameters_named(expression: str) -> list[str]:
    """The parameters that an expression names, as often as it names them."""
    return _PARAMETER.findall(expression)


def what_is_wrong(expression: str, operation: Operation, parameters: Iterable[str] = ()) -> str | None:
    """Why ``expression`` is not SQL over the columns of ``operation`` and ``:parameters``; None when it is."""
    allowed = list(parameters)
    unknown = [name for name in parameters_named(expression) if name not in allowed]
    if unknown:
        return f"no parameter :{unknown[0]}; allowed: {', '.join(f':{name}' for name in allowed) or 'none'}"
    try:
        columns_read(expression, operation)
    except sqlite3.Error as error:
        message = str(error)
        missing = re.fullmatch(r"no such column: (\w+)", message)
        meant = did_you_mean(missing.group(1), (*operation.traits.identity, *operation.traits)) if missing else ""
        return f"{message} in {expression!r}{meant}"
    return None
