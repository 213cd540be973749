"""The view ``kernels``: every column of table ``kernel``, and what is known of the row.

Its SQL derives from today's columns, so it is no part of any migration: :mod:`catalog.registry.migrate` drops the view
before the first step and makes it after the last.
"""

from __future__ import annotations

from catalog.ops.attention.dispatcher_names import dispatcher_name_sql
from catalog.ops.attention.traits import Family
from catalog.schema.columns import BUILD

VIEW = "kernels"

_LIBRARY = "status = 'built' AND NOT elsewhere AND dropped IS NULL"
"""Condition on an artifact: this machine can load it."""


def kernels_sql() -> str:
    """The statement that makes the view; resources are those of a kernel's newest library."""
    names = " ".join(f"WHEN '{family}' THEN {dispatcher_name_sql(family)}" for family in Family)
    newest = "FROM artifact WHERE kernel_id = kernel.id AND status = 'built' ORDER BY created DESC, rowid DESC LIMIT 1"
    resources = "".join(f",\n    (SELECT {column.name} {newest}) AS {column.name}" for column in BUILD)
    return f"""CREATE VIEW {VIEW} AS SELECT kernel.*,
    iif(space IN ('ck', 'native'), '', CASE family {names} END) AS dispatcher_name,
    coalesce((SELECT group_concat(receipt, ' ') FROM kernel_receipt WHERE kernel_id = kernel.id), '') AS receipts,
    EXISTS (SELECT 1 FROM artifact WHERE kernel_id = kernel.id AND {_LIBRARY}) AS built,
    (SELECT min(median_ms) FROM timing WHERE kernel_id = kernel.id AND NOT cold) AS best_ms{resources}
    FROM kernel"""
