"""Parity: the names in the catalog compared with the names that upstream's own generator lists."""

from __future__ import annotations

import csv
import lzma
import sqlite3
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from catalog.errors import MissingReferenceError, SpecError
from catalog.files import StrPath, parse_json, read_given
from catalog.messages import counted
from catalog.ops import operation
from catalog.rules.populate import Request, check_populated
from catalog.schema.lineage import Lineage, of_lineage

if TYPE_CHECKING:
    from catalog.build.generators import Generator


class Reference(Protocol):
    """A source of the names that a catalog is compared with."""

    def names(self, request: Request, receipt: int) -> frozenset[str]:
        """The kernels of ``receipt``.

        Raises:
            CatalogError: there is no list of its kernels.
        """


COLUMNS = ("arch", "revision", "mask_impl", "receipt", "passed", "kernels", "missing", "extra")
"""Columns of a comparison as a row; of names, their number."""


@dataclass(frozen=True)
class Comparison:
    """Two sets of kernel names: the catalog's and the reference's."""

    lineage: Lineage
    receipt: int
    catalog: frozenset[str]
    reference: frozenset[str]

    @property
    def passed(self) -> bool:
        """Whether the sets are equal."""
        return self.catalog == self.reference

    @property
    def missing(self) -> dict[str, list[str]]:
        """Names that only the reference has, by family."""
        return self._by_family(self.reference - self.catalog)

    @property
    def extra(self) -> dict[str, list[str]]:
        """Names that only the catalog has, by family."""
        return self._by_family(self.catalog - self.reference)

    @property
    def row(self) -> tuple[str | int, ...]:
        """The values of :data:`COLUMNS`."""
        missing, extra = len(self.reference - self.catalog), len(self.catalog - self.reference)
        about = (self.lineage.arch, self.lineage.revision, self.lineage.variant, self.receipt)
        return (*about, int(self.passed), len(self.reference), missing, extra)

    def report(self) -> str:
        """One line when the sets are equal, otherwise every missing and extra name, by family."""
        what = f"({self.lineage.arch}, receipt {self.receipt}, {self.lineage.variant})"
        if self.passed:
            return (
                f"PASS: {counted(len(self.reference), 'kernel')} across {counted(len(self.families), 'family')} {what}"
            )
        missing, extra = self.missing, self.extra
        lines = [
            f"FAIL: {sum(map(len, missing.values())):,} missing, {sum(map(len, extra.values())):,} extra "
            f"of {counted(len(self.reference), 'kernel')} {what}"
        ]
        for word, names in (("missing", missing), ("extra", extra)):
            for family, listed in names.items():
                lines.append(f"{family}: {len(listed):,} {word}")
                lines += [f"  {'-' if word == 'missing' else '+'} {name}" for name in listed]
        return "\n".join(lines)

    @property
    def families(self) -> Counter[str]:
        """Kernels of the reference by family."""
        return Counter({family: len(names) for family, names in self._by_family(self.reference).items()})

    def _by_family(self, names: frozenset[str]) -> dict[str, list[str]]:
        kernel = operation(self.lineage.operation).kernel
        families: dict[str, list[str]] = {family: [] for family in kernel.traits.families}
        for name in sorted(names):
            family = kernel.family_named(name, self.lineage) or "names of no family"
            families.setdefault(family, []).append(name)
        return {family: listed for family, listed in families.items() if listed}


def exit_code(outcomes: Iterable[Comparison | MissingReferenceError]) -> int:
    """Exit code of ``catalog parity``: 1 where names differ, 2 where there is nothing to compare with, otherwise 0."""
    codes = {int(not one.passed) if isinstance(one, Comparison) else one.exit_code for one in outcomes}
    return 1 if 1 in codes else max(codes, default=0)


