"""Reading catalogs made by somebody else: the rows of each are copied into an in-memory catalog that this program made.

Only the other file's tables are read. A view, a virtual table or a generated column in place of a table is refused;
triggers, views and expression indices are never reached. The copy has this program's own STRICT tables and is migrated
in memory. Its rows are validated against :mod:`catalog.registry.rows`; invalid ones are left out, with a reason. The
valid records of all files go to one more database in memory, for the writing connection to attach. All of that ends
before anything is written, within :data:`READ_SECONDS` for each file.
"""

from __future__ import annotations

import json
import shlex
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import ValidationError

from catalog.build.cache import ArtifactRecord
from catalog.errors import RegistryError, UsageError
from catalog.messages import expected
from catalog.ops import DEFAULT, operation
from catalog.registry import foreign
from catalog.registry.connection import SQLITE_ERRORS, message_of, open_as_allowed
from catalog.registry.migrate import make_tables, schema_version, upgrade
from catalog.registry.rows import (
    MOST_CHARACTERS,
    Device,
    ForeignTiming,
    Model,
    Timing,
    is_future,
    is_problem,
    latest_stamp,
    timing_limits,
)
from catalog.registry.timings import MEASURED
from catalog.registry.views import default_of, make_table, make_views
from catalog.threads import usable_cores

READ_SECONDS = 120.0
"""Time limit for reading a file; a million timings take a tenth of it."""

MOST_ROWS = 2_000_000
"""Maximum number of rows of a table."""

MOST_PAGES = 2**19
"""Maximum number of pages of the copy, of 4 KiB."""

MOST_AT_ONCE = 4
"""Maximum number of files that are read at the same time."""

_STEPS = 10_000
"""SQLite instructions between two checks of the clock."""

_MEASURED = "(SELECT kernel_id FROM temp.measured)"
_COPIED: Mapping[str, str] = {
    "device": "TRUE",
    "problem": "+id IN (SELECT problem_id FROM other.timing)",  # the plus: look every id up in the index of timings
    "lineage": "TRUE",
    "adopted": "TRUE",
    "kernel": f"id IN {_MEASURED}",
    "kernel_receipt": f"kernel_id IN {_MEASURED}",
    "artifact": "TRUE",
    "timing": "TRUE",
    "model": "TRUE",
    "foreign_kernel": "TRUE",
    "foreign_timing": "TRUE",
}
"""The tables that are read, where the file's version has them, with the condition on their rows."""

_RECORDS = ("device", "problem", "lineage", "artifact", "timing", "model")
"""The tables of which :func:`attached` has the valid rows. They have no indices."""

_OF_OPERATION = f"kernel IN (SELECT key FROM other.kernel WHERE id IN {_MEASURED})"
"""The condition on the rows of an operation's table of traits."""


@dataclass(frozen=True)
class Source:
    """The valid rows of a file, in memory, and the number of refused ones by table and reason.

    ``number`` tells the files of a merge apart.
    """

    path: Path
    connection: sqlite3.Connection
    number: int
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)

    def table(self, name: str) -> str:
        """The name of the table of :func:`attached` with the file's rows of a table of :data:`_RECORDS`."""
        return f"checked.{name}_{self.number}"


@contextmanager
def opened(paths: Sequence[Path]) -> Iterator[tuple[list[Source], str]]:
    """The current contents of the catalogs at ``paths``, made by any version of this program, and what to attach.

    The files are only read.

    Raises:
        RegistryError: one is missing, damaged, too large, not a catalog, from a newer version, or takes too long to
            read.
    """
    records = f"file:{uuid4()}?mode=memory&cache=shared"
    with ExitStack() as stack:
        stack.enter_context(closing(sqlite3.connect(records, uri=True)))  # it exists while a connection to it is open
        sources = list[Source]()
        for source in stack.enter_context(closing(_read_in_threads(paths))):
            stack.enter_context(closing(source.connection))
            _hand_over(source, records)
            sources.append(source)
        yield sources, records


