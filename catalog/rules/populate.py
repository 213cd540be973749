"""Materialise the rows of a spec: one transaction, and no work when nothing changed."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from catalog.errors import SpecError, UsageError
from catalog.ops import operation
from catalog.registry.kernels import lineage_id, made_lineage
from catalog.registry.transactions import interruptible, shorten_log, transaction, written_once
from catalog.rules.enumeration import Join, make_table
from catalog.rules.restriction import NOTHING_LEFT_OUT, Restriction
from catalog.rules.table import rules_of
from catalog.schema.arch_spec import ArchSpec
from catalog.schema.lineage import Lineage, of_lineage


@dataclass(frozen=True)
class Request:
    """What to materialise: a spec, one of its variants, and the receipts to restrict it to (empty: all)."""

    spec: ArchSpec
    variant: str = "generic"
    receipts: tuple[int, ...] = ()
    restriction: Restriction = NOTHING_LEFT_OUT

    @property
    def lineage(self) -> Lineage:
        """The lineage of the rows."""
        return self.spec.lineage(self.variant)


@dataclass(frozen=True)
class Populated:
    """The result of a populate: kernels by family, and whether the rows were there already."""

    request: Request
    families: dict[str, int]
    seconds: float
    unchanged: bool = field(default=False)

    @property
    def kernels(self) -> int:
        """Number of rows."""
        return sum(self.families.values())


def _joins(request: Request) -> Iterator[Join]:
    spec = request.spec
    for name, enumeration in spec.enumerations.items():
        conditions = request.restriction.conditions(spec, name)
        if conditions is not None:
            domains = request.restriction.domains(spec, name)
            for part in enumeration.by_family if conditions else (enumeration,):  # a condition may be about the family
                yield Join(spec, part, request.lineage, tuple(conditions), domains)


Progress = Callable[[float], None]
"""Callback for the fraction of the work that is done, from 0 to 1."""


def populate(
    connection: sqlite3.Connection, request: Request, *, force: bool = False, on_progress: Progress | None = None
) -> Populated:
    """Materialise ``request``; a no-op when the catalog already holds it from the same spec, unless ``force``.

    Rows whose id is unchanged keep their timings and artifacts; rows that the spec no longer makes are deleted.

    Nothing changes if it raises.

    Raises:
        UsageError: the spec has no such mask implementation or receipt.
        SpecError: an expression of the spec is wrong.
        RegistryError: the file cannot be written.
        KeyboardInterrupt: Ctrl-C interrupted it.
    """
    _check(request)
    joins = list(_joins(request))
    receipts = request.receipts or request.spec.receipt_numbers
    digest = _digest(request, joins, receipts)
    started = time.perf_counter()
    there = _record_of(connection, request.lineage)
    if not force and there is not None and there["digest"] == digest:
        return Populated(request, json.loads(there["families"]), time.perf_counter() - started, unchanged=True)
    sweeps = any(join.enumeration.sweep is not None for join in joins)
    rewritten = written_once(connection) if sweeps else nullcontext()
    with rewritten, transaction(connection), interruptible(connection), _explained(request):
        families = _Writer(connection, request, receipts).write(joins, on_progress or (lambda done: None))
        done = Populated(request, families, time.perf_counter() - started)
        _record(connection, done, digest)
    shorten_log(connection)
    return done


def count_by_family(connection: sqlite3.Connection, request: Request, receipt: int | None = None) -> dict[str, int]:
    """Rows of the request's lineage by family, in the schema's order of families; of one receipt if it is given."""
    listed = "" if receipt is None else f" AND id IN (SELECT kernel_id FROM kernel_receipt WHERE receipt = {receipt:d})"
    counted = f"SELECT family, count(*) FROM kernel WHERE {of_lineage()}{listed} GROUP BY family"
    rows = connection.execute(counted, request.lineage.parameters)
    counts: dict[str, int] = dict(rows.fetchall())
    families = operation(request.spec.operation).traits.families
    return {family: counts[family] for family in families if family in counts}


def check_populated(connection: sqlite3.Connection, lineage: Lineage, receipt: int | None) -> None:
    """Make sure that the catalog holds ``lineage`` unrestricted: all receipts, or at least ``receipt`` if given.

    Raises:
        UsageError: it does not hold it.
    """
    arch, revision, variant = lineage.arch, lineage.revision, lineage.variant
    row = _record_of(connection, lineage)
    which = f"({revision}, {variant})"
    again = f"Run: catalog populate --arch {arch} --revision {revision} --mask-impl {variant}"
    if row is None:
        raise UsageError(f"the catalog holds no kernels of {arch} {which}", hint=again)
    receipts, restriction = row["receipts"], row["restriction"]
    if receipts and str(receipt) not in receipts.split():
        raise UsageError(f"the catalog was populated for receipts {receipts} of {arch} only {which}", hint=again)
    if restriction:
        raise UsageError(f"the catalog was populated with a part of {arch} only {which}: {restriction}", hint=again)


def _check(request: Request) -> None:
    spec = request.spec
    if request.variant not in spec.variants:
        raise UsageError(
            f"{spec.arch} has no mask implementation {request.variant!r}",
            hint=f"There are: {', '.join(spec.variants)}.",
        )
    unknown = sorted(set(request.receipts) - set(spec.receipt_numbers))
    if unknown:
        there = ", ".join(map(str, spec.receipt_numbers)) or "none: its kernels are our own"
        raise UsageError(f"{spec.arch} has no receipt {unknown[0]}", hint=f"Its receipts: {there}.")


def _record_of(connection: sqlite3.Connection, lineage: Lineage) -> sqlite3.Row | None:
    """The row of table ``population`` for a lineage: what was made, and from what. None if it was never populated."""
    asked = f"SELECT * FROM population WHERE {of_lineage()}"
    row: sqlite3.Row | None = connection.execute(asked, lineage.parameters).fetchone()
    return row


def _merged(connection: sqlite3.Connection, lineage: Lineage) -> bool:
    """Whether there may be rows that no populate made: rows merged in with another catalog's artifacts."""
    asked = f"SELECT 1 FROM artifact JOIN kernel ON kernel.id = kernel_id WHERE {of_lineage('kernel')} LIMIT 1"
    return connection.execute(asked, lineage.parameters).fetchone() is not None


