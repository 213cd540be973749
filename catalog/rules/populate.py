"""Materialise the rows of a spec: one transaction, and nothing when nothing changed."""

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
from catalog.registry.tables import KERNEL_COLUMNS
from catalog.registry.transactions import interruptible, shorten_log, transaction, written_once
from catalog.rules.enumeration import Join, make_table
from catalog.rules.restriction import NOTHING_LEFT_OUT, Restriction
from catalog.rules.table import rules_of
from catalog.schema.arch_spec import ArchSpec


@dataclass(frozen=True)
class Request:
    """What to materialise: a spec, a mask implementation, and the receipts to restrict it to (empty: all)."""

    spec: ArchSpec
    mask_impl: str = "generic"
    receipts: tuple[int, ...] = ()
    restriction: Restriction = NOTHING_LEFT_OUT

    @property
    def identity(self) -> dict[str, str]:
        """The columns that tell this population's rows from others'."""
        spec = self.spec
        return {
            "arch": str(spec.arch),
            "revision": str(spec.revision),
            "space": str(spec.space),
            "mask_impl": self.mask_impl,
        }


@dataclass(frozen=True)
class Population:
    """What a populate did: kernels by family, and whether the rows were there already."""

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
            yield Join(spec, enumeration, request.identity, tuple(conditions), domains)


Progress = Callable[[float], None]
"""Told the fraction that is done."""


def populate(
    connection: sqlite3.Connection, request: Request, *, force: bool = False, on_progress: Progress | None = None
) -> Population:
    """Materialise ``request``; a no-op when the catalog holds it already, made from the same spec, unless ``force``.

    Rows whose id stays keep their timings and artifacts; rows that the spec no longer gives are deleted.

    Nothing is changed if it raises.

    Raises:
        UsageError: the spec has no such mask implementation or receipt.
        SpecError: an expression of the spec is wrong.
        RegistryError: the file cannot be written.
        KeyboardInterrupt: Ctrl-C ended it.
    """
    _check(request)
    joins = list(_joins(request))
    receipts = request.receipts or request.spec.receipt_numbers
    digest = _digest(request, joins, receipts)
    started = time.perf_counter()
    there = _population(connection, request)
    if not force and there is not None and there["digest"] == digest:
        return Population(request, json.loads(there["families"]), time.perf_counter() - started, unchanged=True)
    sweeps = any(join.enumeration.sweep is not None for join in joins)
    rewritten = written_once(connection) if sweeps else nullcontext()
    with rewritten, transaction(connection), interruptible(connection), _explained(request):
        families = _Writer(connection, request, receipts).write(joins, on_progress or (lambda done: None))
        done = Population(request, families, time.perf_counter() - started)
        _record(connection, done, digest)
    shorten_log(connection)
    return done


def count_by_family(connection: sqlite3.Connection, request: Request, receipt: int | None = None) -> dict[str, int]:
    """Rows of the population by family, in the schema's order of families; of one receipt when it is given."""
    where, values = _where(request)
    listed = "" if receipt is None else f" AND id IN (SELECT kernel_id FROM kernel_receipt WHERE receipt = {receipt:d})"
    rows = connection.execute(f"SELECT family, count(*) FROM kernel WHERE {where}{listed} GROUP BY family", values)
    counts: dict[str, int] = dict(rows.fetchall())
    families = operation(request.spec.operation).traits.families
    return {family: counts[family] for family in families if family in counts}


def check_populated(connection: sqlite3.Connection, request: Request, receipt: int | None) -> None:
    """Make sure that the catalog holds ``request`` unrestricted: all receipts, or at least ``receipt`` if given.

    Raises:
        UsageError: it does not.
    """
    spec = request.spec
    where, values = _where(request)
    row = connection.execute(f"SELECT receipts, restriction FROM population WHERE {where}", values).fetchone()
    which = f"({spec.revision}, {request.mask_impl})"
    again = f"Run: catalog populate --arch {spec.arch} --revision {spec.revision} --mask-impl {request.mask_impl}"
    if row is None:
        raise UsageError(f"the catalog holds no kernels of {spec.arch} {which}", hint=again)
    if row[0] and str(receipt) not in row[0].split():
        raise UsageError(f"the catalog was populated for receipts {row[0]} of {spec.arch} only {which}", hint=again)
    if row[1]:
        raise UsageError(f"the catalog was populated with a part of {spec.arch} only {which}: {row[1]}", hint=again)


