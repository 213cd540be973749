"""Materialise the rows of a spec: one transaction, and no work when nothing changed."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property

from catalog.errors import SpecError, UsageError
from catalog.ops import operation
from catalog.registry.kernels import lineage_id, made_lineage, populate_command
from catalog.registry.transactions import interruptible, shorten_log, transaction, written_once
from catalog.rules.enumeration import Join, make_table
from catalog.rules.restriction import NOTHING_LEFT_OUT, Restriction
from catalog.rules.table import rules_of
from catalog.schema.arch_spec import ArchSpec
from catalog.schema.lineage import Lineage, of_lineage
from catalog.schema.name_parts import sql_literal


@dataclass(frozen=True)
class Request:
    """What to materialise: a spec, one of its variants, and the receipts to restrict it to (empty: all)."""

    given: ArchSpec
    variant: str = "generic"
    receipts: tuple[int, ...] = ()
    restriction: Restriction = NOTHING_LEFT_OUT

    @cached_property
    def spec(self) -> ArchSpec:
        """The spec, with the axes that the restriction replaces."""
        return self.restriction.applied(self.given)

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


def joins_of(request: Request) -> Iterator[Join]:
    """The joins that make the rows of a request."""
    spec = request.spec
    for name in spec.enumerations:
        conditions = request.restriction.conditions(spec, name)
        if conditions is not None:
            domains = request.restriction.domains(spec, name)
            enumeration = spec.enumerations[name]
            # A condition may be about the family, and only some families may be asked for.
            parts = enumeration.by_family if conditions or request.restriction.families else (enumeration,)
            for part in parts:
                if any(request.restriction.makes(made.family) for made in part.yields):
                    yield Join(spec, name, request.lineage, tuple(conditions), domains, part)


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
    check_request(request)
    joins = list(joins_of(request))
    receipts = request.receipts or request.spec.receipt_numbers
    digest = _digest(request, joins, receipts)
    started = time.perf_counter()
    there = None if force else unchanged(connection, request, digest)
    if there is not None:
        return Populated(request, there, time.perf_counter() - started, unchanged=True)
    sweeps = any(join.in_parts for join in joins)
    rewritten = written_once(connection) if sweeps else nullcontext()
    with rewritten, transaction(connection), interruptible(connection), _explained(request):
        tables = _tables_made(connection, joins, receipts)
        families = write_rows(connection, request, tables, on_progress or (lambda done: None))
        done = Populated(request, families, time.perf_counter() - started)
        record(connection, done, digest)
    shorten_log(connection)
    return done


def unchanged(connection: sqlite3.Connection, request: Request, digest: str) -> dict[str, int] | None:
    """The number of kernels by family if the catalog holds the request's lineage made from ``digest``; else None."""
    there = _record_of(connection, request.lineage)
    if there is None or there["digest"] != digest:
        return None
    families: dict[str, int] = json.loads(there["families"])
    return families


def _tables_made(connection: sqlite3.Connection, joins: Sequence[Join], receipts: Sequence[int]) -> Iterator[float]:
    """Make the rows of the joins, part by part; see :func:`write_rows`."""
    for place, join in enumerate(joins):
        for done in join.combined(connection, receipts):
            for made in join.enumeration.yields:
                connection.execute(join.project_sql(made))
                yield (place + done) / len(joins)


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
    arch, row = lineage.arch, _record_of(connection, lineage)
    which = f"({lineage.revision}, {lineage.variant})"
    again = f"Run: {populate_command(lineage)}"
    if row is None:
        raise UsageError(f"the catalog holds no kernels of {arch} {which}", hint=again)
    receipts, restriction = row["receipts"], row["restriction"]
    if receipts and str(receipt) not in receipts.split():
        raise UsageError(f"the catalog was populated for receipts {receipts} of {arch} only {which}", hint=again)
    if restriction:
        raise UsageError(f"the catalog was populated with a part of {arch} only {which}: {restriction}", hint=again)


def check_request(request: Request) -> None:
    """Make sure that the spec has the request's variant and receipts.

    Raises:
        UsageError: it lacks one.
    """
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