def _digest(request: Request, joins: Sequence[Join], receipts: Sequence[int]) -> str:
    """Digest of everything that the rows depend on: the facts, and the SQL that this version makes from them."""
    parts = [request.spec.model_dump_json(), request.variant, " ".join(map(str, receipts)), _hw_valid(request.spec)]
    if request.restriction.filter is not None:
        parts.append(request.restriction.filter.digest)
    for join in joins:
        parts += [join.combine_sql(receipts), *(join.project_sql(made) for made in join.enumeration.yields)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()


class _Writer:
    """Writes the rows of one request inside the caller's transaction."""

    def __init__(self, connection: sqlite3.Connection, request: Request, receipts: Sequence[int]) -> None:
        self._connection = connection
        self._request = request
        self._receipts = receipts
        lineage = request.lineage
        self._was_there = _record_of(connection, lineage) is not None or _merged(connection, lineage)
        self._lineage = made_lineage(connection, lineage)
        self._families: Counter[str] = Counter()

    def write(self, joins: Sequence[Join], on_progress: Progress) -> dict[str, int]:
        """Write every row, delete rows that are gone, and return the number of kernels by family."""
        connection, spec = self._connection, self._request.spec
        make_table(connection, "fresh", ["id", "listed"], ())
        make_table(connection, "bit", ["receipt", "bit"], ((r, 1 << i) for i, r in enumerate(spec.receipt_numbers)))
        if self._request.restriction.filter is not None:
            connection.create_function(
                "filter_config", len(operation(spec.operation).traits), self._request.restriction.filter
            )
        for place, join in enumerate(joins):
            join.fill(connection)
            chunks = join.chunks(connection)
            for number, chunk in enumerate(chunks, start=1):
                self._write_chunk(join, chunk)
                on_progress((place + number / len(chunks)) / len(joins))
        if self._was_there:
            _delete_stale(connection, self._lineage)
        connection.execute(
            "INSERT INTO kernel_receipt SELECT id, receipt FROM fresh JOIN bit ON listed & bit ORDER BY id, receipt"
        )
        for table in ("tile", "variant", "domain", "combination", "made", "fresh", "bit"):
            connection.execute(f"DROP TABLE IF EXISTS temp.{table}")
        families = operation(spec.operation).traits.families
        return {family: self._families[family] for family in families if self._families[family]}

    def _write_chunk(self, join: Join, chunk: Mapping[str, Any]) -> None:
        connection = self._connection
        connection.execute("DROP TABLE IF EXISTS temp.combination")
        connection.execute(join.combine_sql(self._receipts), chunk)
        for made in join.enumeration.yields:
            connection.execute("DROP TABLE IF EXISTS temp.made")
            connection.execute(join.project_sql(made))
            self._families[made.family] += self._insert(join)
            if self._was_there or self._request.spec.receipts:
                connection.execute("INSERT INTO fresh SELECT id, listed FROM made")

    def _insert(self, join: Join) -> int:
        """Insert the rows of table ``made`` as kernels, return their number. Existing rows keep their keys."""
        table, traits = join.operation.name, ", ".join(join.traits)
        (last,) = self._connection.execute("SELECT coalesce(max(key), 0) FROM kernel").fetchone()
        place = {"lineage": self._lineage, "last": last}
        inserted = self._connection.execute(
            "INSERT INTO kernel (key, id, lineage, family, name, target, hw_valid, dispatch_order) "
            f"SELECT :last + rowid, id, :lineage, family, name, target, {_hw_valid(join.spec)}, position "
            "FROM temp.made WHERE 1 "  # without WHERE, SQLite parses ON CONFLICT as a join's ON
            "ON CONFLICT (id) DO UPDATE SET hw_valid = excluded.hw_valid, dispatch_order = excluded.dispatch_order",
            place,
        ).rowcount
        # Some rows may have existed before; the new ones are those with a key above the last one.
        key, source = ":last + rowid", "temp.made"
        if self._was_there:
            key, source = "kernel.key", "temp.made JOIN kernel ON kernel.id = made.id AND kernel.key > :last"
        columns = ", ".join(f"made.{name}" for name in join.traits)
        self._connection.execute(
            f"INSERT INTO {table} (kernel, lineage, {traits}) SELECT {key}, :lineage, {columns} FROM {source}", place
        )
        return inserted


@contextmanager
def _explained(request: Request) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError:
        if request.restriction.filter is not None and request.restriction.filter.failures:
            raise UsageError(request.restriction.filter.failures[0], hint="Nothing was changed.") from None
        raise
    except sqlite3.IntegrityError as error:
        raise SpecError(
            f"the spec of {request.spec.arch} makes the same kernel twice: {error}",
            hint="Two of its tiles or variants are equal, or a yield keeps too few traits to distinguish kernels.",
        ) from None


def _delete_stale(connection: sqlite3.Connection, lineage: int) -> None:
    of_it = "SELECT id FROM kernel WHERE lineage = ?"
    connection.execute("DELETE FROM kernel WHERE lineage = ? AND id NOT IN (SELECT id FROM fresh)", [lineage])
    connection.execute(f"DELETE FROM kernel_receipt WHERE kernel_id IN ({of_it})", [lineage])


def _hw_valid(spec: ArchSpec) -> str:
    """SQL expression over the columns of a kernel: whether the hardware can run it."""
    return " AND ".join(f"({rule.expr})" for rule in spec.hw_rules) or "1"


def _record(connection: sqlite3.Connection, done: Populated, digest: str) -> None:
    from sqlite_utils import Database

    database = Database(connection)
    request = done.request
    lineage = request.lineage
    database.table("population").upsert(
        {
            "lineage": lineage_id(connection, lineage),
            "receipts": " ".join(map(str, request.receipts)),
            "restriction": request.restriction.text,
            "digest": digest,
            "compute_units": request.spec.hardware.compute_units if request.spec.hardware else None,
            "kernels": done.kernels,
            "families": json.dumps(done.families),
            "seconds": done.seconds,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        },
        pk="lineage",
    )
    where = "operation = ? AND arch = ? AND revision = ? AND space = ?"
    whose = [lineage.operation, lineage.arch, lineage.revision, lineage.space]
    database.table("rule").delete_where(where, whose)
    database.table("rule").insert_all(rules_of(request.spec))