def _read_in_threads(paths: Sequence[Path]) -> Generator[Source, None, None]:
    """Read a few files at a time and yield their contents in order; after an error, no connection is left open."""
    stop, at_once = threading.Event(), min(usable_cores(), MOST_AT_ONCE)
    with ThreadPoolExecutor(at_once) as pool:
        ahead = deque[Future[Source]]()
        try:
            for number, path in enumerate(paths):
                ahead.append(pool.submit(_read, path, number, stop))
                if len(ahead) > at_once:
                    yield _next(ahead)
            while ahead:
                yield _next(ahead)
        finally:
            stop.set()
            for future in ahead:
                if not future.cancel() and future.exception() is None:
                    future.result().connection.close()


def _next(ahead: deque[Future[Source]]) -> Source:
    source = ahead[0].result()  # it stays among the others until it is there
    ahead.popleft()
    return source


def _hand_over(source: Source, records: str) -> None:
    """Copy the records of a file to where the writing connection reads them."""
    with reading(source.path), attached(source.connection, records):
        for table in _RECORDS:
            source.connection.execute(f"CREATE TABLE {source.table(table)} AS SELECT * FROM {table}")
    source.connection.execute("DELETE FROM timing")  # nothing reads them here; their memory is free again


@contextmanager
def attached(connection: sqlite3.Connection, records: str) -> Iterator[None]:
    """Attach the valid records of :func:`opened`: SQL takes rows from there faster than Python can pass them."""
    connection.execute("ATTACH ? AS checked", (records,))
    try:
        yield
    finally:
        connection.execute("DETACH checked")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors of SQLite into one error about the file at ``path``.

    Raises:
        RegistryError: the file cannot be read.
    """
    try:
        yield
    except (*SQLITE_ERRORS, OverflowError) as error:
        reason = message_of(error)
        if reason == "interrupted":
            reason = f"reading it took longer than {READ_SECONDS:g} s"
        hint = f"Nothing was changed. To inspect it: catalog --db {shlex.quote(str(path))} doctor"
        raise RegistryError(f"{path} cannot be merged: {reason}", hint=hint) from None


def _read(path: Path, number: int, stop: threading.Event) -> Source:
    if not path.is_file():
        raise RegistryError(f"there is no catalog at {path}")
    with reading(path):
        copy = open_as_allowed(path, "mode=ro", _open)
        try:
            deadline = time.monotonic() + READ_SECONDS
            copy.set_progress_handler(lambda: stop.is_set() or time.monotonic() > deadline, _STEPS)
            source = Source(path, copy, number)
            _fill(source)
            copy.set_progress_handler(None, 0)
        except BaseException:
            copy.close()
            raise
    return source


def _fill(source: Source) -> None:
    """Copy the file that is attached as ``other`` into memory, and refuse what is invalid."""
    copy, path = source.connection, source.path
    version = schema_version(copy, path, "other")
    if not version:
        raise RegistryError(f"{path} is empty, not a catalog")
    make_tables(copy, version)
    copy.execute("BEGIN")
    copied = {table: rows for table, rows in _COPIED.items() if _columns(copy, table)}
    for table in copied:  # check all tables first: the conditions of one read others
        _require_table(copy, table)
    of_operations = _tables_of_operations(copy)
    for table in of_operations:
        _require_table(copy, table)
    measured = "SELECT kernel_id FROM other.artifact UNION SELECT kernel_id FROM other.timing"
    copy.execute(f"CREATE TEMP TABLE measured AS {measured}")
    for table, rows in {**copied, **of_operations}.items():
        _copy(copy, table, rows)
    copy.execute("COMMIT")
    copy.execute("DETACH other")
    upgrade(copy, version)
    copy.execute("UPDATE foreign_timing SET problem_id = NULL")  # merging links problems again
    make_views(copy)
    if copy.execute("PRAGMA foreign_key_check").fetchone():
        raise sqlite3.DatabaseError("it refers to rows that do not exist")
    _refuse_timings(source)
    _refuse_artifacts(source)
    _refuse_foreign(source)
    _refuse_models(source)


def _open(path: Path, parameters: str) -> sqlite3.Connection:
    """A database in memory, to which the file is attached as ``other``; its schema has been read successfully."""
    file = f"{path.resolve().as_uri()}?{parameters}"
    with closing(sqlite3.connect(file, uri=True)) as alone:  # its errors say more than those of attaching
        alone.execute("PRAGMA trusted_schema = OFF")
        alone.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    connection = sqlite3.connect("file::memory:", uri=True, isolation_level=None, check_same_thread=False)
    try:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute(f"PRAGMA max_page_count = {MOST_PAGES}")
        connection.execute("PRAGMA auto_vacuum = FULL")  # deleted rows leave no empty pages in memory
        connection.execute("PRAGMA journal_mode = OFF")  # after an error the copy is thrown away
        connection.execute("ATTACH ? AS other", (file,))
    except BaseException:
        connection.close()
        raise
    return connection


def _tables_of_operations(copy: sqlite3.Connection) -> dict[str, str]:
    """The tables of traits to read, with the condition on their rows. Their copies are made in ``copy``.

    Includes operations of other distributions that are installed here.
    """
    if not _columns(copy, "lineage"):
        return {}
    tables = {DEFAULT: _OF_OPERATION}
    for (name,) in copy.execute("SELECT DISTINCT operation FROM other.lineage").fetchall():
        with suppress(UsageError):
            of_traits = operation(str(name))
            if not _columns(copy, of_traits.name):  # a step adds the later columns of the others
                make_table(copy, of_traits)
            tables[of_traits.name] = _OF_OPERATION
    return tables


def _copy(copy: sqlite3.Connection, table: str, rows: str) -> None:
    """Copy a table, each text cut just above the allowed length.

    The plus makes expressions of columns: SQLite copies plain ones as whole rows, whatever the types of their values.
    """
    columns, there, added = _columns(copy, table), _columns(copy, table, "other"), _later_columns(table)
    texts = {row["name"] for row in copy.execute(f"PRAGMA main.table_info({table})") if row["type"] == "TEXT"}

    def value(column: str) -> str:
        if column not in there:
            return added[column]
        return f"substr({column}, 1, {MOST_CHARACTERS + 1})" if column in texts else f"+{column}"

    statement = (
        f"INSERT INTO main.{table} ({', '.join(columns)}) SELECT {', '.join(map(value, columns))} "
        f"FROM other.{table} WHERE {rows} LIMIT {MOST_ROWS + 1}"
    )
    try:
        too_large = copy.execute(statement).rowcount > MOST_ROWS
    except sqlite3.OperationalError as error:
        if "full" not in str(error):
            raise
        too_large = True
    if too_large:
        raise sqlite3.DataError(f"its table {table} is too large to be merged")


def _columns(copy: sqlite3.Connection, table: str, database: str = "main") -> list[str]:
    return [row["name"] for row in copy.execute(f"PRAGMA {database}.table_info({table})")]


def _later_columns(table: str) -> dict[str, str]:
    """The columns that a table of traits may lack, since they were added to it later, with the SQL of their values."""
    try:
        traits = operation(table).traits
    except UsageError:
        return {}
    return {name: default_of(traits[name]) for name in traits.later}


def _require_table(copy: sqlite3.Connection, table: str) -> None:
    """Refuse anything but a plain table: reading a view or virtual table could run any code, without end.

    A table of traits may lack those that were added to it later.
    """
    kinds = [row["type"] for row in copy.execute(f"PRAGMA other.table_list({table})")]
    if kinds != ["table"]:
        raise sqlite3.DatabaseError(f"its {table} is {f'a {kinds[0]}, not a table' if kinds else 'missing'}")
    hidden = {row["name"]: row["hidden"] for row in copy.execute(f"PRAGMA other.table_xinfo({table})")}
    lacking = set(_columns(copy, table)) - set(hidden)
    known = set(hidden) <= set(_columns(copy, table)) and lacking <= set(_later_columns(table))
    if not known or any(hidden.values()):
        raise sqlite3.DatabaseError(f"its table {table} has other columns than those of a catalog of its version")


def _refuse_timings(source: Source) -> None:
    """Drop invalid timings. Only rows that SQL does not find valid are looked at one by one."""
    connection = source.connection
    connection.create_function("is_device", 3, _is_device, deterministic=True)
    connection.create_function("is_problem", 1, is_problem, deterministic=True)
    measured = ", ".join(f"timing.{name}" for name in MEASURED)
    rows = connection.execute(
        f"SELECT timing.rowid AS number, timing.kernel_id = artifact.kernel_id AS of_its_kernel, {measured}, "
        "problem.key AS problem, device.arch, device.name, device.facts FROM timing "
        "JOIN artifact ON artifact.key = artifact_key "
        "JOIN problem ON problem.id = problem_id JOIN device ON device.id = device_id "
        f"WHERE NOT (timing.kernel_id = artifact.kernel_id AND {timing_limits()} "
        "AND device_id IN (SELECT id FROM device WHERE is_device(arch, name, facts)) "
        "AND problem_id IN (SELECT id FROM problem WHERE is_problem(key)))",
        {"latest": latest_stamp()},
    )
    refused = list[int]()
    for row in map(dict, rows):
        number, of_its_kernel = row.pop("number"), row.pop("of_its_kernel")
        device = {name: row.pop(name) for name in Device.model_fields}
        try:
            Timing.model_validate({**row, "device": device})
            reason = None if of_its_kernel else "its artifact belongs to another kernel"
        except ValidationError as error:
            reason = _reason(error)
        if reason is not None:
            source.refused["timing", reason] += 1
            refused.append(number)
    connection.executemany("DELETE FROM timing WHERE rowid = ?", ((number,) for number in refused))


def _is_device(arch: str, name: str, facts: str) -> bool:
    try:
        Device(arch=arch, name=name, facts=facts)
    except ValidationError:
        return False
    return True


def _refuse_artifacts(source: Source) -> None:
    """Drop invalid builds, and the timings of their libraries."""
    refused = set[str]()
    of_arch = "(SELECT arch FROM kernel JOIN lineage ON lineage.id = lineage WHERE kernel.id = kernel_id) AS of_arch"
    for row in map(dict, source.connection.execute(f"SELECT *, {of_arch} FROM artifact")):
        reason = _what_is_wrong(row)
        if reason is not None:
            source.refused["artifact", reason] += 1
            refused.add(row["key"])
    if refused:
        timings = delete(source.connection, "timing", "artifact_key", refused)
        if timings:
            source.refused["timing", "its artifact is refused"] += timings
        delete(source.connection, "artifact", "key", refused)


def delete(copy: sqlite3.Connection, table: str, column: str, values: Iterable[str]) -> int:
    """Delete the rows of a copy's table whose ``column`` has one of these values; return their number."""
    statement = f"DELETE FROM {table} WHERE {column} IN (SELECT value FROM json_each(?))"
    return copy.execute(statement, (json.dumps(list(values)),)).rowcount


