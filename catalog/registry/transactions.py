"""Write transactions, and how long statements wait for other writers."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from catalog.errors import RegistryError

BUSY_TIMEOUT_S = 30.0
"""How long a statement waits for the lock of another connection."""

STEPS_PER_SIGNAL_CHECK = 100_000
"""SQLite instructions between checks for signals: a few milliseconds."""


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """One write transaction: all changes inside it happen, or none.

    Raises:
        RegistryError: the file stays locked beyond the busy timeout or is read-only, or the disk is full.
    """
    try:
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
    except sqlite3.OperationalError as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise RegistryError(f"the catalog cannot be written: {error}", hint="Nothing was changed.") from None


@contextmanager
def interruptible(connection: sqlite3.Connection) -> Iterator[None]:
    """Let Ctrl-C interrupt a long statement: Python handles signals when SQLite calls back."""
    connection.set_progress_handler(lambda: False, STEPS_PER_SIGNAL_CHECK)
    try:
        yield
    except sqlite3.OperationalError as error:
        if str(error) != "interrupted":
            raise
        raise KeyboardInterrupt from None  # SQLite swallowed the first one when it ended the statement
    finally:
        connection.set_progress_handler(None, 0)


@contextmanager
def impatient(connection: sqlite3.Connection) -> Iterator[None]:
    """Don't wait for other writers."""
    connection.execute("PRAGMA busy_timeout = 0")
    try:
        yield
    finally:
        connection.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}")


def shorten_log(connection: sqlite3.Connection) -> None:
    """Move the write-ahead log into the file and empty it, unless another connection is using it."""
    with impatient(connection), suppress(sqlite3.OperationalError):
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


@contextmanager
def written_once(connection: sqlite3.Connection) -> Iterator[None]:
    """For a transaction about as large as the file: use a rollback journal if nobody else has the file open.

    In WAL mode every page is written twice, to the log and to the file; with a rollback journal new pages once.
    """
    mode, synchronous = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous"))
    # Only the sole user of a file can change its journal mode: with other connections open it stays in WAL.
    with impatient(connection), suppress(sqlite3.OperationalError):
        connection.execute("PRAGMA journal_mode = TRUNCATE")
        connection.execute("PRAGMA synchronous = FULL")  # without WAL, less could corrupt the file in a power cut
    try:
        yield
    finally:
        with suppress(sqlite3.OperationalError):
            connection.execute(f"PRAGMA journal_mode = {mode}")
        connection.execute(f"PRAGMA synchronous = {synchronous}")
