"""Adopt a checkout: the kernels that its own generator lists become a lineage of their own.

The nearest known revision is the one with the most names in common. A name that it has, too, is its kernel; others are
read by its name grammar. Its rules and its dispatch order apply, too. A name that the grammar cannot read is kept in
table ``unknown_name``.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NamedTuple

from catalog.build.generators import commit_of
from catalog.build.keys import hash_parts
from catalog.errors import GeneratorError, UsageError
from catalog.messages import counted
from catalog.ops import operation
from catalog.registry.adopted import Record, Unknown, record_adopted, records_of, unknown_of
from catalog.registry.kernels import lineage_id
from catalog.registry.transactions import interruptible, shorten_log, transaction
from catalog.rules.enumeration import make_table
from catalog.rules.populate import (
    Populated,
    Progress,
    Request,
    check_request,
    joins_of,
    record,
    unchanged,
    write_rows,
)
from catalog.rules.restriction import Restriction
from catalog.schema.arch_spec import ArchSpec, Receipt
from catalog.schema.kernel import canonical_json_sql
from catalog.schema.name_parts import sql_literal

if TYPE_CHECKING:
    from catalog.build.generators import Generator, Run
    from catalog.schema.grammar import Grammar
    from catalog.schema.lineage import Lineage

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
_DIGEST_CHARACTERS = 12
_KINDS = 5
_LISTING = 0.95
"""The part of the progress that the generator takes."""


class Nearest(NamedTuple):
    """The known revision with the most names in common with a list.

    Attributes:
        request: the revision's spec and variant.
        common: number of names in common.
    """

    request: Request
    common: int

    @property
    def revision(self) -> str:
        """The name of the revision."""
        return str(self.request.spec.revision)


@dataclass(frozen=True)
class Adopted(Populated):
    """The result of an adoption.

    Attributes:
        record: where the rows come from.
        unknown: the names that the grammar of the nearest revision cannot read.
        names: number of names that the checkout lists; 0 if nothing was listed again.
        common: number of these names that the nearest revision also has.
    """

    record: Record | None = None
    unknown: tuple[Unknown, ...] = ()
    names: int = 0
    common: int = 0

    @property
    def notes(self) -> list[str]:
        """What the output of an adoption says about the nearest revision, and about each kind of unknown name."""
        base, revision = self.record.base if self.record else "", self.request.spec.revision
        shared = f", with {self.common:,} of {counted(self.names, 'name')} in common" if self.names else ""
        lines = [f"Nearest known revision: {base}{shared}. Its rules, dispatch order and name grammar apply."]
        if self.unknown:
            kinds = Counter((one.place, one.part) for one in self.unknown)
            lines.append(f"{counted(len(self.unknown), 'name')} could not be read:")
            lines += [f"  {number:,} with {part} ({place})" for (place, part), number in kinds.most_common(_KINDS)]
            lines += ["  ..."] if len(kinds) > _KINDS else []
            lines.append(f"They are kept, but are no kernels: catalog adopted {revision} --unknown")
        return lines


def nearest(
    connection: sqlite3.Connection, names: Set[str], requests: Iterable[Request], likely: str | None = None
) -> Nearest:
    """The one of some known revisions with the most of ``names``; of equal ones ``likely``, or else the newest.

    Leaves the temporary table ``known``: name, target, traits and ``position`` (in the dispatch order) of the kernels
    of that revision that have one of the names.
    """
    make_table(connection, "asked", ["name PRIMARY KEY"], ((name,) for name in sorted(names)))
    best: Nearest | None = None
    for request in sorted(
        requests, key=lambda one: (one.spec.revision == likely, str(one.spec.revision)), reverse=True
    ):
        if best is None or _may_have_more(names, request, best.common):
            common = _find_known(connection, request)
            if best is None or common > best.common:
                connection.execute("DROP TABLE IF EXISTS temp.known")
                connection.execute("ALTER TABLE temp.found RENAME TO known")
                best = Nearest(request, common)
    assert best is not None, "an arch has a revision"  # noqa: S101
    return best


def _may_have_more(names: Set[str], request: Request, common: int) -> bool:
    """Whether a revision's grammars read more than ``common`` of ``names``; other names cannot be its kernels'."""
    of, may_be = operation(request.spec.operation), len(names)
    families = filter(request.restriction.makes, of.traits.own_families)
    grammars = [of.kernel.grammar(family, request.lineage) for family in families]
    for name in names if may_be > common else ():
        if not any(grammar.matches(name) for grammar in grammars):
            may_be -= 1
            if may_be <= common:
                break
    return may_be > common


def _find_known(connection: sqlite3.Connection, request: Request) -> int:
    """Make table ``found`` of the kernels that a known revision makes under a name of table ``asked``; count the names.

    No file is used.
    """
    columns = ("target", *operation(request.spec.operation).traits, "position")
    make_table(connection, "found", ["name", *columns], ())
    for join in joins_of(request):
        for _ in join.combined(connection, request.receipts or request.spec.receipt_numbers):
            for made in join.enumeration.yields:
                connection.execute(
                    f"INSERT INTO temp.found SELECT asked.name, {', '.join(columns)} "
                    f"FROM ({join.names_sql(made, *columns)}) AS made CROSS JOIN temp.asked ON asked.name = made.name"
                )
    return int(connection.execute("SELECT count(DISTINCT name) FROM temp.found").fetchone()[0])


def adopted_spec(base: ArchSpec, revision: str, receipts: Collection[int]) -> ArchSpec:
    """The spec of an adopted revision: that of its nearest known one, with the receipts of the checkout."""
    known = {receipt.receipt: receipt for receipt in base.receipts}
    about = f"receipt of the checkout that revision {base.revision} lacks"
    enumerations = {
        name: enumeration.model_copy(
            update={"receipts": {number: expr for number, expr in enumeration.receipts.items() if number in receipts}}
        )
        for name, enumeration in base.enumerations.items()
    }
    listed = [known.get(number) or Receipt(receipt=number, names=[], about=about) for number in sorted(receipts)]
    return base.model_copy(update={"revision": revision, "receipts": listed, "enumerations": enumerations})


def adopt(
    connection: sqlite3.Connection,
    generator: Generator,
    specs: Sequence[ArchSpec],
    variant: str,
    *,
    label: str | None = None,
    receipts: Sequence[int] = (),
    force: bool = False,
    on_progress: Progress | None = None,
) -> Adopted:
    """Make the kernels that a checkout's generator lists the rows of a new lineage; a no-op if nothing has changed.

    Args:
        connection: to the catalog.
        generator: the generator of the checkout.
        specs: the specs of one arch, one for each known revision.
        variant: the variant of the enumeration.
        label: name of the new revision; None: ``ck-`` with the git commit, or with the digest of the generator's files.
        receipts: the receipts to restrict the rows to; empty: all of the checkout.
        force: list and write the rows even if nothing has changed.
        on_progress: called with the fraction of the work that is done.

    Raises:
        UsageError: the label is a known revision, was given to another checkout, or a receipt or variant is unknown.
        GeneratorError: the generator lists nothing usable; nothing changes.
        RegistryError: the file cannot be written; nothing changes.
    """
    on_progress = on_progress or (lambda done: None)
    started = time.perf_counter()
    check_request(Request(specs[0], variant))
    arch = str(specs[0].arch)
    commit = commit_of(generator.root)
    revision = label or f"ck-{commit or generator.digest[:_DIGEST_CHARACTERS]}"
    there = records_of(connection, specs[0].operation, revision)
    _check_label(revision, generator, specs, there)
    same = next(iter(there.values()), None)  # of the same code, perhaps for another arch
    distinguished = generator.receipts if same is None else tuple(map(int, same.receipts.split()))
    _check_receipts(receipts, distinguished)
    was = there.get(replace(specs[0].lineage(variant), revision=revision))
    digest = _digest_of(generator, specs, variant)
    base = next((spec for spec in specs if was is not None and spec.revision == was.base), None)
    if base is not None and not force:
        request = Request(adopted_spec(base, revision, distinguished), variant, tuple(receipts))
        families = unchanged(connection, request, digest)
        if families is not None and _receipts_of(connection, request) == tuple(receipts):
            unknown = unknown_of(connection, lineage_id(connection, request.lineage) or 0)
            seconds = time.perf_counter() - started
            return Adopted(request, families, seconds, unchanged=True, record=was, unknown=unknown)
    runs = generator.runs(arch, variant, receipts or distinguished)
    lists = generator.lists(runs, lambda done: on_progress(done * _LISTING))
    names = frozenset[str]().union(*lists.values())
    if not names:
        raise GeneratorError(f"{generator.root} lists no kernels of {arch}", hint="Nothing was changed.")
    with transaction(connection), interruptible(connection):
        made = Restriction(families=tuple({run.traits["family"]: run for run in runs if "family" in run.traits}))
        known = (Request(spec, variant, restriction=made) for spec in specs if variant in spec.variants)
        found = nearest(connection, names, known, generator.revision)
        base = found.request.spec
        request = Request(adopted_spec(base, revision, distinguished), variant, tuple(receipts))
        about = Record(
            root=str(generator.root),
            git_commit=commit,
            digest=generator.digest,
            base=str(base.revision),
            receipts=" ".join(map(str, distinguished)),
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        unknown = _read(connection, request, about.base, lists)
        families = write_rows(
            connection,
            request,
            _table_made(connection, request, lists),
            lambda done: on_progress(_LISTING + done * (1 - _LISTING)),
        )
        for table in ("asked", "known", "listed"):
            connection.execute(f"DROP TABLE temp.{table}")
        seconds = time.perf_counter() - started
        done = Adopted(request, families, seconds, record=about, unknown=unknown, names=len(names), common=found.common)
        record(connection, done, digest)
        record_adopted(connection, lineage_id(connection, request.lineage) or 0, about, unknown)
    shorten_log(connection)
    return done


def _check_label(
    revision: str, generator: Generator, specs: Sequence[ArchSpec], there: Mapping[Lineage, Record]
) -> None:
    """Refuse a revision that is known or belongs to another checkout."""
    if not _LABEL.fullmatch(revision):
        raise UsageError(
            f"a revision cannot be called {revision!r}",
            hint="A label has at most 64 letters, digits and . _ + -, and begins with a letter or digit.",
        )
    if revision in {spec.revision for spec in specs}:
        raise UsageError(f"{revision} is a known revision", hint="--label names the new one, for example my-ck.")
    others = [one for one in there.values() if one.digest != generator.digest]
    if others:
        raise UsageError(
            f"revision {revision} was adopted from another state of the generator, in {others[0].root}",
            hint=f"--label gives this one another name; catalog forget {revision} deletes the old one.",
        )


def _check_receipts(receipts: Sequence[int], distinguished: Sequence[int]) -> None:
    unknown = sorted(set(receipts) - set(distinguished))
    if unknown:
        has = ", ".join(map(str, distinguished)) or "none"
        raise UsageError(f"the checkout has no receipt {unknown[0]}", hint=f"Its receipts: {has}.")


def _digest_of(generator: Generator, specs: Sequence[ArchSpec], variant: str) -> str:
    """Digest of everything that the rows depend on: the generator's code, and the known specs and name grammars."""
    of = operation(specs[0].operation)
    lineages = [spec.lineage(variant) for spec in specs]
    grammars = [of.kernel.grammar(family, lineage).sql() for lineage in lineages for family in of.traits.own_families]
    return hash_parts(
        {
            "generator": [generator.digest, variant],
            "specs": [spec.model_dump_json() for spec in specs],
            "grammars": grammars,
        }
    )


