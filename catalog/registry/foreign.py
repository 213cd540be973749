"""Timings of kernels that are no rows of the catalog: other projects' tables, and implementations that were timed here.

Tables are kept with all their fields, and never take part in selection. Those timed here beside our kernels are rivals
of these, under the same measuring policy. If several records state the same problem on the same device,
:data:`EVIDENCE` decides which one is preferred. The others stay, so that nothing of a table is lost.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import groupby
from typing import TYPE_CHECKING, Any

from catalog.errors import ProblemError, UsageError
from catalog.ops import operation, problem_of_key
from catalog.registry.rows import Device, ForeignTiming
from catalog.registry.timings import problem_id
from catalog.schema.policy import CONDITION, Policy
from catalog.schema.problem import Problem
from catalog.schema.problem_form import canonical

if TYPE_CHECKING:
    from catalog.runtime.devices import DeviceInfo
    from catalog.runtime.measure import Measurement

HERE = "catalog"
"""The format of timings of implementations that were measured here; ``table_name`` is the implementation's name."""

VIEW = "foreign_timings"
"""The view of all foreign timings, with their kernels, devices and problems."""

EVIDENCE = (
    "foreign_timing.median_ms IS NULL, foreign_timing.measured DESC NULLS LAST, foreign_timing.n DESC NULLS LAST, "
    "foreign_timing.median_ms, foreign_timing.key"
)
"""The order of records of one problem on one device: those with a time, then the newest, then those with the most
launches, then the fastest.
"""

_SAME = ("format", "table_name", "device_id", "problem")
"""Records with equal values state the same problem on the same device."""

_PLACE = (
    f"PARTITION BY {', '.join(f'foreign_timing.{name}' for name in (*_SAME, 'measured_as', 'cold'))} "
    f"ORDER BY {EVIDENCE}"
)

_JOINED = (
    "foreign_timing JOIN foreign_kernel ON foreign_kernel.id = foreign_timing.kernel_id "
    "JOIN device ON device.id = foreign_timing.device_id LEFT JOIN problem AS ours ON ours.id = problem_id"
)

_COLUMNS: Mapping[str, str] = {
    **{name: f"foreign_kernel.{name}" for name in ("source", "operation", "arch")},
    "device": "device.name",
    "facts": "device.facts",
    **{name: f"foreign_timing.{name}" for name in ("format", "table_name", "problem")},
    "name": "foreign_kernel.name",
    "traits": "foreign_kernel.traits",
    **{name: f"foreign_timing.{name}" for name in ("median_ms", "n")},
    "preferred": f"row_number() OVER ({_PLACE}) = 1",
    **{name: f"foreign_timing.{name}" for name in ("tool", "measured", "file", "line", "created", "fields")},
    **{name: f"foreign_timing.{name}" for name in ("measured_as", "cold")},
    "problem_key": "ours.key",
    "key": "foreign_timing.key",
}

LISTED = ("operation", "arch", "facts", "table_name", "problem", "name", "median_ms", "preferred")
"""The columns that a query shows by default."""

VIEW_SQL = (
    f"CREATE VIEW IF NOT EXISTS {VIEW} AS "
    f"SELECT {', '.join(f'{sql} AS {name}' for name, sql in _COLUMNS.items())} FROM {_JOINED}"
)

_STORED = (
    *("format", "table_name", "problem", "median_ms", "n", "tool", "measured", "fields", "file", "line"),
    *("measured_as", "cold"),
)
"""The fields of :class:`~catalog.registry.rows.ForeignTiming` that are columns of table ``foreign_timing``."""

_OF_KERNEL = ("source", "operation", "name", "traits")
"""The fields that are columns of table ``foreign_kernel``."""

_RECORDS = (
    f"SELECT foreign_timing.*, {', '.join(f'foreign_kernel.{name}' for name in _OF_KERNEL)}, device.arch, "
    f"device.name AS device, device.facts FROM {_JOINED}"
)


@dataclass(frozen=True)
class Duplicate:
    """A record of a problem that has a better one: both, and the reason in words."""

    record: ForeignTiming
    preferred: ForeignTiming
    reason: str

    def __str__(self) -> str:
        return f"{_words(self.record)}: superseded by {_words(self.preferred)}, because {self.reason}"


