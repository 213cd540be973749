"""Adopted revisions in a catalog's file: which checkout they came from, the names that nobody could read, forgetting.

An adopted revision has a lineage for each arch and variant that was adopted. Its rows are those of the checkout's own
generator, so nothing here can make them again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from catalog.errors import UsageError
from catalog.messages import counted, did_you_mean
from catalog.registry.transactions import transaction
from catalog.schema.lineage import LINEAGE, Lineage

COLUMNS = ("revision", "arch", "variant", "base", "kernels", "unknown", "root", "git_commit", "digest", "created")
"""Columns of :func:`adopted_lineages`; ``unknown`` is a number of names."""

UNKNOWN_COLUMNS = ("revision", "arch", "variant", "part", "place", "name")
"""Columns of :func:`unknown_names`."""

_ADOPTED = "adopted JOIN lineage ON lineage.id = adopted.lineage"
_WHICH = "operation = :operation AND revision = coalesce(:revision, revision)"


@dataclass(frozen=True)
class Record:
    """Where the rows of an adopted lineage come from: the columns of table ``adopted``.

    Attributes:
        root: path of the checkout.
        git_commit: its git commit; empty without git, or if the generator was edited since.
        digest: of the generator's files.
        base: the nearest known revision.
        receipts: the receipts of the checkout, separated by spaces.
        created: when, ISO 8601 in UTC.
    """

    root: str
    git_commit: str
    digest: str
    base: str
    receipts: str
    created: str


@dataclass(frozen=True)
class Unknown:
    """A name that the grammar of the nearest revision cannot read.

    Attributes:
        name: the name.
        part: its first part that is new.
        place: where a trait for it would go.
    """

    name: str
    part: str
    place: str


@dataclass(frozen=True)
class Forgotten:
    """What :func:`forget` deleted: numbers of rows."""

    lineages: int
    kernels: int
    builds: int
    timings: int

    def __str__(self) -> str:
        return (
            f"{counted(self.kernels, 'kernel')} in {counted(self.lineages, 'lineage')}, {counted(self.builds, 'build')}"
            f" and {counted(self.timings, 'timing')}"
        )


def record_adopted(connection: sqlite3.Connection, lineage: int, record: Record, unknown: Iterable[Unknown]) -> None:
    """Record where the rows of a lineage come from, and the names left over, in the caller's transaction."""
    columns = vars(record)
    names, holes = ", ".join(columns), ", ".join(f":{name}" for name in columns)
    connection.execute(
        f"INSERT OR REPLACE INTO adopted (lineage, {names}) VALUES (:lineage, {holes})", {"lineage": lineage, **columns}
    )
    connection.execute("DELETE FROM unknown_name WHERE lineage = ?", [lineage])
    connection.executemany(
        "INSERT INTO unknown_name (lineage, name, part, place) VALUES (?, ?, ?, ?)",
        ((lineage, one.name, one.part, one.place) for one in unknown),
    )


def records_of(connection: sqlite3.Connection, operation: str, revision: str) -> Mapping[Lineage, Record]:
    """The records of an adopted revision by lineage; empty if there is no such revision."""
    names = ", ".join(Record.__dataclass_fields__)
    rows = connection.execute(
        f"SELECT {', '.join(LINEAGE)}, {names} FROM {_ADOPTED} WHERE {_WHICH} ORDER BY arch, variant",
        {"operation": operation, "revision": revision},
    )
    of_lineage = len(LINEAGE)
    return {Lineage(*columns[:of_lineage]): Record(*columns[of_lineage:]) for columns in map(tuple, rows)}


def revisions_of(connection: sqlite3.Connection, operation: str, arch: str) -> list[str]:
    """The adopted revisions of an arch."""
    asked = f"SELECT DISTINCT revision FROM {_ADOPTED} WHERE operation = ? AND arch = ? ORDER BY revision"
    return [row[0] for row in connection.execute(asked, (operation, arch))]