def _receipts_of(connection: sqlite3.Connection, request: Request) -> tuple[int, ...]:
    """The receipts to which the rows of the lineage were restricted."""
    asked = "SELECT receipts FROM population WHERE lineage = ?"
    row = connection.execute(asked, [lineage_id(connection, request.lineage)]).fetchone()
    return tuple(map(int, row[0].split()))


def _stated(lists: Iterable[Run]) -> tuple[str, ...]:
    """The traits that some list states, in a fixed order."""
    return tuple(sorted({trait for run in lists for trait in run.traits}))


def _read(
    connection: sqlite3.Connection, request: Request, base: str, lists: Mapping[Run, Sequence[str]]
) -> tuple[Unknown, ...]:
    """Make table ``listed``, and add the kernels that ``known`` lacks, read by the grammars of ``base``.

    Table ``listed`` has each name with the traits that its lists state (the default where a list of it states none),
    its ``position`` in the dispatch order, and in ``listed`` one bit for each receipt. Returns the names that the
    grammars cannot read; their rows of ``listed`` remain without a kernel.
    """
    of = operation(request.spec.operation)
    stated = _stated(lists)
    bits = {receipt: 1 << place for place, receipt in enumerate(request.spec.receipt_numbers)}
    listed: defaultdict[tuple[Any, ...], dict[str, int]] = defaultdict(dict)  # bits by name, by values of the traits
    for run, names in lists.items():
        of_values = listed[tuple(run.traits.get(trait, of.traits[trait].default) for trait in stated)]
        bit = 0 if run.receipt is None else bits[run.receipt]
        of_values.update((name, of_values.get(name, 0) | bit) for name in names)
    order = dict(connection.execute("SELECT name, min(position) FROM temp.known GROUP BY name").fetchall())
    ranks = _ranks(lists.values(), order)
    make_table(
        connection, "listed", ["name", *stated, "position", "listed"],
        ((name, *values, ranks[name], bit) for values, names in listed.items() for name, bit in names.items()),
    )  # fmt: skip
    columns = ", ".join(("name", *stated))
    new = connection.execute(f"SELECT {columns} FROM temp.listed EXCEPT SELECT {columns} FROM temp.known")
    lineage = replace(request.lineage, base=base)
    grammars = [of.kernel.grammar(family, lineage) for family in of.traits.own_families]
    read: list[Mapping[str, Any]] = []
    unknown: dict[str, Unknown] = {}
    for name, *values in new.fetchall():
        its = dict(zip(stated, values, strict=True))
        traits = _traits_of(name, its, grammars)
        if isinstance(traits, Unknown):
            unknown[name] = traits
        else:
            read.append({**traits, **its, "name": name})
    written = ("name", "target", *of.traits)
    holes = ", ".join(f":{column}" for column in written)
    connection.executemany(f"INSERT INTO temp.known ({', '.join(written)}) VALUES ({holes})", read)
    return tuple(unknown.values())


