"""Export of recorded tables, and of recorded misses, in the format of aiter."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from catalog import settings
from catalog.errors import ProblemError, UsageError
from catalog.files import StrPath, write_file
from catalog.foreign.formats import Format, read_format
from catalog.ops import operation_of, problem_of_key
from catalog.registry.foreign import VIEW

if TYPE_CHECKING:
    from catalog.runtime.catalog import Catalog

_FORMAT = "aiter-csv"


def export_tuned(
    catalog: Catalog, out: StrPath, *, table: str | None = None, arch: str | None = None, superseded: bool = False
) -> dict[Path, int]:
    """Write the imported tables of aiter to the folder ``out``, one file each, and return the numbers of rows.

    Of records of the same problem and device only the preferred one is written, because aiter expects one kernel.

    Args:
        catalog: the catalog to read.
        out: the folder; files of the same names are replaced.
        table: only this table.
        arch: only the rows of this arch.
        superseded: write all records.

    Raises:
        UsageError: there is no such table, or nothing to write.
        RegistryError: the catalog cannot be read.
        CatalogError: a file cannot be written.
    """
    form = read_format(_FORMAT, settings.data_dir())
    tables = form.tables if table is None else {table: form.table(table)}
    rows = catalog.connection.execute(
        f"SELECT table_name, fields FROM {VIEW} WHERE format = :format AND arch = coalesce(:arch, arch) "
        "AND (preferred OR :superseded) ORDER BY table_name, file, line, key",
        {"format": form.name, "arch": arch, "superseded": superseded},
    ).fetchall()
    found = {name: [json.loads(fields) for of, fields in rows if of == name] for name in tables}
    return _written(
        out, {form.tables[name].tuned: records for name, records in found.items() if records}, form, "timing"
    )


def export_untuned(
    catalog: Catalog, out: StrPath, *, table: str | None = None, arch: str | None = None
) -> dict[Path, int]:
    """Write the recorded misses as untuned tables of aiter, as :func:`export_tuned` does.

    A miss is written to each table that can state its problem, by :meth:`Operation.foreign_fields
    <catalog.ops.protocol.Operation.foreign_fields>`.

    Raises:
        UsageError, RegistryError, CatalogError: as :func:`export_tuned`.
    """
    form = read_format(_FORMAT, settings.data_dir())
    tables = form.tables if table is None else {table: form.table(table)}
    archs = [row[0] for row in catalog.connection.execute("SELECT DISTINCT arch FROM miss")] if arch is None else [arch]
    found: dict[str, dict[tuple[str, ...], Mapping[str, str]]] = {}
    for key, _ in (miss for name in archs for miss in catalog.misses(name)):
        try:
            problem = problem_of_key(key)
        except ProblemError:  # of an operation that is no longer installed
            continue
        for name, one in tables.items():
            fields = operation_of(problem).foreign_fields(form.name, name, problem) if one.untuned else None
            if fields is not None:
                found.setdefault(one.untuned, {})[tuple(fields.values())] = fields
    return _written(out, {name: list(rows.values()) for name, rows in found.items()}, form, "miss")


def _written(
    out: StrPath, tables: Mapping[str, Sequence[Mapping[str, str]]], form: Format, what: str
) -> dict[Path, int]:
    if not tables:
        raise UsageError(
            f"nothing to export: the catalog has no such {what} that a table of {form.name} can state",
            hint=f"Tables: {', '.join(form.tables)}.",
        )
    return {write_file(Path(out) / f"{name}.csv", _csv(rows)): len(rows) for name, rows in tables.items()}


def _csv(rows: Iterable[Mapping[str, str]]) -> str:
    rows = list(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), "", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
