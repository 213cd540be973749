"""Measurements in the registry: one row per problem, kernel, device and library."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Literal

from catalog.ops import problem_of_key
from catalog.schema.policy import CONDITION, Policy
from catalog.schema.problem import MOST_COORDINATES, Problem

if TYPE_CHECKING:
    from catalog.runtime.devices import DeviceInfo
    from catalog.runtime.measure import Measurement

SIZES = tuple(f"size_{number}" for number in range(1, MOST_COORDINATES + 1))
"""The columns of table ``problem`` for a problem's coordinates; unused ones are 0."""

MAX_MISSES = 1_000
"""Maximum number of buckets in the table of misses; beyond it the least recently asked for are dropped."""

WIDEST = 0.1
"""A measurement is evidence if half the confidence interval of its median is at most this share of the median."""

SOUND = f"high_ms - low_ms <= {2 * WIDEST} * median_ms"
"""The same condition in SQL: older versions recorded noise too, which selection must not use."""

MEASURED = (
    *("artifact_key", "measured_as", "cold", "n", "min_ms", "median_ms", "p10_ms", "p90_ms", "low_ms", "high_ms"),
    *("tflops", "gbps", "load", "clock_mhz", "created"),
)
"""The columns of table ``timing`` that mean the same in every catalog."""