def _check(request: Request) -> None:
    spec = request.spec
    if request.mask_impl not in spec.variants:
        raise UsageError(
            f"{spec.arch} has no mask implementation {request.mask_impl!r}",
            hint=f"There are: {', '.join(spec.variants)}.",
        )
    unknown = sorted(set(request.receipts) - set(spec.receipt_numbers))
    if unknown:
        there = ", ".join(map(str, spec.receipt_numbers)) or "none: its kernels are our own"
        raise UsageError(f"{spec.arch} has no receipt {unknown[0]}", hint=f"Its receipts: {there}.")


def _where(request: Request) -> tuple[str, list[str]]:
    identity = request.identity
    return " AND ".join(f"{column} = ?" for column in identity), list(identity.values())


def _population(connection: sqlite3.Connection, request: Request) -> sqlite3.Row | None:
    where, values = _where(request)
    row: sqlite3.Row | None = connection.execute(f"SELECT * FROM population WHERE {where}", values).fetchone()
    return row


def _merged(connection: sqlite3.Connection, request: Request) -> bool:
    """Whether there are rows without a population: those that came with another catalog's artifacts."""
    where = " AND ".join(f"kernel.{column} = :{column}" for column in request.identity)
    asked = f"SELECT 1 FROM artifact JOIN kernel ON kernel.id = kernel_id WHERE {where} LIMIT 1"
    return connection.execute(asked, request.identity).fetchone() is not None


def _digest(request: Request, joins: Sequence[Join], receipts: Sequence[int]) -> str:
    """Of all that the rows depend on: the facts, and the SQL that this version of the program makes from them."""
    parts = [request.spec.model_dump_json(), request.mask_impl, " ".join(map(str, receipts)), _insert_sql(request.spec)]
    if request.restriction.filter is not None:
        parts.append(request.restriction.filter.digest)
    for join in joins:
        parts += [join.combine_sql(receipts), *(join.project_sql(made) for made in join.enumeration.yields)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()


class _Writer:
    """Writes the rows of one request, inside of the caller's transaction."""

    def __init__(self, connection: sqlite3.Connection, request: Request, receipts: Sequence[int]) -> None:
        self._connection = connection
        self._request = request
        self._receipts = receipts
        self._was_there = _population(connection, request) is not None or _merged(connection, request)
        self._families: Counter[str] = Counter()

    def write(self, joins: Sequence[Join], on_progress: Progress) -> dict[str, int]:
        """Write every row, delete those that are no more; the number of kernels by family."""
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
            _delete_stale(connection, self._request)
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
            self._families[made.family] += connection.execute(_insert_sql(join.spec)).rowcount
            if self._was_there or self._request.spec.receipts:
                connection.execute("INSERT INTO fresh SELECT id, listed FROM made")


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
            f"the spec of {request.spec.arch} gives some kernel twice: {error}",
            hint="Two of its tiles or variants are alike, or a yield keeps too few traits to tell kernels apart.",
        ) from None


def _delete_stale(connection: sqlite3.Connection, request: Request) -> None:
    where, values = _where(request)
    connection.execute(f"DELETE FROM kernel WHERE {where} AND id NOT IN (SELECT id FROM fresh)", values)
    connection.execute(f"DELETE FROM kernel_receipt WHERE kernel_id IN (SELECT id FROM kernel WHERE {where})", values)


def _insert_sql(spec: ArchSpec) -> str:
    hardware = " AND ".join(f"({rule.expr})" for rule in spec.hw_rules) or "1"
    columns = {column: column for column in KERNEL_COLUMNS} | {"hw_valid": hardware, "dispatch_order": "position"}
    return (
        f"INSERT INTO kernel ({', '.join(columns)}) SELECT {', '.join(columns.values())} FROM temp.made "
        "WHERE 1 "  # without it, SQLite reads ON CONFLICT as a join's ON
        "ON CONFLICT (id) DO UPDATE SET hw_valid = excluded.hw_valid, dispatch_order = excluded.dispatch_order"
    )


def _record(connection: sqlite3.Connection, done: Population, digest: str) -> None:
    from sqlite_utils import Database

    database = Database(connection)
    request = done.request
    identity = request.identity
    database.table("population").upsert(
        identity
        | {
            "receipts": " ".join(map(str, request.receipts)),
            "restriction": request.restriction.text,
            "digest": digest,
            "compute_units": request.spec.hardware.compute_units if request.spec.hardware else None,
            "kernels": done.kernels,
            "families": json.dumps(done.families),
            "seconds": done.seconds,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        },
        pk=tuple(identity),
    )
    where = "arch = ? AND revision = ? AND space = ?"
    database.table("rule").delete_where(where, [identity["arch"], identity["revision"], identity["space"]])
    database.table("rule").insert_all(rules_of(request.spec))
