"""Schema versions of a catalog's file, and the migrations between them.

Step N is a file of SQL, ``migrations/N_….sql``, that takes a file from ``user_version`` N - 1 to N. A released step
never changes, and nothing in it derives from this program's traits: renaming a trait is a new step. A new view alone
needs a step too, one that holds only a comment.

The version is SQLite's own ``user_version``. The migrations of sqlite-utils do not fit: they look for missing steps
before they take a lock, commit each step separately, and cannot refuse the file of a newer program.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path

from catalog.errors import RegistryError
from catalog.registry.journal import Journal
from catalog.registry.transactions import transaction
from catalog.registry.views import drop_views, make_views

APPLICATION_ID = 0x6B636174  # "kcat": distinguishes a catalog from any other SQLite file

STEPS = tuple(sorted(Path(__file__).with_name("migrations").glob("*.sql")))
"""The steps in order. Their number is the newest version."""


def schema_version(connection: sqlite3.Connection, path: Path, schema: str = "main") -> int:
    """The schema version of the file at ``path``, which a connection has as ``schema``; 0 for a new file.

    Raises:
        RegistryError: it is not a catalog, or comes from a newer version.
        sqlite3.Error: it cannot be read.
    """
    version = int(connection.execute(f"PRAGMA {schema}.user_version").fetchone()[0])
    if connection.execute(f"PRAGMA {schema}.application_id").fetchone()[0] == APPLICATION_ID:
        if not 0 <= version <= len(STEPS):
            raise RegistryError(
                f"the catalog {path} has schema version {version}; this program knows up to {len(STEPS)}",
                hint="Upgrade kernel-catalog, or choose another file with --db or CATALOG_DB.",
            )
        return version
    if connection.execute(f"SELECT count(*) FROM {schema}.sqlite_schema").fetchone()[0]:
        raise RegistryError(
            f"{path} is an SQLite file, but not a catalog", hint="Choose another file with --db or CATALOG_DB."
        )
    return 0


def migrate(connection: sqlite3.Connection, path: Path, journal: Journal) -> None:
    """Bring the file at ``path`` to the newest version in one transaction, and a new one to its journal mode.

    Raises:
        RegistryError: as in :func:`schema_version`, or the file cannot be written.
        sqlite3.Error: it cannot be read or is damaged.
    """
    if schema_version(connection, path) == len(STEPS):
        return
    connection.execute(f"PRAGMA journal_mode = {journal}")
    # A step may rebuild a table: dropping the old one must not delete the rows that refer to it. SQLite ignores this
    # pragma inside a transaction.
    connection.execute("PRAGMA foreign_keys = OFF")
    try:
        with transaction(connection):
            # Another process, even of a newer program, may have migrated the file while this one waited for the lock.
            version = schema_version(connection, path)
            if version < len(STEPS):
                # Views derive from this program's traits, not from any step's, and would keep SQLite from renaming a
                # rebuilt table to its old name: so they go first, and are made again for the newest tables.
                drop_views(connection)
                _run(connection, STEPS[version:])
                make_views(connection)
                connection.execute(f"PRAGMA user_version = {len(STEPS)}")
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    finally:
        connection.execute("PRAGMA foreign_keys = ON")


def make_tables(connection: sqlite3.Connection, version: int) -> None:
    """Make the empty tables of a version in a new database, without views and indices."""
    connection.executescript(_tables(version))


def upgrade(connection: sqlite3.Connection, version: int) -> None:
    """Migrate a database of :func:`make_tables` and its rows from ``version`` to the newest version."""
    _run(connection, STEPS[version:])


@cache
def _tables(version: int) -> str:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        _run(connection, STEPS[:version])
        rows = connection.execute("SELECT sql FROM sqlite_schema WHERE type = 'table' ORDER BY rowid")
        return ";".join(str(sql) for (sql,) in rows)


def _run(connection: sqlite3.Connection, steps: Iterable[Path]) -> None:
    for step in steps:
        for statement in _statements(step.read_text(encoding="utf-8")):
            connection.execute(statement)


def _statements(script: str) -> Iterator[str]:
    """The statements of a script: ``executescript`` would commit the transaction that the steps run in."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