@dataclass(frozen=True, slots=True)
class Timing:
    """A measurement with the id of its kernel's row and the content key of its library."""

    kernel_id: str
    artifact_key: str
    measurement: Measurement


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A measured problem of the same kind, its distance, and whether it is the same problem."""

    id: int
    key: str
    distance: float
    same: bool


class Measured:
    """The problems of one kind that were measured on a device under one policy, for finding the nearest one.

    :meth:`nearest` is :func:`nearest` in memory: it adds the same numbers in the same order, so both choose alike.
    """

    def __init__(self, rows: Sequence[tuple[Any, ...]]) -> None:
        import numpy as np

        self._ids = [row[0] for row in rows]
        self._keys = [row[1] for row in rows]
        self._sizes = np.array([row[2:] for row in rows], np.float64).T.copy()

    @classmethod
    def of_kind(cls, connection: sqlite3.Connection, kind: str, device: int | None, policy: Policy) -> Measured | None:
        """The problems of ``kind`` on the device with this row id under ``policy``; None if there are none."""
        rows = connection.execute(
            f"SELECT id, key, {', '.join(SIZES)} FROM problem WHERE kind = :kind AND {_THERE} ORDER BY id",
            {"kind": kind, "device": device, **policy.parameters},
        ).fetchall()
        return cls([tuple(row) for row in rows]) if rows else None

    def nearest(self, problem: Problem) -> tuple[int, bool]:
        """The row id of the measured problem nearest to ``problem``, and whether it is ``problem`` itself."""
        import numpy as np

        apart = self._sizes - np.array(_place(problem))[:, None]
        squared = np.add.reduce(apart * apart)  # adds one size after another, as SQL does
        place = int(squared.argmin())
        if squared[place] < _SAME_PLACE:  # if several problems share the place, prefer ``problem`` itself
            for at in (squared < _SAME_PLACE).nonzero()[0].tolist():
                if self._keys[at] == problem.key:
                    return self._ids[at], True
        return self._ids[place], False


_SAME_PLACE = 1e-12
"""Squared distance below which coordinates computed by two C libraries may be equal."""

_THERE = (
    f"EXISTS (SELECT 1 FROM timing WHERE problem_id = problem.id AND device_id = :device AND {CONDITION} AND {SOUND})"
)


def device_id(connection: sqlite3.Connection, device: DeviceInfo) -> int | None:
    """The row id of a device, if anything was measured on it."""
    row = connection.execute(
        "SELECT id FROM device WHERE arch = ? AND name = ? AND facts = ?", (device.arch, device.name, device.facts)
    ).fetchone()
    return None if row is None else int(row[0])


def most_measured(connection: sqlite3.Connection, arch: str) -> int | None:
    """The row id of the device of ``arch`` with the most timings; the first of several."""
    row = connection.execute(
        "SELECT id, (SELECT count(*) FROM timing WHERE device_id = device.id) AS timings FROM device "
        "WHERE arch = ? AND timings ORDER BY timings DESC, id LIMIT 1",
        (arch,),
    ).fetchone()
    return None if row is None else int(row[0])


def record(
    connection: sqlite3.Connection, problem: Problem, device: DeviceInfo, timings: Iterable[Timing], *, stamp: str = ""
) -> None:
    """Store timings of one problem on one device, in the caller's transaction; they replace older ones.

    Args:
        connection: in a transaction.
        problem: the problem that was computed.
        device: the device that it ran on.
        timings: their kernels and libraries are rows of the registry.
        stamp: time of the measurement, ISO 8601; by default now, in UTC.
    """
    connection.execute(
        "INSERT INTO device (arch, name, facts) VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
        (device.arch, device.name, device.facts),
    )
    of_device, of_problem = device_id(connection, device), problem_id(connection, problem)
    created = stamp or datetime.now(timezone.utc).isoformat(timespec="seconds")
    for timing in timings:
        known = asdict(timing.measurement) | {
            "artifact_key": timing.artifact_key,
            "tflops": problem.flops / timing.measurement.median_ms / 1e9,
            "gbps": problem.traffic / timing.measurement.median_ms / 1e6,
            "created": created,
        }
        row = {"problem_id": of_problem, "kernel_id": timing.kernel_id, "device_id": of_device}
        row |= {name: known[name] for name in MEASURED}
        holes = ", ".join(f":{name}" for name in row)
        connection.execute(f"INSERT OR REPLACE INTO timing ({', '.join(row)}) VALUES ({holes})", row)


def timings_of(connection: sqlite3.Connection, keys: Set[str]) -> list[dict[str, Any]]:
    """The timings of the libraries of ``keys``, each with the key of its problem and the columns of its device."""
    rows = connection.execute(
        f"SELECT {', '.join(f'timing.{name}' for name in MEASURED)}, problem.key AS problem, "
        "device.arch, device.name, device.facts FROM timing JOIN problem ON problem.id = problem_id "
        "JOIN device ON device.id = device_id ORDER BY artifact_key, problem.key, device.id, measured_as, cold"
    )
    return [dict(row) for row in rows if row["artifact_key"] in keys]


def add_timings(
    connection: sqlite3.Connection,
    timings: Iterable[Mapping[str, Any]],
    conflict: Literal["IGNORE", "REPLACE"] = "IGNORE",
) -> int:
    """Add timings in the form of :func:`timings_of` plus ``kernel_id``, in the caller's transaction.

    Existing ones stay unchanged, or are replaced. Returns the number of rows that were written.
    """
    added = 0
    for timing in timings:
        connection.execute("INSERT OR IGNORE INTO device (arch, name, facts) VALUES (:arch, :name, :facts)", timing)
        done = connection.execute(
            f"INSERT OR {conflict} INTO timing (problem_id, device_id, kernel_id, {', '.join(MEASURED)}) VALUES "
            "(:problem_id, (SELECT id FROM device WHERE arch = :arch AND name = :name AND facts = :facts), :kernel_id, "
            f"{', '.join(f':{name}' for name in MEASURED)})",
            {**timing, "problem_id": problem_id(connection, problem_of_key(timing["problem"]))},
        )
        added += done.rowcount
    return added


def measured(
    connection: sqlite3.Connection, problem: Problem, device: DeviceInfo, policy: Policy
) -> dict[tuple[str, str], float]:
    """The median in ms of every library measured on the problem under the policy, by (kernel id, key)."""
    rows = connection.execute(
        "SELECT kernel_id, artifact_key, median_ms FROM timing JOIN problem ON problem.id = problem_id "
        f"WHERE problem.key = :problem AND device_id = :device AND {CONDITION}",
        {"problem": problem.key, "device": device_id(connection, device), **policy.parameters},
    )
    return {(row[0], row[1]): row[2] for row in rows}


def nearest(
    connection: sqlite3.Connection, problem: Problem, device: int | None, policy: Policy, *, others: bool = False
) -> Neighbour | None:
    """The problem most similar to ``problem`` that was measured under ``policy``: itself, or the nearest of its kind.

    The distance is Euclidean over :attr:`~catalog.schema.problem.Problem.coordinates`; at equal distances the problem
    recorded first wins. ``others`` excludes the problem itself.
    """
    if device is None:
        return None
    place: dict[str, object] = dict(zip(SIZES, _place(problem), strict=True))
    place |= {"device": device, "key": problem.key, "kind": problem.form.kind, "others": others, **policy.parameters}
    squares = " + ".join(f"({name} - :{name}) * ({name} - :{name})" for name in SIZES)
    row = connection.execute(
        f"SELECT id, key, {squares} AS squared FROM problem WHERE kind = :kind AND {_THERE} "
        "AND NOT (:others AND key = :key) ORDER BY key <> :key, squared, id LIMIT 1",
        place,
    ).fetchone()
    return None if row is None else Neighbour(row["id"], row["key"], row["squared"] ** 0.5, row["key"] == problem.key)


def best_ms(connection: sqlite3.Connection, problem: int, device: int, policy: Policy) -> float | None:
    """The lowest sound median on the problem and device with these row ids, under a policy."""
    row = connection.execute(
        "SELECT min(median_ms) FROM timing WHERE problem_id = :problem AND device_id = :device "
        f"AND {CONDITION} AND {SOUND}",
        {"problem": problem, "device": device, **policy.parameters},
    ).fetchone()
    best: float | None = row[0]
    return best


def _place(problem: Problem) -> tuple[float, ...]:
    """The values of the columns :data:`SIZES`."""
    coordinates = problem.coordinates
    return coordinates + (0.0,) * (len(SIZES) - len(coordinates))


def bucket_of(problem: Problem) -> str:
    """The name of a problem's bucket: problems of one kind and about the same size share it."""
    steps = problem.steps
    return f"{','.join(map(str, steps + (0,) * (len(SIZES) - len(steps))))} {problem.form.kind}"


