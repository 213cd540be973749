"""Built libraries in the catalog's file: table ``artifact``."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from typing import Any

_KEPT = ("status", "log")
"""Columns that a quarantined artifact keeps when its library is found in the cache again."""


def record_artifact(connection: sqlite3.Connection, columns: Mapping[str, Any]) -> None:
    """Record a build inside the caller's transaction. A quarantined library stays quarantined.

    Args:
        connection: to the catalog.
        columns: columns of the table by name.

    Raises:
        sqlite3.IntegrityError: the catalog has no such kernel.
    """
    names, holes = ", ".join(columns), ", ".join(f":{name}" for name in columns)
    updates = ", ".join(
        f"{name} = iif(status = 'quarantined' AND excluded.status = 'built', {name}, excluded.{name})"
        if name in _KEPT
        else f"{name} = excluded.{name}"
        for name in columns
        if name != "key"
    )
    updates += ", elsewhere = 0, dropped = NULL"
    connection.execute(
        f"INSERT INTO artifact ({names}) VALUES ({holes}) ON CONFLICT (key) DO UPDATE SET {updates}", columns
    )


def record_elsewhere(connection: sqlite3.Connection, columns: Mapping[str, Any]) -> None:
    """Record a build of another machine inside the caller's transaction, unless the same library is known already.

    Args:
        connection: to the catalog.
        columns: columns of the table by name.

    Raises:
        sqlite3.IntegrityError: the catalog has no such kernel.
    """
    row = {**columns, "elsewhere": 1}
    holes = ", ".join(f":{name}" for name in row)
    connection.execute(f"INSERT INTO artifact ({', '.join(row)}) VALUES ({holes}) ON CONFLICT (key) DO NOTHING", row)


def quarantine_artifact(connection: sqlite3.Connection, key: str, log: str) -> bool:
    """Mark a library as not to be run, inside the caller's transaction; return whether the catalog has it."""
    marked = connection.execute("UPDATE artifact SET status = 'quarantined', log = ? WHERE key = ?", (log, key))
    return marked.rowcount > 0


def release_artifact(connection: sqlite3.Connection, key: str, log: str) -> None:
    """Lift a library's quarantine, inside the caller's transaction; ``log`` is its compiler's output."""
    released = "UPDATE artifact SET status = 'built', log = ? WHERE key = ? AND status = 'quarantined'"
    connection.execute(released, (log, key))


def drop_artifacts(connection: sqlite3.Connection, keys: Iterable[str]) -> None:
    """Record that the libraries of ``keys`` have just left the cache, in the caller's transaction."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    dropped = "UPDATE artifact SET dropped = ? WHERE key = ? AND status <> 'failed' AND NOT elsewhere"
    connection.executemany(dropped, ((now, key) for key in keys))


def quarantined_artifacts(connection: sqlite3.Connection) -> dict[str, str]:
    """The log of each quarantined library by key, in the order in which they were first recorded."""
    return dict(connection.execute("SELECT key, log FROM artifact WHERE status = 'quarantined' ORDER BY rowid"))


def recorded_keys(connection: sqlite3.Connection, kernel_id: str) -> list[str]:
    """The content keys of all libraries of a kernel that were ever built on this machine."""
    asked = "SELECT key FROM artifact WHERE kernel_id = ? AND status = 'built' AND NOT elsewhere AND dropped IS NULL"
    return [row[0] for row in connection.execute(asked, (kernel_id,))]


def refused_keys(connection: sqlite3.Connection, kernel_id: str, statuses: tuple[str, ...]) -> set[str]:
    """The content keys under which a kernel has one of ``statuses``."""
    holes = ", ".join("?" for _ in statuses)
    asked = f"SELECT key FROM artifact WHERE kernel_id = ? AND status IN ({holes}) AND NOT elsewhere"
    return {row[0] for row in connection.execute(asked, (kernel_id, *statuses))}
