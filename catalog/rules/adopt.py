"""Adopt a checkout: the kernels that its own generator lists become a lineage of their own.

Names are read by the name grammar of the nearest known revision, the one with the most names in common. Its rules and
its dispatch order apply, too. A name that the grammar cannot read is kept in table ``unknown_name``.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from operator import itemgetter
from typing import TYPE_CHECKING, Any

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
    names_in_order,
    record,
    unchanged,
    write_rows,
)
from catalog.schema.arch_spec import ArchSpec, Receipt
from catalog.schema.kernel import canonical_json_sql

if TYPE_CHECKING:
    from catalog.build.generators import Generator

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
_DIGEST_CHARACTERS = 12
_KINDS = 5
_LISTING = 0.95
"""The part of the progress that the generator takes."""


@dataclass(frozen=True)
class Nearest:
    """The known revision with the most names in common with a list.

    Attributes:
        request: the revision's spec and variant.
        common: number of names in common.
        order: the names of the revision, with their positions in its dispatch order.
    """

    request: Request
    common: int
    order: Mapping[str, int]


@dataclass(frozen=True)
class Adopted(Populated):
    """The result of an adoption.

    Attributes:
        record: where the rows come from.
        unknown: the names that the grammar of the nearest revision cannot read.
        common: number of names that the nearest revision also has; None if nothing was listed again.
    """

    record: Record | None = None
    unknown: tuple[Unknown, ...] = ()
    common: int | None = None

    @property
    def notes(self) -> list[str]:
        """What the output of an adoption says about the nearest revision, and about each kind of unknown name."""
        base, revision = self.record.base if self.record else "", self.request.spec.revision
        total = self.kernels + len(self.unknown)
        shared = "" if self.common is None else f", with {self.common:,} of {counted(total, 'name')} in common"
        lines = [f"Nearest known revision: {base}{shared}. Its rules, dispatch order and name grammar apply."]
        if self.unknown:
            kinds = Counter((one.place, one.part) for one in self.unknown)
            lines.append(f"{counted(len(self.unknown), 'name')} could not be read:")
            lines += [f"  {number:,} with {part} ({place})" for (place, part), number in kinds.most_common(_KINDS)]
            lines += ["  ..."] if len(kinds) > _KINDS else []
            lines.append(f"They are kept, but are no kernels: catalog adopted {revision} --unknown")
        return lines


def nearest(names: Set[str], requests: Iterable[Request]) -> Nearest:
    """The one of some known revisions with the most of ``names``; of equal ones the newest."""
    measured = list[Nearest]()
    for request in sorted(requests, key=lambda request: str(request.spec.revision), reverse=True):
        order = names_in_order(request)
        measured.append(Nearest(request, len(names & order.keys()), order))
        if measured[-1].common == len(names):
            break
    return max(measured, key=lambda one: one.common)


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
    commit = commit_of(generator.root)
    revision = label or f"ck-{commit or generator.digest[:_DIGEST_CHARACTERS]}"
    there = records_of(connection, specs[0].operation, revision)
    _check(revision, generator, specs, receipts, there)
    was = there.get((str(specs[0].arch), variant))
    digest = _digest_of(generator, specs, variant)
    base = next((spec for spec in specs if was is not None and spec.revision == was.base), None)
    if base is not None and not force:
        request = Request(adopted_spec(base, revision, generator.receipts), variant, tuple(receipts))
        families = unchanged(connection, request, digest)
        if families is not None and _receipts_of(connection, request) == tuple(receipts):
            unknown = unknown_of(connection, lineage_id(connection, request.lineage) or 0)
            seconds = time.perf_counter() - started
            return Adopted(request, families, seconds, unchanged=True, record=was, unknown=unknown)
    lists = generator.lists(
        str(specs[0].arch), variant, receipts or generator.receipts, lambda done: on_progress(done * _LISTING)
    )
    names = frozenset[str]().union(*lists.values())
    if not names:
        raise GeneratorError(f"{generator.path} lists no kernels of {specs[0].arch}", hint="Nothing was changed.")
    found = nearest(names, (Request(spec, variant) for spec in specs if variant in spec.variants))
    base = found.request.spec
    request = Request(adopted_spec(base, revision, generator.receipts), variant, tuple(receipts))
    read, unknown = _read(names, request, str(base.revision))
    about = Record(
        root=str(generator.root),
        git_commit=commit,
        digest=generator.digest,
        base=str(base.revision),
        receipts=" ".join(map(str, generator.receipts)),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    with transaction(connection), interruptible(connection):
        tables = _table_made(connection, request, read, _ranks(lists.values(), found.order), lists)
        families = write_rows(connection, request, tables, lambda done: on_progress(_LISTING + done * (1 - _LISTING)))
        done = Adopted(
            request, families, time.perf_counter() - started, record=about, unknown=unknown, common=found.common
        )
        record(connection, done, digest)
        record_adopted(connection, lineage_id(connection, request.lineage) or 0, about, unknown)
    shorten_log(connection)
    return done


def _check(
    revision: str,
    generator: Generator,
    specs: Sequence[ArchSpec],
    receipts: Sequence[int],
    there: Mapping[tuple[str, str], Record],
) -> None:
    """Refuse a revision that is known or belongs to another checkout, and receipts that the checkout lacks."""
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
    unknown = sorted(set(receipts) - set(generator.receipts))
    if unknown:
        has = ", ".join(map(str, generator.receipts))
        raise UsageError(f"the checkout has no receipt {unknown[0]}", hint=f"Its receipts: {has}.")


def _digest_of(generator: Generator, specs: Sequence[ArchSpec], variant: str) -> str:
    """Digest of everything that the rows depend on: the generator's code, and the known specs and name grammars."""
    of = operation(specs[0].operation)
    lineages = [spec.lineage(variant) for spec in specs]
    grammars = [of.kernel.grammar(family, lineage).sql() for lineage in lineages for family in of.traits.families]
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


