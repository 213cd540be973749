"""Merge catalogs: build records and timings of other machines become rows of this one.

- Devices are equal if arch, name and facts are; problems if their keys are; kernels if their ids are.
- A kernel row that this catalog lacks is copied with its receipts, whatever its revision and space, if this program
  makes the same id and name from its traits. It is not copied into a complete population: there the spec has no such
  kernel, so one of the two catalogs was made from other facts, and everything about that kernel is left out.
- Of timings of the same problem, kernel, device, artifact and policy, the newest wins, then the one with the most
  launches. Of records of the same artifact, a success wins over a failure, then the newest wins. Where these are equal,
  the other columns decide: the order of the files never does.
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

import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from catalog.errors import UsageError
from catalog.messages import counted
from catalog.ops import problem_of_key
from catalog.registry import foreign
from catalog.registry.kernels import add_kernel, kernel_of, lineage_id, populate_command
from catalog.registry.merge_read import Source, attached, delete, opened, reading
from catalog.registry.rows import ForeignTiming
from catalog.registry.timings import problem_id
from catalog.registry.transactions import interruptible, transaction, written_once
from catalog.schema.lineage import LINEAGE

COLUMNS = ("from", "what", "added", "renewed", "the same")
"""Columns of :attr:`Merged.rows`."""

_TABLES = ("kernel", "artifact", "device", "problem", "timing")
_FOREIGN_TABLES = ("foreign_kernel", "foreign_timing")
_OTHERS = ("model", *_FOREIGN_TABLES)

_IDS = ("problem_id", "device_id", "lineage")
"""Columns that refer to rows of another table by numbers, which differ between files."""

_MOST_TERMS = 250
"""Maximum number of files in one statement; SQLite allows 500 terms."""

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
    with opened(paths) as (sources, records), written_once(connection), attached(connection, records):
        merges = [_Merge(connection, source) for source in sources]
        with transaction(connection):
            _merge_kernels(connection, merges)
            for merge in merges:
                merge.merge_builds()
            with interruptible(connection):
                for machines in _rounds(merges):
                    _merge_timings(connection, machines)
            for merge in merges:
                merge.merge_others()
    return [merge.merged for merge in merges]


def _merge_kernels(connection: sqlite3.Connection, merges: Sequence[_Merge]) -> None:
    """Add missing kernels that artifacts and timings of the files refer to, in an order that is not that of the files.

    If several files have a new kernel, it gets the receipts of all.
    """
    whole = "SELECT lineage FROM population WHERE receipts = '' AND restriction = ''"
    populated = {row[0] for row in connection.execute(whole)}
    order = ("id", "hw_valid", "dispatch_order")
    offers = [(merge, row) for merge in merges for row in merge.kernels()]
    added = set[str]()
    for merge, row in sorted(offers, key=lambda offer: tuple(offer[1][name] for name in order)):
        with reading(merge.merged.path):
            merge.merge_kernel(row, populated, added)


def _rounds(merges: Iterable[_Merge]) -> list[list[_Merge]]:
    """Groups of files that have no device in common; files that share one are in different groups, in their order."""
    rounds, latest = list[list[_Merge]](), dict[int, int]()
    for merge in merges:
        devices = merge.devices()
        number = max((latest[device] + 1 for device in devices if device in latest), default=0)
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(merge)
        latest.update(dict.fromkeys(devices, number))
    return rounds


def _merge_timings(connection: sqlite3.Connection, merges: Sequence[_Merge]) -> None:
    """Merge the timings of files that have no device, and so no timing, in common."""
    key = ("problem_id", "kernel_id", "device_id", "artifact_key", "measured_as", "cold")
    _put(connection, merges, "timing", key, evidence=("{0}.created", "{0}.n"))


def _put(
    connection: sqlite3.Connection,
    merges: Sequence[_Merge],
    table: str,
    key: Sequence[str],
    *,
    evidence: Sequence[str],
    values: Mapping[str, str] | None = None,
    updates: Mapping[str, str] | None = None,
) -> None:
    """Write the rows of a table that the files have and the catalog lacks, or has with a lower rank.

    All files are written together in the order of the key: each page of the catalog's index is written once, not once
    a file.

    Args:
        connection: to the catalog.
        merges: files that have no row of the table in common.
        table: all of them have it.
        key: the columns that identify a row.
        evidence: what the rank consists of, in SQL, with a place for the name of a row; then all other columns.
        values: columns that differ between files, with what they are here, in SQL; they have no rank.
        updates: what columns of a replaced row become, in SQL, where it is not what the new row has.
    """
    values = values or {}
    columns = [row["name"] for row in connection.execute(f"PRAGMA main.table_info({table})")]
    terms = [*evidence, *(f"ifnull({{0}}.{name}, -1)" for name in columns if name not in (*key, *values))]
    new, old = (", ".join(term.format(row) for term in terms) for row in ("excluded", table))
    changes = {name: f"excluded.{name}" for name in columns if name not in key} | dict(updates or {})
    rows = [merge.rows(table, columns, values) for merge in merges]
    for merge, there in zip(merges, rows, strict=True):
        merge.count_changes(table, there, key, f"({new}) > ({old})")
    for start in range(0, len(rows), _MOST_TERMS):
        together = " UNION ALL ".join(rows[start : start + _MOST_TERMS])
        connection.execute(
            f"INSERT INTO {table} ({', '.join(columns)}) "
            f"SELECT * FROM ({together}) WHERE TRUE ORDER BY {', '.join(key)} "
            f"ON CONFLICT ({', '.join(key)}) DO UPDATE SET {', '.join(f'{n} = {sql}' for n, sql in changes.items())} "
            f"WHERE ({new}) > ({old})"
        )


class _Merge:
    """Merges one file into another, inside the caller's transaction."""

    def __init__(self, connection: sqlite3.Connection, source: Source) -> None:
        self._connection, self._other, self._table = connection, source.connection, source.table
        self._left_out: list[str] = []
        self.merged = Merged(source.path, refused=source.refused)

    def kernels(self) -> list[Row]:
        """The kernel rows that the file's artifacts refer to. A valid timing refers to the kernel of its artifact."""
        built = "SELECT * FROM kernel WHERE id IN (SELECT kernel_id FROM artifact)"
        return [dict(row) for row in self._other.execute(built)]

    def merge_kernel(self, row: Row, populated: Set[int], added: set[str]) -> None:
        """Add a kernel that is missing here to the catalog and to ``added``, unless something is in the way."""
        id = row["id"]
        if id in added or self._connection.execute("SELECT 1 FROM kernel WHERE id = ?", (id,)).fetchone():
            self._count("kernel", {"the same": 1})
        else:
            reason = self._add_unless_obstructed(row, populated)
            if reason is not None:
                self.merged.left_out[reason] += 1
                self._left_out.append(id)
                return
            added.add(id)
            self._count("kernel", {"added": 1})
        if id in added:
            receipts = self._other.execute(
                "SELECT kernel_id, receipt FROM kernel_receipt WHERE kernel_id = ? AND receipt BETWEEN 0 AND 1000000",
                (id,),
            )
            self._connection.executemany("INSERT OR IGNORE INTO kernel_receipt VALUES (?, ?)", map(tuple, receipts))

    def _add_unless_obstructed(self, row: Row, populated: Set[int]) -> str | None:
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
        add_kernel(self._connection, kernel, row)
        return None

    def merge_builds(self) -> None:
        """Merge artifacts and what timings refer to, and drop everything about kernels that are left out."""
        local = "artifact.status = 'built' AND NOT artifact.elsewhere"
        with reading(self.merged.path):
            self._leave_out()
            self._devices()
            self._problems()
            _put(
                self._connection,
                [self],
                "artifact",
                ("key",),
                # Only this machine can lift its own quarantine.
                evidence=("{0}.status = 'quarantined' AND NOT {0}.elsewhere", "{0}.status <> 'failed'", "{0}.created"),
                values={"elsewhere": "1", "dropped": "NULL"},
                updates={"elsewhere": f"NOT ({local})", "dropped": f"iif({local}, artifact.dropped, NULL)"},
            )

    def merge_others(self) -> None:
        """Merge models and timings of foreign kernels."""
        with reading(self.merged.path):
            key = ("kind", "lineage", "device_id", "measured_as", "cold")
            _put(self._connection, [self], "model", key, evidence=("{0}.problems", "{0}.created"))
            self._foreign()

    def devices(self) -> list[int]:
        """The ids here of the devices of the file's timings and models."""
        return [row[0] for row in self._connection.execute(f"SELECT here FROM {self._table('device')}_here")]

    def rows(self, table: str, columns: Iterable[str], values: Mapping[str, str]) -> str:
        """SQL for the file's rows of a table, with the ids here and, for some columns, other ``values``."""
        ids = {name: self._here(name.removesuffix("_id"), name) for name in _IDS}
        selected = (f"{(ids | dict(values)).get(name, name)} AS {name}" for name in columns)
        return f"SELECT {', '.join(selected)} FROM {self._table(table)} AS row"

    def count_changes(self, table: str, rows: str, key: Sequence[str], renewed: str) -> None:
        """Count which of the file's ``rows``, in SQL, the catalog lacks, and for which ``renewed``, in SQL, is true."""
        [there] = self._connection.execute(f"SELECT count(*) FROM {self._table(table)}").fetchone()
        found, better = self._connection.execute(
            f"SELECT count(*), coalesce(sum({renewed}), 0) FROM ({rows}) AS excluded "
            f"JOIN main.{table} USING ({', '.join(key)})"
        ).fetchone()
        self._count(table, {"added": there - found, "renewed": better, "the same": found - better})

    def _leave_out(self) -> None:
        """Delete builds and timings of kernels that are left out, and models of lineages without any kernel here."""
        if self._left_out:
            for table in ("timing", "artifact"):
                delete(self._connection, self._table(table), "kernel_id", self._left_out)
        self._number("lineage", LINEAGE)
        lineage = self._here("lineage", "lineage")
        self._connection.execute(f"DELETE FROM {self._table('model')} AS row WHERE {lineage} IS NULL")

    def _foreign(self) -> None:
        before = _foreign_rows(self._connection)
        foreign.record(
            self._connection, (ForeignTiming.model_validate(stated) for _, stated in foreign.stored(self._other))
        )
        after, there = _foreign_rows(self._connection), _foreign_rows(self._other)
        for table, rows in there.items():
            added = after[table] - before[table]
            self.merged.counts[table].update({"added": added, "the same": rows - added} if rows else {})

    def _devices(self) -> None:
        """Add the devices of timings and models that are missing here."""
        device, timing, model = map(self._table, ("device", "timing", "model"))
        used = f"SELECT device_id FROM {timing} UNION SELECT device_id FROM {model}"
        self._connection.execute(f"DELETE FROM {device} WHERE id NOT IN ({used})")
        insert = f"INSERT INTO device (arch, name, facts) SELECT arch, name, facts FROM {device} WHERE TRUE ORDER BY id"
        added = self._connection.execute(f"{insert} ON CONFLICT DO NOTHING").rowcount
        there = self._number("device", ("arch", "name", "facts"))
        self._count("device", {"added": added, "the same": there - added})

    def _problems(self) -> None:
        """Add the problems of timings that are missing here, with the columns that derive from their keys."""
        problem, timing = map(self._table, ("problem", "timing"))
        self._connection.execute(f"DELETE FROM {problem} WHERE id NOT IN (SELECT problem_id FROM {timing})")
        asked = f"SELECT key FROM {problem} WHERE key NOT IN (SELECT key FROM main.problem) ORDER BY id"
        missing = self._connection.execute(asked).fetchall()
        for (key,) in missing:
            problem_id(self._connection, problem_of_key(key))
        there = self._number("problem", ("key",))
        self._count("problem", {"added": len(missing), "the same": there - len(missing)})

    def _number(self, table: str, columns: Sequence[str]) -> int:
        """Find the numbers here of the rows of a table, by the columns that identify them; return how many."""
        there = self._table(table)
        self._connection.execute(f"CREATE TABLE {there}_here (there INTEGER PRIMARY KEY, here INTEGER)")
        pairs = f"SELECT there.id, here.id FROM {there} AS there JOIN main.{table} AS here USING ({', '.join(columns)})"
        return self._connection.execute(f"INSERT INTO {there}_here {pairs}").rowcount

    def _here(self, table: str, column: str) -> str:
        """SQL for the number here of the row of ``table`` that ``column`` of the other file's ``row`` refers to."""
        return f"(SELECT here FROM {self._table(table)}_here WHERE there = row.{column})"

    def _count(self, table: str, how: Mapping[str, int]) -> None:
        self.merged.counts[table].update({name: rows for name, rows in how.items() if rows})


def _foreign_rows(connection: sqlite3.Connection) -> dict[str, int]:
    """The numbers of rows of the tables of foreign kernels; kernels count only with timings."""
    counts = connection.execute("SELECT count(DISTINCT kernel_id), count(*) FROM foreign_timing").fetchone()
    return dict(zip(_FOREIGN_TABLES, counts, strict=True))


def _in_bounds(row: Row) -> bool:
    return row["hw_valid"] in (0, 1) and 0 <= row["dispatch_order"] < 2**31
