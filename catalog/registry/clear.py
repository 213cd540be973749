"""Deleting timings, which outlive the libraries that they were measured with."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from catalog.registry.connection import connect
from catalog.registry.foreign import VIEW
from catalog.registry.query import Query, kernel_ids, run
from catalog.registry.transactions import transaction

_TIMED = (
    "SELECT 1 FROM timing JOIN problem ON problem.id = problem_id WHERE problem.kind = model.kind "
    "AND (timing.device_id, timing.measured_as, timing.cold) = (model.device_id, model.measured_as, model.cold)"
)
"""The timings that a row of table ``model`` may come from."""


def clear_foreign(path: Path, where: str = "") -> int:
    """Delete timings of other projects' kernels, and the kernels without any left; return the number of timings.

    Args:
        path: the catalog's file.
        where: SQL expression over the columns of view ``foreign_timings``; empty for every timing.

    Raises:
        QueryError, RegistryError: as :func:`clear_timings`.
    """
    with run(path, Query(where, columns=("key",), view=VIEW)) as found:
        keys = list(found)
    with closing(connect(path)) as connection, transaction(connection):
        connection.executemany("DELETE FROM foreign_timing WHERE key = ?", keys)
        connection.execute("DELETE FROM foreign_kernel WHERE id NOT IN (SELECT kernel_id FROM foreign_timing)")
    return len(keys)


def clear_timings(path: Path, where: str = "") -> int:
    """Delete the timings of the kernels that an SQL expression over the columns selects, and return their number.

    What was learned about a kind of problems is deleted with the last of its timings.

    Args:
        path: the catalog's file.
        where: the expression; empty for every kernel.

    Raises:
        QueryError: the expression is wrong or refused.
        RegistryError: there is no catalog, or it cannot be written; nothing is deleted.
    """
    kernels = [(kernel_id,) for kernel_id in kernel_ids(path, where)] if where.strip() else None
    connection = connect(path)
    try:
        condition = ""
        if kernels is not None:
            connection.execute("CREATE TEMP TABLE chosen (id TEXT PRIMARY KEY) WITHOUT ROWID")
            connection.executemany("INSERT INTO chosen VALUES (?)", kernels)
            condition = " WHERE kernel_id IN (SELECT id FROM chosen)"
        with transaction(connection):
            dropped = connection.execute(f"DELETE FROM timing{condition}").rowcount
            connection.execute(f"DELETE FROM model WHERE NOT EXISTS ({_TIMED})")
            return dropped
    finally:
        connection.close()
