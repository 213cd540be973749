"""Parity by lists: the names that a spec's joins make, compared with upstream's lists of one family, type and layout.

Nothing is stored: the joins run in memory, so that a space of millions of rows is checked as well. A reference knows
the names of a list, or only their number and digest.
"""

from __future__ import annotations

import csv
import hashlib
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from catalog.errors import MissingReferenceError, SpecError
from catalog.files import read_given
from catalog.messages import counted
from catalog.rules.enumeration import Join
from catalog.schema.arch_spec import ArchSpec
from catalog.schema.lineage import Lineage
from catalog.settings import data_dir

if TYPE_CHECKING:
    from catalog.build.generators import Run


class Key(NamedTuple):
    """What the kernels of a list have in common."""

    family: str
    dtype: str
    layout: str


class Listing(NamedTuple):
    """A list: the number of its names, their digest, and the names themselves where they are known."""

    kernels: int
    digest: str
    names: frozenset[str] | None = None


COLUMNS = ("arch", "revision", "space", *Key._fields, "passed", "kernels", "listed", "missing", "extra")
"""Columns of a comparison as a row. ``missing`` and ``extra`` are empty where only a digest is known."""


@dataclass(frozen=True)
class ListComparison:
    """One list of a lineage: the names that the spec makes, and the reference's."""

    lineage: Lineage
    key: Key
    names: frozenset[str]
    reference: Listing

    @property
    def passed(self) -> bool:
        """Whether the names are the same."""
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
        """The values of :data:`COLUMNS`."""
        about = (self.lineage.arch, self.lineage.revision, self.lineage.space, *self.key, int(self.passed))
        numbers = (None if names is None else len(names) for names in (self.missing, self.extra))
        return (*about, len(self.names), self.reference.kernels, *numbers)

    def report(self) -> Iterator[str]:
        """Lines about a list that differs: every missing and extra name, or what is known of them."""
        made, listed = counted(len(self.names), "kernel"), counted(self.reference.kernels, "kernel")
        yield f"{' '.join(self.key)}: {made}, upstream lists {listed}"
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
    """
    lineage = spec.lineage()
    if reference is None:
        target = lineage if spec.reference is None else replace(lineage, arch=spec.reference)
        reference = digests(data_dir() / "parity" / f"{spec.operation}.csv", target)
    keys = sorted(key for key in reference if not families or key.family in families)
    if not keys:
        raise MissingReferenceError(
            f"there is no reference list for {lineage.arch} ({lineage.revision}, {lineage.space})",
            hint="`catalog parity --operation gemm` without --family shows what is there.",
        )
    made = names_of(spec, {key.family for key in keys})
    return [ListComparison(lineage, key, made.get(key, frozenset()), reference[key]) for key in keys]


def listings_of(lists: Mapping[Run, Sequence[str]]) -> dict[Key, Listing]:
    """What the runs of a checkout's generator listed."""
    names: dict[Key, set[str]] = {}
    for run, listed in lists.items():
        names.setdefault(Key(*(run.traits[field] for field in Key._fields)), set()).update(listed)
    return {key: Listing(len(those), digest_of(those), frozenset(those)) for key, those in names.items()}


def names_of(spec: ArchSpec, families: Collection[str]) -> dict[Key, frozenset[str]]:
    """The names of the kernels that ``spec`` makes, by list."""
    found: dict[Key, frozenset[str]] = {}
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        for name, enumeration in spec.enumerations.items():
            makes = [made for made in enumeration.yields if made.family in families]
            join = Join(spec, name, spec.lineage())
            for _ in join.combined(connection, ()) if makes else ():
                for made in makes:
                    lists: dict[Key, set[str]] = {}
                    for kernel, *key in connection.execute(join.names_sql(made, *Key._fields)):
                        lists.setdefault(Key(*key), set()).add(kernel)
                    found |= {key: frozenset(names) | found.get(key, frozenset()) for key, names in lists.items()}
    finally:
        connection.close()
    return found


def digest_of(names: Iterable[str]) -> str:
    """SHA-256 of the sorted names, joined by newlines."""
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()


def digests(path: Path, lineage: Lineage) -> dict[Key, Listing]:
    """The numbers and digests of a lineage's lists in a CSV file.

    Raises:
        SpecError: the file cannot be read, or is not such a table.
    """
    about = (lineage.arch, lineage.revision, lineage.space)
    try:
        rows = list(csv.DictReader(read_given(path).decode().splitlines()))
        return {
            Key(*(row[field] for field in Key._fields)): Listing(int(row["kernels"]), row["sha256_of_sorted_names"])
            for row in rows
            if (row["arch"], row["revision"], row["space"]) == about
        }
    except (OSError, ValueError, KeyError, csv.Error) as error:
        raise SpecError(f"{path}: not a table of reference lists: {error}") from None
