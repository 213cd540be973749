"""How a catalog's file is written: in WAL mode on a local disk, with a rollback journal where machines share it.

The processes that use a file in WAL mode share memory, which processes of other machines do not see: over a network
they would overwrite each other's pages. A rollback journal needs nothing but locks. Where locks do not reach other
machines either, no catalog is written.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Literal

from catalog.build.file_systems import file_system
from catalog.errors import RegistryError

Journal = Literal["wal", "delete"]
"""SQLite's names of the journal modes."""

_ELSEWHERE = (
    "Choose a file on a local disk with --db or CATALOG_DB: catalog merge collects the records of several machines, "
    "CATALOG_CHOICES selects without a catalog, and the cache of kernels may stay where it is."
)


def journal_for(path: Path) -> Journal:
    """The journal mode for a catalog at ``path``.

    Raises:
        RegistryError: machines share the file system, its locks do not reach all of them, and the folder can be
            written.
    """
    found = file_system(path.parent)
    if not found.network:
        return "wal"
    if not found.locks and os.access(path.parent, os.W_OK):
        raise RegistryError(
            f"the catalog {path} is on a file system that machines share ({found.type}) without locks that reach all "
            "of them: two that write to it would damage it",
            hint=_ELSEWHERE,
        )
    return "delete"


def leave_wal(connection: sqlite3.Connection, path: Path) -> None:
    """Switch a file that came from a local disk to a rollback journal; a file that cannot be written stays as it is.

    Raises:
        RegistryError: another process has it open in WAL mode.
    """
    try:
        connection.execute("PRAGMA journal_mode = DELETE")
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise RegistryError(
                f"the catalog {path} is in WAL mode, on a file system that machines share, and another process uses it",
                hint="Stop the other processes once: the next one switches the file to a rollback journal.",
            ) from None
    connection.execute("PRAGMA synchronous = FULL")  # without WAL, less could corrupt the file in a power cut
