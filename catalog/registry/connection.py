"""Connections to a catalog's file, read-only ones included, and their fate in a fork."""

from __future__ import annotations

import hashlib
import sqlite3
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from catalog.errors import RegistryError
from catalog.forks import SPAWN
from catalog.registry.journal import journal_for, leave_wal
from catalog.registry.migrate import migrate
from catalog.registry.transactions import BUSY_TIMEOUT_S

SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""Errors of SQLite. UnicodeDecodeError, because a message may quote bytes of a damaged file that are not UTF-8."""

CACHE_KIB = 524_288
"""Page cache: large enough for a population, so that its transaction writes every page once."""

LOG_BYTES = 4 << 20
"""Size to which the write-ahead log is cut when it starts over."""

_Opened = TypeVar("_Opened")


def sha256_hex(text: str) -> str:
    """SHA-256 of UTF-8 text, in hex; the SQL that makes kernel ids calls it as ``sha256``."""
    return hashlib.sha256(text.encode()).hexdigest()


def connect(path: Path) -> sqlite3.Connection:
    """A read-write connection to the catalog at ``path``, which is made or migrated if necessary.

    The connection is in autocommit mode: write in a :func:`~catalog.registry.transactions.transaction`. If the file
    cannot be written, the connection only reads.

    Raises:
        RegistryError: the file cannot be opened or made, is not a catalog, comes from a newer version, or is on a file
            system where no catalog is safe (:mod:`catalog.registry.journal`).
    """
    journal = journal_for(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = open_as_allowed(path, "mode=rwc", _open)
    except (OSError, *SQLITE_ERRORS) as error:
        raise _cannot_open(path, error) from None
    try:
        if journal == "delete":
            leave_wal(connection, path)
        migrate(connection, path, journal)
    except SQLITE_ERRORS as error:
        connection.close()
        raise _cannot_open(path, error) from None
    except BaseException:
        connection.close()
        raise
    return connection


def open_as_allowed(path: Path, parameters: str, opener: Callable[[Path, str], _Opened]) -> _Opened:
    """Return ``opener(path, parameters)``; if the folder is read-only, try again with parameters for reading only.

    A file in WAL mode needs its -shm file even for reading. Where that file cannot be made, the catalog can be opened
    as immutable, unless a log beside it has changes that such a reader would miss.

    Args:
        path: the file.
        parameters: of a SQLite URI.
        opener: opens the file and reads from it.

    Raises:
        sqlite3.Error: the file cannot be opened, or a journal or log beside it is not a regular file.
    """
    for suffix in ("-journal", "-wal", "-shm"):
        beside = path.with_name(path.name + suffix)
        try:
            mode = beside.stat().st_mode  # once: another process may remove its journal at any time
        except OSError:
            continue
        if not stat.S_ISREG(mode):  # opening a pipe would wait forever
            raise sqlite3.OperationalError(f"{beside.name} beside it is not a regular file")
    try:
        return opener(path, parameters)
    except sqlite3.Error as error:
        refused = any(words in str(error) for words in ("unable to open", "readonly"))
        if not refused or not path.is_file() or _has_log(path):
            raise
    return opener(path, "mode=ro&immutable=1")


def _has_log(path: Path) -> bool:
    try:
        return path.with_name(path.name + "-wal").stat().st_size > 0
    except FileNotFoundError:
        return False


def message_of(error: Exception) -> str:
    """The message of an error of :data:`SQLITE_ERRORS`."""
    return "its schema is damaged: it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)


def _open(path: Path, parameters: str) -> sqlite3.Connection:
    if _crossed and path.exists() and _file_of(path) in _crossed:
        raise RegistryError(
            f"the catalog {path} was open when this process was forked, and cannot be used in the child", hint=SPAWN
        )
    uri = f"{path.resolve().as_uri()}?{parameters}"
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA foreign_keys = ON")
        # WAL with NORMAL cannot corrupt the file; a power cut may lose the last transaction, never half of one.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")
        connection.create_function("sha256", 1, sha256_hex, deterministic=True)
        connection.execute("PRAGMA user_version").fetchone()  # the first statement that reads the file
    except BaseException:
        connection.close()
        raise
    return connection


def _cannot_open(path: Path, error: Exception) -> RegistryError:
    hint = "Choose another file with --db or CATALOG_DB, or change its permissions."
    if isinstance(error, UnicodeDecodeError) or "not a database" in str(error) or "malformed" in str(error):
        hint = "It is not an SQLite file, or it is damaged: move it away and populate again."
    elif _has_log(path) and "unable to open" in str(error):
        hint = "It has a log of changes (-wal), which cannot be read in a read-only folder: copy both elsewhere."
    elif "readonly" in str(error):  # raised only by a migration: an up-to-date file can be read
        hint = "This version must migrate it first: make it writable, or copy it to a writable folder."
    elif "locked" in str(error):
        hint = "Another process is writing to it; try again when it is done."
    return RegistryError(f"the catalog {path} cannot be opened: {message_of(error)}", hint=hint)


_crossed: set[tuple[int, int]] = set()
"""Device and inode of the files whose connections this process inherited through a fork."""


def leak(connection: sqlite3.Connection, path: Path) -> None:
    """Keep a connection copied by a fork open forever, and refuse to open its file again in this process.

    SQLite keeps a record of file locks in each process. The child's copy claims locks that only the parent holds: a
    second connection could damage the file, and closing the first could delete the parent's log.
    """
    import ctypes

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))  # never collected, and so never closed
    with suppress(OSError):
        _crossed.add(_file_of(path))


def _file_of(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino
