"""Parity by lists: the names that a spec's joins make, compared with upstream's lists.

An operation says which traits the kernels of a list have in common. Nothing is stored: the joins run in memory, so that
a space of millions of rows is checked as well. A reference knows the names of a list, or only their number and digest.
"""

from __future__ import annotations

import csv
import hashlib
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from catalog.errors import MissingReferenceError, SpecError, UsageError
from catalog.files import read_given
from catalog.messages import counted
from catalog.ops import operation
from catalog.ops.protocol import RECEIPT, Operation
from catalog.rules.enumeration import Join
from catalog.schema.arch_spec import ArchSpec
from catalog.schema.lineage import Lineage
from catalog.settings import data_dir

if TYPE_CHECKING:
    from catalog.build.generators import Run


Key = tuple[str | int, ...]
"""What the kernels of a list have in common, as :attr:`~catalog.ops.protocol.Operation.lists` says."""


class Listing(NamedTuple):
    """A list: the number of its names, their digest (empty: unknown), and the names themselves where they are known."""

    kernels: int
    digest: str
    names: frozenset[str] | None = None


def columns_of(of: Operation) -> tuple[str, ...]:
    """Columns of a comparison as a row. ``missing`` and ``extra`` are empty where only a digest is known."""
    return ("arch", "revision", "space", *of.lists, "passed", "kernels", "listed", "missing", "extra")


@dataclass(frozen=True)
class ListComparison:
    """One list of a lineage: the names that the spec makes, and the reference's."""

    lineage: Lineage
    key: Key
    names: frozenset[str]
    reference: Listing

    @property
    def passed(self) -> bool:
        """Whether the names are the same, or as many where only their number is known."""
        if not self.reference.digest:
            return len(self.names) == self.reference.kernels
        return digest_of(self.names) == self.reference.digest

    @property
    def missing(self) -> list[str] | None:
        """Names that only the reference has; None where it knows only their digest."""
        known = self.reference.names
        return None if known is None else sorted(known - self.names)

    @property
    def extra(self) -> list[str] | None:
        """Names that only the spec makes; None where the reference knows only the digest of its own."""
        known = self.reference.names
        return None if known is None else sorted(self.names - known)

    @property
    def row(self) -> tuple[str | int | None, ...]:
        """The values of :func:`columns_of`."""
        about = (self.lineage.arch, self.lineage.revision, self.lineage.space, *self.key, int(self.passed))
        numbers = (None if names is None else len(names) for names in (self.missing, self.extra))
        return (*about, len(self.names), self.reference.kernels, *numbers)

    def report(self) -> Iterator[str]:
        """Lines about a list that differs: every missing and extra name, or what is known of them."""
        made, listed = counted(len(self.names), "kernel"), counted(self.reference.kernels, "kernel")
        yield f"{' '.join(map(str, self.key))}: {made}, upstream lists {listed}"
        yield from (f"  - {name}" for name in self.missing or ())
        yield from (f"  + {name}" for name in self.extra or ())


def report(found: Iterable[ListComparison]) -> str:
    """One line when every list is equal, otherwise a paragraph on each list that differs."""
    found = list(found)
    lineage, failed = found[0].lineage, [one for one in found if not one.passed]
    what = f"({lineage.arch}, {lineage.revision}, {lineage.space})"
    if not failed:
        return f"PASS: {counted(sum(len(one.names) for one in found), 'kernel')} in {len(found)} lists {what}"
    return "\n".join(
        [f"FAIL: {len(failed)} of {len(found)} lists {what}", *(line for o in failed for line in o.report())]
    )


def compare_lists(
    spec: ArchSpec, families: Collection[str] = (), reference: Mapping[Key, Listing] | None = None
) -> list[ListComparison]:
    """Compare the names that a spec makes with every list of ``families`` (empty: of all) that the reference has.

    No kernel is stored, so families that a populate leaves out by default are compared, too. ``reference`` has
    upstream's lists: by default the data folder's digests for the spec's target, otherwise what a checkout's generator
    lists.

    Raises:
        MissingReferenceError: it has none.
        SpecError: the digests cannot be read.
        UsageError: families are stated, but lists are not divided by them.
    """
    lineage, of = spec.lineage(), operation(spec.operation)
    by_family = "family" in of.lists
    if families and not by_family:
        raise UsageError(f"lists of {of.name} are not divided by family", hint="Compare all of them.")
    if reference is None:
        target = lineage if spec.reference is None else replace(lineage, arch=spec.reference)
        reference = digests(data_dir() / "parity" / f"{spec.operation}.csv", target, of)

    def family_of(key: Key) -> str:
        return str(key[of.lists.index("family")])

    keys = sorted(key for key in reference if not families or family_of(key) in families)
    if not keys:
        raise MissingReferenceError(
            f"there is no reference list for {lineage.arch} ({lineage.revision}, {lineage.space})",
            hint=f"`catalog parity --operation {of.name}` without --family shows what is there.",
        )
    made = names_of(spec, set(map(family_of, keys)) if by_family else ())
    return [ListComparison(lineage, key, made.get(key, frozenset()), reference[key]) for key in keys]


def listings_of(lists: Mapping[Run, Sequence[str]], of: Operation) -> dict[Key, Listing]:
    """What the runs of a checkout's generator listed."""
    names: dict[Key, set[str]] = {}
    for run, listed in lists.items():
        names.setdefault(tuple(run.traits[field] for field in of.lists), set()).update(listed)
    return {key: Listing(len(those), digest_of(those), frozenset(those)) for key, those in names.items()}


def names_of(spec: ArchSpec, families: Collection[str]) -> dict[Key, frozenset[str]]:
    """The names of the kernels of ``families`` (empty: of all) that ``spec`` makes, by list."""
    of = operation(spec.operation)
    traits = tuple(field for field in of.lists if field != RECEIPT)
    receipts = sorted((receipt.receipt, receipt.names[0]) for receipt in spec.receipts)
    bits = {name: 1 << place for place, (_, name) in enumerate(receipts)}
    lists: dict[Key, set[str]] = {}
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        for name, enumeration in spec.enumerations.items():
            makes = [made for made in enumeration.yields if not families or made.family in families]
            join = Join(spec, name, spec.lineage())
            for _ in join.combined(connection, spec.receipt_numbers) if makes else ():
                for made in makes:
                    for kernel, listed, *values in connection.execute(join.names_sql(made, "listed", *traits)):
                        stated = dict(zip(traits, values, strict=True))
                        for receipt in [name for name, bit in bits.items() if listed & bit] or [""]:
                            key = tuple(stated.get(field, receipt) for field in of.lists)
                            lists.setdefault(key, set()).add(kernel)
    finally:
        connection.close()
    return {key: frozenset(names) for key, names in lists.items()}


def digest_of(names: Iterable[str]) -> str:
    """SHA-256 of the sorted names, joined by newlines."""
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()


def digests(path: Path, lineage: Lineage, of: Operation) -> dict[Key, Listing]:
    """The numbers and digests of a lineage's lists of an operation in a CSV file.

    Raises:
        SpecError: the file cannot be read, or is not such a table.
    """
    about = (lineage.arch, lineage.revision, lineage.space)
    try:
        rows = list(csv.DictReader(read_given(path).decode().splitlines()))
        return {
            _read_key(row, of): Listing(int(row["kernels"]), row["sha256_of_sorted_names"])
            for row in rows
            if (row["arch"], row["revision"], row["space"]) == about
        }
    except (OSError, ValueError, KeyError, csv.Error) as error:
        raise SpecError(f"{path}: not a table of reference lists: {error}") from None


def _read_key(row: Mapping[str, str], of: Operation) -> Key:
    numbers = [field for field in of.lists if field != RECEIPT and of.traits[field].kind == "int"]
    return tuple(int(row[field]) if field in numbers else row[field] for field in of.lists)
