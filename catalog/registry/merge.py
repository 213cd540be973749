"""Merge catalogs: build records and timings of other machines become rows of this one.

- Devices are equal if arch, name and facts are; problems if their keys are; kernels if their ids are.
- A kernel row that this catalog lacks is copied with its receipts, whatever its revision and space, if this program
  makes the same id and name from its traits. It is not copied into a complete population: there the spec has no such
  kernel, so one of the two catalogs was made from other facts, and everything about that kernel is left out.
- Of timings of the same problem, kernel, device, artifact and policy, the newest wins. Of records of the same artifact,
  a success wins over a failure, then the newest wins.
- An artifact that comes from a merge is marked ``elsewhere``: its library is in another cache. So the column ``built``
  does not count it, and selection ignores failures of another machine's compiler. A local build of the same content
  key removes the mark.
- Timings of foreign kernels are added unless the same record is there; their problems are linked by the operations
  that are installed here.
- Of models of the time of a kind, lineage, device and policy, the one from most problems wins, then the newest.
- Misses are not merged: they say what was asked for on a machine, and counts cannot be merged twice.

The other files are read first and never written (:mod:`catalog.registry.merge_read`). All changes are one transaction.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from catalog.errors import UsageError
from catalog.messages import counted
from catalog.ops import problem_of_key
from catalog.registry import foreign
from catalog.registry.kernels import add_kernel, kernel_of, lineage_id, populate_command
from catalog.registry.merge_read import Source, opened, reading
from catalog.registry.rows import ForeignTiming
from catalog.registry.timings import problem_id
from catalog.registry.transactions import transaction
from catalog.schema.kernel import Kernel
from catalog.schema.lineage import LINEAGE, Lineage

COLUMNS = ("from", "what", "added", "renewed", "the same")
"""Columns of :attr:`Merged.rows`."""

_TABLES = ("kernel", "artifact", "device", "problem", "timing")
_FOREIGN_TABLES = ("foreign_kernel", "foreign_timing")
_OTHERS = ("model", *_FOREIGN_TABLES)

Row = dict[str, Any]


@dataclass(frozen=True)
class Merged:
    """What happened to the rows of one file.

    ``left_out`` counts kernels that were left out, with their builds and timings, by reason. ``refused`` counts
    invalid rows by table and reason.
    """

    path: Path
    counts: Mapping[str, Counter[str]] = field(
        default_factory=lambda: {table: Counter() for table in (*_TABLES, *_OTHERS)}
    )
    left_out: Counter[str] = field(default_factory=Counter)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def rows(self) -> list[list[Any]]:
        """The values of :data:`COLUMNS`, one row for each table; models and tables of foreign kernels only if any."""
        return [
            [self.path.name, f"{table.replace('_', ' ')}s", *(count[how] for how in COLUMNS[2:])]
            for table, count in self.counts.items()
            if table in _TABLES or count
        ]

    @property
    def notes(self) -> list[str]:
        """One line for all refused rows, and one for each reason for leaving kernels out."""
        refused = [f"{counted(rows, table)} ({reason})" for (table, reason), rows in self.refused.most_common()]
        line = f"{self.path}: refused {counted(sum(self.refused.values()), 'row')}: {'; '.join(refused)}"
        return ([line] if refused else []) + [
            f"{self.path}: left out {counted(kernels, 'kernel')}, with builds and timings, {reason}"
            for reason, kernels in self.left_out.items()
        ]


def merge(connection: sqlite3.Connection, own: Path, paths: Sequence[Path]) -> list[Merged]:
    """Merge the catalogs at ``paths`` into ``connection``, that of the file ``own``, and return one result for each.

    Raises:
        UsageError: one of them is ``own``.
        RegistryError: one is missing, not a catalog, damaged, or from a newer version; or ``own`` cannot be written.
    """
    for path in paths:
        if path.exists() and path.samefile(own):
            raise UsageError(f"{path} is the catalog that the others are merged into")
    with ExitStack() as stack:
        sources = [stack.enter_context(opened(path)) for path in paths]
        with transaction(connection):
            return [_Merge(connection, source).run() for source in sources]


class _Merge:
    """Merges one file into another, inside the caller's transaction."""

    def __init__(self, connection: sqlite3.Connection, source: Source) -> None:
        self._connection, self._other = connection, source.connection
        self._merged = Merged(source.path, refused=source.refused)
        self._devices: dict[int, int] = {}

    def run(self) -> Merged:
        with reading(self._merged.path):
            kernels = self._kernels()
            self._artifacts(kernels)
            self._timings(kernels)
            self._models()
            self._foreign()
        return self._merged

    def _all(self, sql: str) -> list[Row]:
        return [dict(row) for row in self._other.execute(sql)]

    def _count(self, table: str, how: str) -> None:
        self._merged.counts[table][how] += 1

    def _kernels(self) -> set[str]:
        """Add missing kernels that the other file's artifacts and timings refer to; the ids of all that are here."""
        whole = "SELECT lineage FROM population WHERE receipts = '' AND restriction = ''"
        populated = {row[0] for row in self._connection.execute(whole)}
        there = "SELECT kernel_id FROM artifact UNION SELECT kernel_id FROM timing"
        known = set()
        for row in self._all(f"SELECT * FROM kernel WHERE id IN ({there}) ORDER BY id"):
            if self._connection.execute("SELECT 1 FROM kernel WHERE id = ?", (row["id"],)).fetchone():
                self._count("kernel", "the same")
            else:
                reason = self._add_unless_obstructed(row, populated)
                if reason is not None:
                    self._merged.left_out[reason] += 1
                    continue
            known.add(str(row["id"]))
        return known

    def _add_unless_obstructed(self, row: Row, populated: set[int]) -> str | None:
        """Add a kernel row of the other catalog, or return the reason why it must be left out."""
        try:
            kernel = kernel_of(self._other, row["id"])
        except (ValueError, KeyError, TypeError):
            kernel = None
        if kernel is None or (kernel.id, kernel.name) != (row["id"], row["name"]) or not _in_bounds(row):
            return "of another version of this program: their traits make another id or name"
        lineage = lineage_id(self._connection, kernel.lineage)
        if kernel.base and lineage not in populated:
            return (
                f"of {kernel.lineage}, which was not adopted here. Adopt the same checkout first: "
                f"{populate_command(kernel.lineage, 'CHECKOUT')}"
            )
        if lineage in populated:
            return f"not among those that the facts here make for {kernel.lineage}: populate both catalogs again"
        same = "SELECT 1 FROM kernel WHERE name = ? AND lineage = ?"
        shared = kernel.naming(kernel.family, kernel.lineage).hidden
        if not shared and self._connection.execute(same, (row["name"], lineage)).fetchone():
            return "with other traits than the kernel of the same name here"
        self._add_kernel(kernel, row)
        return None

    def _add_kernel(self, kernel: Kernel, row: Row) -> None:
        add_kernel(self._connection, kernel, row)
        receipts = self._other.execute(
            "SELECT kernel_id, receipt FROM kernel_receipt WHERE kernel_id = ? AND receipt BETWEEN 0 AND 1000000",
            (row["id"],),
        )
        self._connection.executemany("INSERT INTO kernel_receipt VALUES (?, ?)", map(tuple, receipts))
        self._count("kernel", "added")

    def _artifacts(self, kernels: set[str]) -> None:
        for row in self._all("SELECT * FROM artifact ORDER BY key"):
            if row["kernel_id"] not in kernels:
                continue
            here = self._row("artifact", {"key": row["key"]})
            if here is not None and here["status"] == "quarantined" and not here["elsewhere"]:
                self._count("artifact", "the same")  # only this machine can lift its own quarantine
                continue
            local = here is not None and here["status"] == "built" and not here["elsewhere"]
            row |= {"elsewhere": int(not local), "dropped": here["dropped"] if local and here is not None else None}
            self._put("artifact", ("key",), here, row, ("status", "created"))

    def _timings(self, kernels: set[str]) -> None:
        problems = dict[int, int]()
        for row in self._all("SELECT * FROM timing"):
            if row["kernel_id"] not in kernels:
                continue
            device, problem = row["device_id"], row["problem_id"]
            if problem not in problems:
                problems[problem] = self._problem(problem)
            row |= {"device_id": self._device(device), "problem_id": problems[problem]}
            key = ("problem_id", "kernel_id", "device_id", "artifact_key", "measured_as", "cold")
            self._put("timing", key, self._row("timing", {name: row[name] for name in key}), row, ("created",))

    def _models(self) -> None:
        """Of models of the same kind, lineage, device and policy, the one from most problems wins, then the newest."""
        for row in self._all(f"SELECT model.*, {', '.join(LINEAGE)} FROM model JOIN lineage ON lineage.id = lineage"):
            lineage = lineage_id(self._connection, Lineage(*(row.pop(column) for column in LINEAGE)))
            if lineage is None:  # none of its kernels is here
                continue
            row |= {"lineage": lineage, "device_id": self._device(row["device_id"])}
            key = ("kind", "lineage", "device_id", "measured_as", "cold")
            here = self._row("model", {name: row[name] for name in key})
            self._put("model", key, here, row, ("problems", "created"))

    def _foreign(self) -> None:
        before = _foreign_rows(self._connection)
        foreign.record(
            self._connection, (ForeignTiming.model_validate(stated) for _, stated in foreign.stored(self._other))
        )
        after, there = _foreign_rows(self._connection), _foreign_rows(self._other)
        for table, rows in there.items():
            added = after[table] - before[table]
            self._merged.counts[table].update({"added": added, "the same": rows - added} if rows else {})

    def _device(self, number: int) -> int:
        """The number in this file of the device that has ``number`` in the other; a new device is added."""
        if number in self._devices:
            return self._devices[number]
        device = dict(self._other.execute("SELECT arch, name, facts FROM device WHERE id = ?", (number,)).fetchone())
        added = self._connection.execute(
            "INSERT INTO device (arch, name, facts) VALUES (:arch, :name, :facts) ON CONFLICT DO NOTHING", device
        ).rowcount
        self._count("device", "added" if added else "the same")
        where = "arch = :arch AND name = :name AND facts = :facts"
        here = self._connection.execute(f"SELECT id FROM device WHERE {where}", device).fetchone()
        self._devices[number] = int(here[0])
        return self._devices[number]

    def _problem(self, number: int) -> int:
        """As :meth:`_device`, for a problem. Columns that derive from its key are computed again."""
        [key] = self._other.execute("SELECT key FROM problem WHERE id = ?", (number,)).fetchone()
        here = self._row("problem", {"key": key})
        self._count("problem", "added" if here is None else "the same")
        return problem_id(self._connection, problem_of_key(key))

    def _row(self, table: str, key: Mapping[str, Any]) -> Row | None:
        where = " AND ".join(f"{name} = :{name}" for name in key)
        row = self._connection.execute(f"SELECT * FROM {table} WHERE {where}", key).fetchone()
        return None if row is None else dict(row)

    def _put(self, table: str, key: Sequence[str], here: Row | None, row: Row, order: Sequence[str]) -> None:
        """Write ``row`` if there is none here, or a lower-ranking one by the columns ``order``, then all columns."""
        if here is not None and _rank(row, order) <= _rank(here, order):
            self._count(table, "the same")
            return
        names, holes = ", ".join(row), ", ".join(f":{name}" for name in row)
        updates = ", ".join(f"{name} = excluded.{name}" for name in row if name not in key)
        self._connection.execute(
            f"INSERT INTO {table} ({names}) VALUES ({holes}) ON CONFLICT ({', '.join(key)}) DO UPDATE SET {updates}",
            row,
        )
        self._count(table, "added" if here is None else "renewed")


def _foreign_rows(connection: sqlite3.Connection) -> dict[str, int]:
    """The numbers of rows of the tables of foreign kernels; kernels count only with timings."""
    counts = connection.execute("SELECT count(DISTINCT kernel_id), count(*) FROM foreign_timing").fetchone()
    return dict(zip(_FOREIGN_TABLES, counts, strict=True))


def _in_bounds(row: Row) -> bool:
    return row["hw_valid"] in (0, 1) and 0 <= row["dispatch_order"] < 2**31


def _rank(row: Row, order: Sequence[str]) -> tuple[Any, ...]:
    """The rank of a row among rows with the same key, independent of the direction of the merge."""
    leading = [row[name] != "failed" if name == "status" else row[name] for name in order]
    own = {"elsewhere", "device_id", "problem_id", "lineage"}  # these differ between files
    rest = {name: value for name, value in row.items() if name not in own}
    return (*leading, json.dumps(rest, sort_keys=True))
