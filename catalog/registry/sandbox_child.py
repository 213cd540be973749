"""The process that runs the SQL of queries: ``python -I -S sandbox_child.py``, started by :mod:`.sandbox`.

It holds one read-only SQLite connection and imports nothing from the catalog, so that it starts in milliseconds.
Requests come on stdin and answers go to stdout; each is a marshalled tuple after its length in 8 bytes:
``(method, CPU seconds, *arguments)`` is answered by ``("ok", value)``, ``("sql", message, denied)`` or ``("memory",)``.
"""

from __future__ import annotations

import _thread
import marshal
import math
import os
import resource
import select
import sqlite3
import sys

INTERPRETER_BYTES = 256 * 2**20
"""Address space in addition to SQLite's memory: the interpreter, its threads, and rows in transit."""

FILE_BYTES = 64 * 2**20
"""Maximum size of a file: the index (-shm) of a log of 32 GB. Nothing else is ever written."""

BUSY_TIMEOUT_S = 5.0


class _Guard:
    """The authorizer: admits SELECT, reads of known tables, and known functions.

    ``denied`` is the last refusal: ``table``, ``function`` or ``statement``, and its name.
    """

    def __init__(self, tables: frozenset[str], functions: frozenset[str]) -> None:
        self._tables = tables
        self._functions = functions
        self.denied: tuple[str, str] | None = None

    def __call__(
        self, action: int, first: str | None, second: str | None, database: str | None, source: str | None
    ) -> int:
        if action == sqlite3.SQLITE_SELECT:
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_READ and first is not None:
            if first.lower() in self._tables:
                return sqlite3.SQLITE_OK
            self.denied = "table", first
        elif action == sqlite3.SQLITE_FUNCTION and second is not None:
            if second.lower() in self._functions:
                return sqlite3.SQLITE_OK
            self.denied = "function", second
        else:
            self.denied = "statement", first or ""
        return sqlite3.SQLITE_DENY


class _Server:
    """The methods that requests may call; a failed statement raises ``sqlite3.Error`` or ``MemoryError``."""

    def __init__(self) -> None:
        self.guard = _Guard(frozenset(), frozenset())

    def open(self, uri: str, tables: frozenset[str], functions: frozenset[str], memory: int) -> int:
        """Open a file, then give up all rights except reading it; return its ``user_version``."""
        _limit(resource.RLIMIT_AS, memory + INTERPRETER_BYTES)
        self._connection = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        # Sorted and materialised rows count as memory, so temporary files need no limit.
        for pragma in ("query_only = ON", "trusted_schema = OFF", "temp_store = MEMORY", f"hard_heap_limit = {memory}"):
            self._connection.execute(f"PRAGMA {pragma}")
        version = int(self._connection.execute("PRAGMA user_version").fetchone()[0])
        self.guard = _Guard(tables, functions)
        self._connection.set_authorizer(self.guard)
        return version

    def compile(self, statement: str) -> None:
        """Have SQLite compile a statement without running it."""
        self._connection.execute(f"EXPLAIN {statement}").close()

    def execute(self, statement: str, parameters: object) -> tuple[str, ...]:
        """Start a statement and return the names of its columns."""
        self._cursor = self._connection.execute(statement, parameters)  # type: ignore[arg-type]
        return tuple(column[0] for column in self._cursor.description)

    def fetch(self, count: int) -> list[tuple[object, ...]]:
        """The next ``count`` rows of the statement, fewer at its end."""
        return self._cursor.fetchmany(count)


def _limit(which: int, amount: int) -> None:
    hard = resource.getrlimit(which)[1]
    if hard != resource.RLIM_INFINITY:
        amount = min(amount, hard)
    resource.setrlimit(which, (amount, hard))


def _end_with_parent() -> None:
    """End the process when stdin is closed, even inside a SQL function."""
    parent = select.poll()
    parent.register(0, 0)  # report only hang-ups
    parent.poll()
    os._exit(1)


def _answer(server: _Server, method: str, *arguments: object) -> bytes:
    server.guard.denied = None
    try:
        return marshal.dumps(("ok", getattr(server, method)(*arguments)))
    except MemoryError:
        return marshal.dumps(("memory",))
    except UnicodeDecodeError:  # SQLite's message quotes bytes from the file
        return marshal.dumps(("sql", "malformed schema that is not UTF-8", None))
    except sqlite3.Error as error:
        return marshal.dumps(("sql", str(error), server.guard.denied))


def main() -> None:
    """Answer requests until stdin ends."""
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, FILE_BYTES)
    _thread.start_new_thread(_end_with_parent, ())
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    server = _Server()
    answer = marshal.dumps(("ok", None))  # signals that the process has started
    while True:
        answers.write(len(answer).to_bytes(8, "little") + answer)
        answers.flush()
        length = requests.read(8)
        if not length:
            return
        method, seconds, *arguments = marshal.loads(requests.read(int.from_bytes(length, "little")))  # noqa: S302
        # The parent keeps the time. This limit ends a query if the parent is stopped or killed.
        _limit(resource.RLIMIT_CPU, math.ceil(sum(os.times()[:2]) + seconds) + 1)
        answer = _answer(server, method, *arguments)


if __name__ == "__main__":
    main()