def _read(
    names: Collection[str], request: Request, base: str
) -> tuple[Mapping[str, Mapping[str, Any]], tuple[Unknown, ...]]:
    """The traits of each name that the grammars of ``base`` read, and the other names."""
    of = operation(request.spec.operation)
    lineage = replace(request.lineage, base=base)
    grammars = [of.kernel.grammar(family, lineage) for family in of.traits.families]
    read: dict[str, Mapping[str, Any]] = {}
    unknown: list[Unknown] = []
    for name in sorted(names):  # sorted, names of one family follow each other
        for grammar in grammars:
            traits = grammar.parse(name)
            if traits is not None:
                read[name] = traits
                if grammar is not grammars[0]:
                    grammars.remove(grammar)
                    grammars.insert(0, grammar)
                break
        else:
            unread = max(grammars, key=lambda grammar: grammar.reads(name)).unread(name)
            unknown.append(Unknown(name, unread.part, unread.place))
    return read, tuple(unknown)


def _ranks(lists: Iterable[Sequence[str]], order: Mapping[str, int]) -> dict[str, int]:
    """The dispatch order: that of the nearest revision; a new name follows the known one before it in its list."""
    places: dict[str, tuple[int, int]] = {}
    for names in lists:
        last = 0
        for number, name in enumerate(names, start=1):
            last = order.get(name, last)
            places.setdefault(name, (last, 0 if name in order else number))
    ranks = {place: rank for rank, place in enumerate(sorted(set(places.values())))}
    return {name: ranks[place] for name, place in places.items()}


def _table_made(
    connection: sqlite3.Connection,
    request: Request,
    read: Mapping[str, Mapping[str, Any]],
    ranks: Mapping[str, int],
    lists: Mapping[int, Sequence[str]],
) -> Iterator[float]:
    """Make the table of :func:`~catalog.rules.populate.write_rows` from names and their traits."""
    of = operation(request.spec.operation)
    listed = dict.fromkeys(read, 0)
    for place, receipt in enumerate(request.spec.receipt_numbers):
        for name in lists.get(receipt, ()):
            with suppress(KeyError):
                listed[name] |= 1 << place
    identity = request.lineage.columns(of.traits.variant)
    columns = (*of.traits, "target")
    values = itemgetter(*columns)
    make_table(
        connection, "read", [*columns, "name", "position", "listed"],
        ((*values(traits), name, ranks[name], listed[name]) for name, traits in read.items()),
    )  # fmt: skip
    constant = ", ".join(f"'{value}' AS {column}" for column, value in identity.items())
    connection.execute(
        f"CREATE TEMP TABLE made AS SELECT *, sha256({canonical_json_sql(of.kernel)}) AS id "
        f"FROM (SELECT {constant}, * FROM temp.read)"
    )
    connection.execute("DROP TABLE temp.read")
    yield 1.0
