"""Import of other projects' tables into the registry: all files of a call, or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from catalog import settings
from catalog.errors import UsageError
from catalog.files import StrPath
from catalog.foreign.formats import Format, read_format
from catalog.foreign.lines import Lines
from catalog.foreign.parsed import Given, records
from catalog.foreign.readers import READERS
from catalog.registry import foreign
from catalog.registry.rows import ForeignTiming

if TYPE_CHECKING:
    from catalog.runtime.catalog import Catalog

COLUMNS = ("file", "table", "records", "added", "the same", "without a time", "superseded")
"""Columns of :attr:`Imported.row`."""

MOST_LISTED = 20
"""Number of records of a kind that :attr:`Report.notes` lists."""


@dataclass(frozen=True)
class Imported:
    """What became of a file: its records, the number of new ones, and of those that have a better duplicate.

    ``unknown`` names the columns that the format does not know. They are kept, as fields of the problem.
    """

    path: Path
    table: str
    records: tuple[ForeignTiming, ...]
    unknown: tuple[str, ...]
    added: int = 0
    superseded: int = 0

    @property
    def untimed(self) -> list[ForeignTiming]:
        """The records without a time."""
        return [record for record in self.records if record.median_ms is None]

    @property
    def row(self) -> list[Any]:
        """The values of :data:`COLUMNS`."""
        count = len(self.records)
        numbers = (count, self.added, count - self.added, len(self.untimed), self.superseded)
        return [self.path.name, self.table, *numbers]


@dataclass(frozen=True)
class Report:
    """What became of the files of an import, and the duplicates that involve their records."""

    files: tuple[Imported, ...]
    duplicates: tuple[foreign.Duplicate, ...]

    @property
    def notes(self) -> list[str]:
        """Lines about unknown columns, records without a time, and duplicates, with a query for those not listed."""
        unknown = [
            f"{one.path}: the column {name} is not known: kept as part of the problem"
            for one in self.files
            for name in one.unknown
        ]
        untimed = [f"{one.path}:{record.line}: kept without a time" for one in self.files for record in one.untimed]
        return [*unknown, *_first(untimed, "median_ms IS NULL"), *_first(self.duplicates, "NOT preferred")]


def _first(things: Sequence[object], where: str) -> list[str]:
    rest = len(things) - MOST_LISTED
    more = [f'{rest:,} more like that: catalog query --foreign "{where}"'] if rest > 0 else []
    return [*map(str, things[:MOST_LISTED]), *more]


def import_tables(catalog: Catalog, form: str, paths: Sequence[StrPath], given: Given | None = None) -> Report:
    """Record the timings of other projects' tables, in one transaction.

    Importing a table again adds nothing. The timings never take part in selection among rows.

    Args:
        catalog: the catalog to write to.
        form: format of the files, one of :data:`~catalog.foreign.formats.FORMATS`.
        paths: the files.
        given: what the files do not state.

    Raises:
        UsageError: there is no such format or table, a file cannot be read, or it does not state its arch.
        TableError: a file is malformed; the message names its lines.
        RegistryError: the catalog cannot be written. In all cases nothing is imported.
    """
    chosen = read_format(form, settings.data_dir())
    given = given or Given()
    if given.table is not None:
        chosen.table(given.table)
    read = [_read(Path(path), chosen, given) for path in paths]
    every = [record for one in read for record in one.records]
    with catalog.writing() as connection:
        added = [foreign.record(connection, one.records) for one in read]
        found = tuple(foreign.duplicates(connection, every, one_kernel_per_problem=chosen.one_kernel_per_problem))
    lost = {duplicate.record.key for duplicate in found}
    files = (
        replace(one, added=new, superseded=len(lost.intersection(record.key for record in one.records)))
        for one, new in zip(read, added, strict=True)
    )
    return Report(tuple(files), found)


def _read(path: Path, form: Format, given: Given) -> Imported:
    lines = Lines(path)
    parsed = READERS[form.name](lines, form, given)
    found = tuple(records(parsed, lines, form, given))
    lines.check()
    if not found:
        raise UsageError(f"{path} has no timings", hint=f"Expected: {form.about}")
    return Imported(path, parsed.table, found, parsed.unknown)