def _traits_of(name: str, stated: Mapping[str, Any], grammars: list[Grammar]) -> dict[str, Any] | Unknown:
    """The traits of a name in a list with ``stated`` traits, or what is new in it; moves its grammar to the front."""
    may_be = [grammar for grammar in grammars if grammar.family == stated.get("family", grammar.family)]
    for grammar in may_be:
        traits = grammar.parse(name)
        if traits is not None:
            grammars.remove(grammar)
            grammars.insert(0, grammar)
            shown = sorted(grammar.shown & stated.keys())
            wrong = next((trait for trait in shown if traits[trait] != stated[trait]), None)
            if wrong is None:
                return traits
            return Unknown(name, str(traits[wrong]), f"in a list of {wrong} {stated[wrong]}")
    unread = max(may_be, key=lambda grammar: grammar.reads(name)).unread(name)
    return Unknown(name, unread.part, unread.place)


def _ranks(lists: Iterable[Sequence[str]], order: Mapping[str, int]) -> dict[str, int]:
    """The dispatch order: that of the nearest revision; a new name follows the known one before it in its list."""
    places = {name: (position, 0) for name, position in order.items()}
    for names in lists:
        last = 0
        for number, name in enumerate(names, start=1):
            position = order.get(name)
            if position is not None:
                last = position
            else:
                places.setdefault(name, (last, number))
    ranks = {place: rank for rank, place in enumerate(sorted(set(places.values())))}
    return {name: ranks[place] for name, place in places.items()}


def _table_made(connection: sqlite3.Connection, request: Request, lists: Iterable[Run]) -> Iterator[float]:
    """Make the table of :func:`~catalog.rules.populate.write_rows` from ``listed`` and ``known``."""
    of = operation(request.spec.operation)
    identity = request.lineage.columns(of.traits.variant)
    constant = ", ".join(f"{sql_literal(value)} AS {column}" for column, value in identity.items())
    connection.execute(
        f"CREATE TEMP TABLE made AS SELECT *, sha256({canonical_json_sql(of.kernel)}) AS id FROM ("
        f"SELECT {constant}, name, target, {', '.join(of.traits)}, listed.position AS position, listed "
        f"FROM temp.listed CROSS JOIN temp.known USING ({', '.join(('name', *_stated(lists)))}))"
    )
    yield 1.0
