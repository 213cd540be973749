"""Running the SQL of queries in a separate process, which can be ended at any moment.

SQLite calls no handler while an SQL function runs, so a process that runs SQLite itself can neither stop it nor respond
to Ctrl-C. The other process (:mod:`catalog.registry.sandbox_child`) holds only a read-only connection under an
authorizer. The operating system limits its memory and the size of any file that it might write. The parent waits for
answers with a deadline, after which it kills the process.
"""

from __future__ import annotations

import marshal
import math
import os
import select
import sqlite3
import subprocess
import sys
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from catalog.errors import CatalogError, QueryError
from catalog.settings import settings

START_SECONDS = 60.0
"""Time limit for starting the process, apart from the time limit of the query."""

_CHILD = Path(__file__).with_name("sandbox_child.py")
_LONGEST_WAIT_S = 86_400.0

Row = tuple[Any, ...]
Parameters = Sequence[str | int] | Mapping[str, str | int | None]


@dataclass(frozen=True)
class Limits:
    """Limits of a query: seconds inside SQLite, and bytes of memory, including sorted and temporary rows."""

    seconds: float
    memory: int = 2**30

    @classmethod
    def of_settings(cls) -> Limits:
        """Limits from ``CATALOG_QUERY_TIMEOUT`` and ``CATALOG_QUERY_MEMORY``."""
        return cls(settings().query_timeout, settings().query_memory)


class SqlError(sqlite3.Error):
    """SQLite's error for a statement. ``denied`` has the kind (table, function, statement) and the name that the
    authorizer refused, or is None.
    """

    def __init__(self, message: str, denied: tuple[str, str] | None) -> None:
        super().__init__(message)
        self.denied = denied


class Sandbox:
    """A process that runs statements on one file, one at a time. Only the time in which it works counts.

    Every method raises QueryError when a limit is exceeded; that ends the process, as :meth:`close` does.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._owner = os.getpid()
        try:
            self._process = subprocess.Popen(  # noqa: S603 - this Python, and a file of ours
                [sys.executable, "-I", "-S", str(_CHILD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # so that Ctrl-C reaches only this process, which then ends the other
            )
        except OSError as error:
            raise CatalogError(f"queries cannot run: {sys.executable}: {error.strerror}") from None
        self._end = weakref.finalize(self, _kill, self._process)
        self._requests = cast("IO[bytes]", self._process.stdin)
        self._answers = cast("IO[bytes]", self._process.stdout).fileno()
        self._answered = select.poll()
        self._answered.register(self._answers, select.POLLIN)
        self._left = START_SECONDS
        try:
            self._receive()
        except TimeoutError:
            self.close()
            raise CatalogError(f"queries cannot run: {sys.executable} did not start in {START_SECONDS:g} s") from None
        except BrokenPipeError:
            raise self._ended() from None
        except BaseException:
            self.close()
            raise
        self.restart_clock()

    def restart_clock(self) -> None:
        """Give the next statements the full time again."""
        self._left = self._limits.seconds

    def open(self, uri: str, tables: Collection[str], functions: Collection[str]) -> int:
        """Open the file of a SQLite URI, and return its ``user_version``.

        Afterwards only these tables and functions can be used.

        Raises:
            SqlError: it cannot be opened.
        """
        arguments = (uri, frozenset(tables), frozenset(functions), self._limits.memory)
        return cast("int", self._request("open", *arguments))

    def compile(self, statement: str) -> None:
        """Compile a statement without running it.

        Raises:
            SqlError: it is wrong or refused.
        """
        self._request("compile", statement)

    def execute(self, statement: str, parameters: Parameters = ()) -> tuple[str, ...]:
        """Start a statement, ending the previous one, and return the names of its columns.

        Raises:
            SqlError: it is wrong or refused, or the file cannot be read.
        """
        return cast("tuple[str, ...]", self._request("execute", statement, parameters))

    def fetch(self, count: int) -> list[Row]:
        """The next ``count`` rows of the statement, fewer at its end.

        Raises:
            SqlError: as in :meth:`execute`.
        """
        return cast("list[Row]", self._request("fetch", count))

    def close(self) -> None:
        """End the process at once, whatever it is doing."""
        self._end()

    def _request(self, method: str, *arguments: Any) -> object:
        if not self._end.alive or os.getpid() != self._owner:
            raise QueryError("the query was closed", hint="Run it again.")
        try:
            self._send(marshal.dumps((method, min(self._left, _LONGEST_WAIT_S), *arguments)))
            kind, *answer = self._receive()
        except BrokenPipeError:
            raise self._ended() from None
        except TimeoutError:
            raise self._too_slow() from None
        except BaseException:  # such as Ctrl-C: nobody will read the answer
            self.close()
            raise
        if kind == "memory":
            raise self._too_large()
        if kind == "sql":
            message, denied = answer
            raise SqlError(message, denied)
        return answer[0]

    def _send(self, message: bytes) -> None:
        self._requests.write(len(message).to_bytes(8, "little") + message)
        self._requests.flush()

    def _receive(self) -> tuple[Any, ...]:
        started = time.monotonic()
        deadline = started + self._left
        length = int.from_bytes(self._read(8, deadline), "little")
        message = self._read(length, deadline)
        self._left -= time.monotonic() - started
        answer: tuple[Any, ...] = marshal.loads(message)  # noqa: S302 - written by sandbox_child
        return answer

    def _read(self, size: int, deadline: float) -> bytearray:
        received = bytearray()
        while len(received) < size:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if self._answered.poll(math.ceil(min(left, _LONGEST_WAIT_S) * 1000)):
                part = os.read(self._answers, size - len(received))
                if not part:
                    raise BrokenPipeError
                received += part
        return received

    def _too_slow(self) -> QueryError:
        self.close()
        return QueryError(
            f"the query took longer than {self._limits.seconds:g} s and was stopped",
            hint="Narrow it, or set CATALOG_QUERY_TIMEOUT to more seconds.",
        )

    def _too_large(self) -> QueryError:
        self.close()
        return QueryError(
            f"the query needed more than {self._limits.memory / 2**20:,.0f} MiB of memory and was stopped",
            hint=f"Narrow it, or set CATALOG_QUERY_MEMORY to more bytes than {self._limits.memory}.",
        )

    def _ended(self) -> CatalogError:
        """The error for a process that has ended on its own."""
        said = cast("IO[bytes]", self._process.stderr).read().decode(errors="replace").strip().rpartition("\n")[2]
        status = self._process.wait()
        self.close()
        if "MemoryError" in said:
            return self._too_large()
        return CatalogError(f"the process of the query ended: {said or f'status {status}'}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(BrokenPipeError), process:  # closes the pipes and waits
        pass
