"""Kernels in a catalog's file: each has a row in the tables that all operations share, and one in its operation's."""

from __future__ import annotations

import shlex
import sqlite3
from collections.abc import Mapping
from typing import Any

from catalog.errors import UsageError
from catalog.ops import DEFAULT, operation
from catalog.registry.views import make_table, make_views, rows_of
from catalog.schema.kernel import Kernel
from catalog.schema.lineage import LINEAGE, Lineage

_OF_LINEAGE = " AND ".join(f"{column} = :{column}" for column in LINEAGE)


def lineage_id(connection: sqlite3.Connection, lineage: Lineage) -> int | None:
    """The row id of a lineage; None if the file has no such row."""
    row = connection.execute(f"SELECT id FROM lineage WHERE {_OF_LINEAGE}", lineage.parameters).fetchone()
    return None if row is None else int(row[0])


def made_lineage(connection: sqlite3.Connection, lineage: Lineage) -> int:
    """The row id of a lineage. A new one is added with the tables of its operation, in the caller's transaction."""
    make_table(connection, operation(lineage.operation))
    found = lineage_id(connection, lineage)
    if found is not None:
        return found
    holes = ", ".join(f":{column}" for column in LINEAGE)
    added = f"INSERT INTO lineage ({', '.join(LINEAGE)}) VALUES ({holes}) RETURNING id"
    made = int(connection.execute(added, lineage.parameters).fetchone()[0])
    make_views(connection)  # the operation may be new to the file
    return made


def populate_command(lineage: Lineage, root: str = "") -> str:
    """The command that populates a lineage; with ``root``, the one that adopts the checkout there as this lineage."""
    of = operation(lineage.operation)
    words = ["catalog", "populate", *([of.name] if of.name != DEFAULT else [])]
    words += ["--ck-root", root] if root else []
    words += ["--arch", lineage.arch, "--label" if root else "--revision", lineage.revision]
    return shlex.join([*words, *(["--mask-impl", lineage.variant] if of.variants else [])])


def kernel_of(connection: sqlite3.Connection, kernel_id: str) -> Kernel | None:
    """The kernel with an id; None if the file has no such row, or its operation is not installed."""
    asked = "SELECT operation FROM kernel JOIN lineage ON lineage.id = lineage WHERE kernel.id = ?"
    row = connection.execute(asked, [kernel_id]).fetchone()
    if row is None:
        return None
    try:
        of = operation(row[0])
    except UsageError:
        return None
    return of.kernel.from_row(
        connection.execute(f"SELECT * FROM {rows_of(of.name)} WHERE id = ?", [kernel_id]).fetchone()
    )


def add_kernel(connection: sqlite3.Connection, kernel: Kernel, order: Mapping[str, Any]) -> None:
    """Add a new row for ``kernel`` in the caller's transaction; ``order`` has hw_valid and dispatch_order."""
    lineage = made_lineage(connection, kernel.lineage)
    common = {
        "id": kernel.id,
        "lineage": lineage,
        "family": str(kernel.family),
        "name": kernel.name,
        "target": kernel.target,
        "hw_valid": order["hw_valid"],
        "dispatch_order": order["dispatch_order"],
    }
    key = _insert(connection, "kernel", common)
    row = kernel.to_row()
    _insert(
        connection, kernel.operation, {"kernel": key, "lineage": lineage} | {name: row[name] for name in kernel.traits}
    )


def _insert(connection: sqlite3.Connection, table: str, row: Mapping[str, Any]) -> int:
    holes = ", ".join(f":{column}" for column in row)
    return connection.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({holes})", row).lastrowid or 0