def _what_is_wrong(row: dict[str, Any]) -> str | None:
    columns = {name: value for name, value in row.items() if name not in ("elsewhere", "dropped", "of_arch")}
    if columns["status"] == "quarantined":
        columns["status"] = "built"  # the state in its record: quarantine is the catalog's own
    try:
        record = ArtifactRecord.from_columns(columns)
    except ValidationError as error:
        return _reason(error)
    except ValueError as error:
        return str(error)
    if record.arch != row["of_arch"]:
        return "arch: differs from that of its kernel"
    return "created: a date in the future, or none" if is_future(record.created) else None


def _refuse_foreign(source: Source) -> None:
    """Drop invalid timings of foreign kernels."""
    refused = list[tuple[str]]()
    for key, stated in foreign.stored(source.connection):
        try:
            reason = None if ForeignTiming.model_validate(stated).key == key else "key: not the digest of its fields"
        except ValidationError as error:
            reason = _reason(error)
        if reason is not None:
            source.refused["foreign timing", reason] += 1
            refused.append((key,))
    source.connection.executemany("DELETE FROM foreign_timing WHERE key = ?", refused)


def _refuse_models(source: Source) -> None:
    """Drop invalid models."""
    refused = list[int]()
    for row in map(dict, source.connection.execute("SELECT rowid AS number, * FROM model")):
        number = row.pop("number")
        try:
            Model.model_validate({name: row[name] for name in Model.model_fields})
        except ValidationError as error:
            source.refused["model", _reason(error)] += 1
            refused.append(number)
    source.connection.executemany("DELETE FROM model WHERE rowid = ?", ((number,) for number in refused))


def _reason(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {expected(first)}" if place else expected(first)