def _words(record: ForeignTiming) -> str:
    return f"{record.file}:{record.line} ({'no time' if record.median_ms is None else f'{record.median_ms:.6g} ms'})"


@dataclass(frozen=True, slots=True)
class Rival:
    """An implementation that was timed here beside our kernels: its name, project, version, and median in ms."""

    name: str
    title: str
    version: str
    median_ms: float

    @property
    def id(self) -> str:
        """As :func:`rival_id`."""
        return rival_id(self.name)


def rival_id(name: str) -> str:
    """The word for an implementation among ids of kernels; it sorts after these, which are hexadecimal numbers."""
    return f"foreign:{name}"


def rival_timing(rival: Rival, problem: Problem, device: DeviceInfo, measurement: Measurement) -> ForeignTiming:
    """The record of an implementation's measurement on a problem and device."""
    precise = ("min_ms", "p10_ms", "p90_ms", "low_ms", "high_ms", "load")
    return ForeignTiming(
        source=rival.name,
        operation=problem.operation,
        name=rival.title,
        traits=canonical({"version": rival.version}),
        device=Device(arch=device.arch, name=device.name, facts=device.facts),
        format=HERE,
        table_name=rival.name,
        problem=canonical({"key": problem.key}),
        median_ms=measurement.median_ms,
        n=measurement.n,
        tool=HERE,
        measured=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        fields=json.dumps({name: f"{getattr(measurement, name):.6g}" for name in precise}),
        file="",
        line=0,
        measured_as=measurement.measured_as,
        cold=int(measurement.cold),
    )


def rivals(connection: sqlite3.Connection, problem_id: int, device_id: int | None, policy: Policy) -> list[Rival]:
    """The implementations that were timed on a problem and a device under a policy, fastest first.

    Of several records of one version, the last one measured counts.
    """
    rows = connection.execute(
        "SELECT table_name, name, json_extract(traits, '$.version') AS version, median_ms, max(measured) "
        "FROM foreign_timing JOIN foreign_kernel ON foreign_kernel.id = kernel_id "
        f"WHERE format = '{HERE}' AND problem_id = :problem AND device_id = :device AND {CONDITION} "
        "AND median_ms IS NOT NULL GROUP BY table_name, version ORDER BY median_ms, table_name",
        {"problem": problem_id, "device": device_id, **policy.parameters},
    )
    return [Rival(row["table_name"], row["name"], row["version"], row["median_ms"]) for row in rows]


def record(connection: sqlite3.Connection, timings: Iterable[ForeignTiming]) -> int:
    """Store timings, in the caller's transaction, and return the number of new ones.

    A timing that is there already is left as it is. Its problem is linked to a problem of this catalog as soon as an
    installed operation can state it.
    """
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    ids = _Ids(connection)
    before = connection.execute("SELECT count(*) FROM foreign_timing").fetchone()[0]
    columns = ("key", "kernel_id", "device_id", "problem_id", *_STORED, "created")
    insert = (
        f"INSERT INTO foreign_timing ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))}) "
        "ON CONFLICT (key) DO UPDATE SET problem_id = excluded.problem_id WHERE foreign_timing.problem_id IS NULL"
    )
    rows = (
        (one.key, ids.kernel(one), ids.device(one.device), ids.problem(one), *(getattr(one, c) for c in _STORED), now)
        for one in timings
    )
    connection.executemany(insert, rows)
    return int(connection.execute("SELECT count(*) FROM foreign_timing").fetchone()[0] - before)