def bucket_sql(problem: str) -> str:
    """:func:`bucket_of` in SQL, for the row ``problem`` of table ``problem``."""
    return " || ',' || ".join(f"CAST({problem}.{name} AS INTEGER)" for name in SIZES) + f" || ' ' || {problem}.kind"


def record_misses(connection: sqlite3.Connection, problem: Problem, arch: str, count: int) -> None:
    """Count requests for problems like ``problem`` on ``arch`` without a measurement, in the caller's transaction.

    One row counts a whole bucket, :func:`bucket_of`, with its first problem as the example.
    """
    bucket, now = bucket_of(problem), datetime.now(timezone.utc).isoformat(timespec="seconds")
    counted = connection.execute(
        "UPDATE miss SET n = n + ?, last = ? WHERE arch = ? AND bucket = ?", (count, now, arch, bucket)
    )
    if counted.rowcount:
        return
    connection.execute(
        "INSERT INTO miss (arch, bucket, problem_id, n, last) VALUES (?, ?, ?, ?, ?)",
        (arch, bucket, problem_id(connection, problem), count, now),
    )
    too_many = "SELECT rowid FROM miss ORDER BY last, rowid LIMIT max(0, (SELECT count(*) FROM miss) - ?)"
    gone = connection.execute(f"DELETE FROM miss WHERE rowid IN ({too_many}) RETURNING problem_id", (MAX_MISSES,))
    connection.executemany(
        "DELETE FROM problem WHERE id = ?1 AND NOT EXISTS (SELECT 1 FROM miss WHERE problem_id = ?1) "
        "AND NOT EXISTS (SELECT 1 FROM timing WHERE problem_id = ?1) "
        "AND NOT EXISTS (SELECT 1 FROM foreign_timing WHERE problem_id = ?1)",
        [tuple(row) for row in gone.fetchall()],
    )


_TIMED_BUCKETS = (
    f"SELECT DISTINCT device.arch, {bucket_sql('timed')} FROM timing "
    "JOIN device ON device.id = device_id JOIN problem AS timed ON timed.id = timing.problem_id"
)

UNMEASURED = f"(miss.arch, miss.bucket) NOT IN ({_TIMED_BUCKETS})"
"""Condition on a row of table ``miss``: no problem of its bucket was measured on the arch, under any policy."""


def misses(connection: sqlite3.Connection, arch: str, policy: Policy) -> list[tuple[str, int]]:
    """An example from each bucket asked for on ``arch`` and not measured under ``policy``, and its number of requests.

    Each example is the key of a problem; the most wanted bucket comes first.
    """
    rows = connection.execute(
        "SELECT problem.key, miss.n FROM miss JOIN problem ON problem.id = problem_id "
        f"WHERE miss.arch = :arch AND (miss.arch, miss.bucket) NOT IN ({_TIMED_BUCKETS} WHERE {CONDITION}) "
        "ORDER BY miss.n DESC, problem.id",
        {"arch": arch, **policy.parameters},
    )
    return [(row[0], row[1]) for row in rows]


def problem_id(connection: sqlite3.Connection, problem: Problem) -> int:
    """The row id of a problem, which is added if it is new, in the caller's transaction."""
    row = connection.execute("SELECT id FROM problem WHERE key = ?", (problem.key,)).fetchone()
    if row is None:
        columns = ("key", "kind", "operation", *SIZES)
        row = connection.execute(
            f"INSERT INTO problem ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))}) RETURNING id",
            (problem.key, problem.form.kind, problem.operation, *_place(problem)),
        ).fetchone()
    return int(row[0])