def unknown_of(connection: sqlite3.Connection, lineage: int) -> tuple[Unknown, ...]:
    """The unknown names of a lineage, sorted."""
    asked = "SELECT name, part, place FROM unknown_name WHERE lineage = ? ORDER BY name"
    return tuple(Unknown(*row) for row in connection.execute(asked, [lineage]))


def adopted_lineages(connection: sqlite3.Connection, operation: str, revision: str | None = None) -> list[list[Any]]:
    """The adopted lineages, or those of one revision, as rows of :data:`COLUMNS`.

    Raises:
        UsageError: no such revision was adopted.
    """
    _require(connection, operation, revision)
    columns = {
        "kernels": "(SELECT kernels FROM population WHERE population.lineage = lineage.id)",
        "unknown": "(SELECT count(*) FROM unknown_name WHERE unknown_name.lineage = lineage.id)",
    }
    shown = ", ".join(columns.get(column, column) for column in COLUMNS)
    asked = f"SELECT {shown} FROM {_ADOPTED} WHERE {_WHICH} ORDER BY revision, arch, variant"
    return [list(row) for row in connection.execute(asked, {"operation": operation, "revision": revision})]


def unknown_names(connection: sqlite3.Connection, operation: str, revision: str | None = None) -> list[list[Any]]:
    """The unknown names of all adopted lineages, or of one revision's, as rows of :data:`UNKNOWN_COLUMNS`.

    Raises:
        UsageError: no such revision was adopted.
    """
    _require(connection, operation, revision)
    asked = (
        f"SELECT {', '.join(UNKNOWN_COLUMNS)} FROM unknown_name JOIN lineage ON lineage.id = lineage "
        f"WHERE {_WHICH} ORDER BY revision, arch, variant, place, part, name"
    )
    return [list(row) for row in connection.execute(asked, {"operation": operation, "revision": revision})]


def forget(connection: sqlite3.Connection, operation: str, revision: str) -> Forgotten:
    """Delete everything about an adopted revision: kernels, rules, builds, timings; libraries stay in the cache.

    Raises:
        UsageError: no such revision was adopted.
        RegistryError: the file cannot be written; nothing is deleted.
    """
    with transaction(connection):
        _require(connection, operation, revision)
        found = count_adopted(connection, operation, revision)
        whose = {"operation": operation, "revision": revision}
        lineages = f"SELECT adopted.lineage FROM {_ADOPTED} WHERE {_WHICH}"
        connection.execute(f"DELETE FROM kernel WHERE lineage IN ({lineages})", whose)
        connection.execute(f"DELETE FROM population WHERE lineage IN ({lineages})", whose)
        connection.execute("DELETE FROM rule WHERE operation = :operation AND revision = :revision", whose)
        connection.execute(f"DELETE FROM lineage WHERE id IN ({lineages})", whose)
    return found


def count_adopted(connection: sqlite3.Connection, operation: str, revision: str) -> Forgotten:
    """What :func:`forget` would delete."""
    whose = {"operation": operation, "revision": revision}
    lineages = f"SELECT adopted.lineage FROM {_ADOPTED} WHERE {_WHICH}"
    kernels = f"SELECT id FROM kernel WHERE lineage IN ({lineages})"

    def number(table: str, condition: str) -> int:
        return int(connection.execute(f"SELECT count(*) FROM {table} WHERE {condition}", whose).fetchone()[0])

    return Forgotten(
        lineages=number("lineage", f"id IN ({lineages})"),
        kernels=number("kernel", f"lineage IN ({lineages})"),
        builds=number("artifact", f"kernel_id IN ({kernels})"),
        timings=number("timing", f"kernel_id IN ({kernels})"),
    )


def _require(connection: sqlite3.Connection, operation: str, revision: str | None) -> None:
    there = [row[0] for row in connection.execute(
        f"SELECT DISTINCT revision FROM {_ADOPTED} WHERE operation = ? ORDER BY revision", [operation]
    )]  # fmt: skip
    if revision is not None and revision not in there:
        listed = f"Adopted are: {', '.join(there)}." if there else "No checkout was adopted yet."
        raise UsageError(f"no revision {revision!r} was adopted{did_you_mean(revision, there)}", hint=listed)
