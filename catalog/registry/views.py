"""The tables and views of an operation's kernels.

The table, named after the operation, has the traits; table ``kernel`` has the columns that all kernels have. Two views
join them: :func:`rows_of` names the view of plain rows, :func:`view_of` the one for queries, with builds and timings.

The SQL of views derives from today's traits and columns, so no migration may contain it:
:mod:`catalog.registry.migrate` drops the views before the first step and makes them after the last.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import suppress

from catalog.errors import UsageError
from catalog.ops import DEFAULT, operation
from catalog.ops.protocol import Operation
from catalog.registry import foreign
from catalog.schema.columns import BUILD, columns_of
from catalog.schema.lineage import BASE
from catalog.schema.name_parts import sql_literal
from catalog.schema.traits import Trait

VIEW = "kernels"
"""The view of attention's kernels. For other operations it is prefixed with the operation's name: ``gemm_kernels``."""

_LIBRARY = "status = 'built' AND NOT elsewhere AND dropped IS NULL"
"""Condition on an artifact that this machine can load."""


def view_of(operation: str) -> str:
    """The name of the view for queries of an operation."""
    return VIEW if operation == DEFAULT else f"{operation}_{VIEW}"


def rows_of(operation: str) -> str:
    """The name of the view of plain rows: id, name, lineage, traits and selection columns of each kernel.

    Its columns ``key`` and ``lineage`` are row ids of the tables ``kernel`` and ``lineage``.
    """
    return f"{operation}_row"


def make_table(connection: sqlite3.Connection, operation: Operation) -> None:
    """Make the table of an operation's traits if it is missing, in the caller's transaction.

    A trait added since then gets its column, with its default, and the views are made again.
    """
    there = {row[1] for row in connection.execute(f"PRAGMA main.table_info ({operation.name})")}
    missing = [trait for trait in operation.traits.values() if trait.name not in there]
    if not there:
        columns = ", ".join(f"{trait.name} {trait.sql_type} NOT NULL" for trait in missing)
        connection.execute(
            f"CREATE TABLE {operation.name} (kernel INTEGER PRIMARY KEY REFERENCES kernel (key) ON DELETE CASCADE, "
            f"lineage INTEGER NOT NULL, {columns}) STRICT"
        )
        index = ", ".join(("lineage", *operation.index))
        connection.execute(f"CREATE INDEX {operation.name}_signature ON {operation.name} ({index})")
    elif missing:
        drop_views(connection)
        for trait in missing:
            column = f"{trait.name} {trait.sql_type} NOT NULL DEFAULT {default_of(trait)}"
            connection.execute(f"ALTER TABLE {operation.name} ADD COLUMN {column}")
        make_views(connection)


def default_of(trait: Trait) -> str:
    """What kernels from before a trait was added have in its column, as an SQL literal."""
    return sql_literal(0 if trait.default is None else trait.default)


def drop_views(connection: sqlite3.Connection) -> None:
    """Drop all views before a migration rebuilds their tables.

    SQLite refuses to rename a table to a name that a view refers to while that name is missing.
    """
    connection.execute(f"DROP VIEW IF EXISTS {foreign.VIEW}")
    for name in _operations(connection):
        for view in (view_of(name), rows_of(name)):
            connection.execute(f"DROP VIEW IF EXISTS {view}")


def make_views(connection: sqlite3.Connection) -> None:
    """Make the view of foreign timings, and those of all operations that have kernels in the file and are installed."""
    connection.execute(foreign.VIEW_SQL)
    for name in _operations(connection):
        with suppress(UsageError):
            for statement in _views(operation(name)):
                connection.execute(statement)


def _operations(connection: sqlite3.Connection) -> list[str]:
    """The names of the operations that have kernels in the file, and the default one."""
    if not connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'lineage'").fetchone():
        return [DEFAULT]
    there = connection.execute("SELECT DISTINCT operation FROM lineage").fetchall()
    return list(dict.fromkeys((DEFAULT, *(str(row[0]) for row in there))))


def _views(operation: Operation) -> Iterator[str]:
    traits, table = operation.traits, operation.name
    variant = "" if traits.variant == "variant" else f", variant AS {traits.variant}"
    yield f"""CREATE VIEW IF NOT EXISTS {rows_of(table)} AS SELECT kernel.key, kernel.id, kernel.name,
    {table}.lineage, lineage.arch, lineage.revision, lineage.space, lineage.variant{variant},
    {BASE} AS base, kernel.target,
    {", ".join(f"{table}.{name}" for name in traits)}, kernel.hw_valid, kernel.dispatch_order
    FROM {table} JOIN kernel ON kernel.key = {table}.kernel JOIN lineage ON lineage.id = {table}.lineage"""
    newest = "FROM artifact WHERE kernel_id = kernel.id AND status = 'built' ORDER BY created DESC, rowid DESC LIMIT 1"
    known = {
        "receipts": "coalesce((SELECT group_concat(receipt, ' ') FROM kernel_receipt WHERE kernel_id = kernel.id), '')",
        "built": f"EXISTS (SELECT 1 FROM artifact WHERE kernel_id = kernel.id AND {_LIBRARY})",
        "best_ms": "(SELECT min(median_ms) FROM timing WHERE kernel_id = kernel.id AND NOT cold)",
        **{column.name: f"(SELECT {column.name} {newest})" for column in BUILD},
        **{column.name: sql for column, sql in operation.columns.items()},
    }
    columns = (f"{known[c.name]} AS {c.name}" if c.name in known else c.name for c in columns_of(operation))
    yield f"""CREATE VIEW IF NOT EXISTS {view_of(table)} AS SELECT {", ".join(columns)}
    FROM {rows_of(table)} AS kernel"""
