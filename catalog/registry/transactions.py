"""Write transactions, and how long statements and other writers are waited for."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from catalog.errors import RegistryError

BUSY_TIMEOUT_S = 30.0
"""How long a statement waits for another connection's lock."""

STEPS_PER_SIGNAL_CHECK = 100_000
"""Instructions of SQLite: a few milliseconds."""


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """One write transaction: everything inside happens, or nothing.

    Raises:
        RegistryError: the file is locked for longer than the busy timeout, read-only, or the disk is full.
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
    """Let Ctrl-C end a long statement: Python handles signals when SQLite calls back."""
    connection.set_progress_handler(lambda: False, STEPS_PER_SIGNAL_CHECK)
    try:
        yield
    except sqlite3.OperationalError as error:
        if str(error) != "interrupted":
            raise
        raise KeyboardInterrupt from None  # which SQLite swallowed when it ended the statement
    finally:
        connection.set_progress_handler(None, 0)


@contextmanager
def impatient(connection: sqlite3.Connection) -> Iterator[None]:
    """Wait for no other writer."""
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
    """For a transaction about as large as the file: a rollback journal where nobody else has the file open.

    In WAL every page is written twice, to the log and to the file; with a rollback journal new pages are written once.
    """
    # Only the sole user of a file can change its journal: where another connection has it open, it stays in WAL.
    with impatient(connection), suppress(sqlite3.OperationalError):
        connection.execute("PRAGMA journal_mode = TRUNCATE")
        connection.execute("PRAGMA synchronous = FULL")  # less could corrupt a file without WAL when power fails
    try:
        yield
    finally:
        with suppress(sqlite3.OperationalError):
            connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