class _Ids:
    """The row ids of what timings refer to; missing rows are added."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._ids: dict[tuple[str, ...], int | None] = {}

    def kernel(self, timing: ForeignTiming) -> int:
        columns = ("source", "operation", "arch", "name", "traits", "digest")
        values = (timing.source, timing.operation, timing.device.arch, timing.name, timing.traits)
        return self._id("foreign_kernel", columns, (*values, hashlib.sha256(timing.traits.encode()).hexdigest()))

    def device(self, device: Device) -> int:
        return self._id("device", ("arch", "name", "facts"), (device.arch, device.name, device.facts))

    def problem(self, timing: ForeignTiming) -> int | None:
        key = ("problem", timing.operation, timing.format, timing.table_name, timing.problem)
        if key not in self._ids:
            problem = problem_of(timing)
            self._ids[key] = None if problem is None else problem_id(self._connection, problem)
        return self._ids[key]

    def _id(self, table: str, columns: tuple[str, ...], values: tuple[str, ...]) -> int:
        key = (table, *values)
        found = self._ids.get(key)
        if found is None:
            names, holes = ", ".join(columns), ", ".join("?" * len(columns))
            self._connection.execute(f"INSERT INTO {table} ({names}) VALUES ({holes}) ON CONFLICT DO NOTHING", values)
            where = " AND ".join(f"{name} = ?" for name in columns)
            [found] = self._connection.execute(f"SELECT id FROM {table} WHERE {where}", values).fetchone()
            self._ids[key] = found
        return int(found)


def problem_of(timing: ForeignTiming) -> Problem | None:
    """The problem that a timing is about, if an operation that is installed here can state it."""
    try:
        if timing.format == HERE:
            return problem_of_key(json.loads(timing.problem)["key"])
        return operation(timing.operation).foreign_problem(timing.format, timing.table_name, json.loads(timing.problem))
    except (UsageError, ProblemError, KeyError, TypeError, ValueError):
        return None


def duplicates(
    connection: sqlite3.Connection, timings: Iterable[ForeignTiming], *, one_kernel_per_problem: bool
) -> Iterator[Duplicate]:
    """The recorded duplicates that involve one of ``timings``: records of a problem on a device that has a better one.

    Unless ``one_kernel_per_problem``, records of different kernels are alternatives, not duplicates.
    """
    involved = {timing.key for timing in timings}
    same = _SAME if one_kernel_per_problem else (*_SAME, "kernel_id")
    group = ", ".join(f"foreign_timing.{name}" for name in same)
    rows = connection.execute(
        f"{_RECORDS} WHERE ({group}) IN (SELECT {group} FROM foreign_timing GROUP BY {group} HAVING count(*) > 1) "
        f"ORDER BY {group}, {EVIDENCE}"
    )
    for _, records in groupby(rows, key=lambda row: tuple(row[name] for name in same)):
        best, *others = records
        for other in others:
            if involved & {best["key"], other["key"]}:
                yield Duplicate(_record(other), _record(best), _why(best, other))


def timings_of(connection: sqlite3.Connection, problem: Problem, devices: Sequence[int]) -> list[dict[str, Any]]:
    """What tables state about ``problem`` on the devices with these row ids, in some columns of :data:`VIEW`.

    The order is that of ``devices``, then the fastest first.
    """
    columns = ("source", "arch", "facts", "name", "median_ms", "measured", "file", "line")
    rows = connection.execute(
        f"SELECT {', '.join(f'{_COLUMNS[name]} AS {name}' for name in columns)} FROM {_JOINED} "
        "JOIN json_each(?) AS asked ON asked.value = device.id "
        f"WHERE foreign_timing.format <> '{HERE}' AND ours.key = ? "
        "ORDER BY asked.key, foreign_timing.median_ms NULLS LAST, foreign_timing.key",
        (json.dumps(devices), problem.key),
    )
    return [dict(row) for row in rows]


def stored(connection: sqlite3.Connection) -> Iterator[tuple[str, dict[str, Any]]]:
    """The keys of all recorded timings, each with its fields."""
    return ((row["key"], _fields(row)) for row in connection.execute(_RECORDS).fetchall())


def _fields(row: sqlite3.Row) -> dict[str, Any]:
    """The fields of :class:`~catalog.registry.rows.ForeignTiming` in a row of :data:`_RECORDS`."""
    device = {"arch": row["arch"], "name": row["device"], "facts": row["facts"]}
    return {name: row[name] for name in (*_STORED, *_OF_KERNEL)} | {"device": device}


def _record(row: sqlite3.Row) -> ForeignTiming:
    """A record of :data:`_RECORDS`, which was valid when it was stored."""
    fields = _fields(row)
    return ForeignTiming.model_construct(**fields | {"device": Device.model_construct(**fields["device"])})


def _why(best: sqlite3.Row, other: sqlite3.Row) -> str:
    """Why a record ranks before another, by :data:`EVIDENCE`."""
    if other["median_ms"] is None and best["median_ms"] is not None:
        return "it has a time"
    for column, words in (("measured", "it is newer"), ("n", "it has more launches"), ("median_ms", "it is faster")):
        if best[column] != other[column]:
            return words
    return "its key sorts first"