@dataclass(frozen=True)
class Lists:
    """A :class:`Reference` of lists stored in a folder."""

    folder: StrPath

    def names(self, request: Request, receipt: int) -> frozenset[str]:
        """The kernels listed for ``receipt``.

        Raises:
            MissingReferenceError: there is no list for this arch, revision, mask implementation and receipt.
            SpecError: the list is damaged.
        """
        lineage, folder = request.lineage, Path(self.folder)
        names = reference_names(folder, request).get(receipt)
        if names is None:
            there = _receipts_with_reference(folder, request)
            raise MissingReferenceError(
                f"there is no reference list for receipt {receipt} of {lineage.arch} "
                f"({lineage.revision}, {lineage.variant})",
                hint=f"The lists in {folder} have, for it: {there}. A CK checkout has every receipt: --ck-root.",
            )
        return names


@dataclass(frozen=True)
class Live:
    """A :class:`Reference` that runs the generator of a checkout; it makes each list once."""

    generator: Generator
    _names: dict[tuple[tuple[str, ...], ...], frozenset[str]] = field(default_factory=dict, repr=False)

    def names(self, request: Request, receipt: int) -> frozenset[str]:
        """The kernels that the generator lists for ``receipt``.

        Raises:
            GeneratorError: it fails, takes too long or lists something else, or its names are of another revision.
        """
        spec = request.spec
        runs = self.generator.runs(str(spec.arch), request.variant, [receipt])
        asked = tuple(run.command for run in runs)  # older generators list the same for every arch
        if asked not in self._names:
            lists = self.generator.lists(runs, lambda done: None)
            self._names[asked] = frozenset[str]().union(*lists.values())
        if spec.revision == self.generator.revision:
            self.generator.check(self._names[asked])
        return self._names[asked]


def compare(connection: sqlite3.Connection, lineage: Lineage, receipt: int, reference: frozenset[str]) -> Comparison:
    """Compare the rows of ``receipt`` in a populated catalog with the names of ``reference``.

    Raises:
        UsageError: the catalog is not populated, or only for other receipts, or only in part.
    """
    check_populated(connection, lineage, receipt)
    names = connection.execute(
        f"SELECT name FROM kernel JOIN kernel_receipt ON kernel_id = id WHERE receipt = :receipt AND {of_lineage()}",
        {**lineage.parameters, "receipt": receipt},
    )
    return Comparison(lineage, receipt, frozenset(name for (name,) in names), reference)


def reference_names(references: Path, request: Request) -> dict[int, frozenset[str]]:
    """The reference list of a lineage: kernel names by receipt; empty when there is no list."""
    spec = request.spec
    path = references / f"{spec.revision}.{spec.reference or spec.arch}.{request.variant}.csv.xz"
    if not path.is_file():
        return {}
    return dict.fromkeys(_receipts_listed(references, str(spec.revision)), frozenset()) | _read(path)


def _receipts_listed(references: Path, revision: str) -> list[int]:
    """The receipts covered by the lists of ``revision``."""
    path = references / "lists.json"
    try:
        return list(parse_json(read_given(path))["receipts"].get(revision, ()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise SpecError(f"{path}: not an index of reference lists: {error}") from None


@lru_cache(maxsize=4)
def _read(path: Path) -> dict[int, frozenset[str]]:
    names: dict[int, set[str]] = {}
    try:
        with lzma.open(path, "rt", encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                for receipt in row["receipts"].split():
                    names.setdefault(int(receipt), set()).add(row["name"])
    except (lzma.LZMAError, csv.Error, EOFError, KeyError, ValueError, AttributeError, OSError) as error:
        raise SpecError(
            f"{path}: not a reference list: {error}",
            hint="It must be xz-compressed CSV with the columns name and receipts.",
        ) from None
    return {receipt: frozenset(listed) for receipt, listed in names.items()}


def _receipts_with_reference(references: Path, request: Request) -> str:
    return ", ".join(f"receipt {receipt}" for receipt in sorted(reference_names(references, request))) or "nothing"