def write_rows(
    connection: sqlite3.Connection, request: Request, tables: Iterable[float], on_progress: Progress
) -> dict[str, int]:
    """Write the rows of a lineage inside the caller's transaction, and return the number of kernels by family.

    Rows with an id that is there keep their keys; other rows of the lineage are deleted.

    Args:
        connection: to the catalog.
        request: the lineage, with the receipts of its spec.
        tables: makes the temporary table ``made`` again and again, and yields the fraction of the work that is done
            each time. The table has the id, name, target, traits and ``position`` (dispatch order) of some kernels,
            and ``listed``: one bit for each receipt of the spec, in ascending order.
        on_progress: called with these fractions.
    """
    of = operation(request.spec.operation)
    was_there = _record_of(connection, request.lineage) is not None or _merged(connection, request.lineage)
    lineage = made_lineage(connection, request.lineage)
    counts: Counter[str] = Counter()
    connection.execute("DROP TABLE IF EXISTS temp.fresh")
    connection.execute("CREATE TEMP TABLE fresh (id PRIMARY KEY, listed) WITHOUT ROWID")
    make_table(connection, "bit", ["receipt", "bit"], ((r, 1 << i) for i, r in enumerate(request.spec.receipt_numbers)))
    if request.restriction.filter is not None:
        connection.create_function("filter_config", len(of.traits), request.restriction.filter)
    for done in tables:
        _insert(connection, request, lineage, was_there=was_there)
        counts.update(dict(connection.execute("SELECT family, count(*) FROM temp.made GROUP BY family").fetchall()))
        if was_there or request.spec.receipts:
            connection.execute("INSERT INTO fresh SELECT id, listed FROM made")
        connection.execute("DROP TABLE temp.made")
        on_progress(done)
    if was_there:
        _delete_stale(connection, lineage)
    _refuse_shared_names(connection, request, lineage)
    # Both tables have the order of kernel_receipt: fresh by its key, bit as it was filled.
    connection.execute("INSERT INTO kernel_receipt SELECT id, receipt FROM fresh CROSS JOIN bit ON listed & bit")
    for table in ("tile", "variant", "domain", "combination", "fresh", "bit"):
        connection.execute(f"DROP TABLE IF EXISTS temp.{table}")
    return {family: counts[family] for family in of.traits.families if counts[family]}


def _insert(connection: sqlite3.Connection, request: Request, lineage: int, *, was_there: bool) -> None:
    """Insert the rows of table ``made`` as kernels. Existing rows keep their keys."""
    of = operation(request.spec.operation)
    table, traits = of.name, ", ".join(of.traits)
    (last,) = connection.execute("SELECT coalesce(max(key), 0) FROM kernel").fetchone()
    place = {"lineage": lineage, "last": last}
    connection.execute(
        "INSERT INTO kernel (key, id, lineage, family, name, target, hw_valid, dispatch_order) "
        f"SELECT :last + rowid, id, :lineage, family, name, target, {_hw_valid(request.spec)}, position "
        "FROM temp.made WHERE 1 "  # without WHERE, SQLite parses ON CONFLICT as a join's ON
        "ON CONFLICT (id) DO UPDATE SET hw_valid = excluded.hw_valid, dispatch_order = excluded.dispatch_order",
        place,
    )
    # Some rows may have existed before; the new ones are those with a key above the last one.
    key, source = ":last + rowid", "temp.made"
    if was_there:
        key, source = "kernel.key", "temp.made JOIN kernel ON kernel.id = made.id AND kernel.key > :last"
    columns = ", ".join(f"made.{name}" for name in of.traits)
    connection.execute(
        f"INSERT INTO {table} (kernel, lineage, {traits}) SELECT {key}, :lineage, {columns} FROM {source}", place
    )


def _refuse_shared_names(connection: sqlite3.Connection, request: Request, lineage: int) -> None:
    """Refuse kernels that share a name, except of families whose names leave traits out."""
    spec, kernel = request.spec, operation(request.spec.operation).kernel
    unique = [family for family in spec.families if not kernel.naming(family, request.lineage).hidden]
    shared = connection.execute(
        f"SELECT name FROM kernel WHERE lineage = ? AND family IN ({', '.join(map(sql_literal, unique))}) "
        "GROUP BY name HAVING count(*) > 1 LIMIT 1",
        [lineage],
    ).fetchone()
    if shared is not None:
        raise _made_twice(spec, shared[0])


def _made_twice(spec: ArchSpec, what: object) -> SpecError:
    return SpecError(
        f"the spec of {spec.arch} makes the same kernel twice: {what}",
        hint="Two of its tiles or variants are equal, or a yield keeps too few traits to distinguish kernels.",
    )


@contextmanager
def _explained(request: Request) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError:
        if request.restriction.filter is not None and request.restriction.filter.failures:
            raise UsageError(request.restriction.filter.failures[0], hint="Nothing was changed.") from None
        raise
    except sqlite3.IntegrityError as error:
        raise _made_twice(request.spec, error) from None


def _delete_stale(connection: sqlite3.Connection, lineage: int) -> None:
    of_it = "SELECT id FROM kernel WHERE lineage = ?"
    connection.execute("DELETE FROM kernel WHERE lineage = ? AND id NOT IN (SELECT id FROM fresh)", [lineage])
    connection.execute(f"DELETE FROM kernel_receipt WHERE kernel_id IN ({of_it})", [lineage])


def _hw_valid(spec: ArchSpec) -> str:
    """SQL expression over the columns of a kernel: whether the hardware can run it."""
    return " AND ".join(f"({rule.expr})" for rule in spec.hw_rules) or "1"


def record(connection: sqlite3.Connection, done: Populated, digest: str) -> None:
    """Record a populate and the rules of its spec inside the caller's transaction; ``digest``: of what it came from."""
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
