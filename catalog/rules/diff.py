"""The differences between two lineages: by default two revisions of an arch.

Kernels are matched by their traits, not by name: a revision may name the same kernel differently. Of the kernels
without a match, two with the same signature whose algorithms differ in a few traits count as one changed kernel.
"""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from catalog.errors import UsageError
from catalog.messages import counted
from catalog.ops import operation
from catalog.registry.views import rows_of
from catalog.rules.populate import Request, check_populated
from catalog.schema.lineage import Lineage, of_lineage
from catalog.schema.traits import Traits

FEW = 4
"""Maximum number of algorithm traits in which two kernels may differ to count as one changed kernel."""

FAMILY_COLUMNS = ("receipt", "family", "appeared", "vanished", "changed", "same")
KERNEL_COLUMNS = ("receipt", "family", "change", "name", "before", "traits")
"""Columns of a difference as rows: one row for each family, or for each kernel."""

Values = tuple[Any, ...]
"""The values of every trait of an operation, in column order: the signature first."""


@dataclass(frozen=True, slots=True, order=True)
class Change:
    """A kernel whose algorithm changed: the changed traits in words, and its names before and after."""

    traits: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class FamilyDifference:
    """The difference within one family; appeared and vanished kernels in order of name."""

    family: str
    same: int
    changed: tuple[Change, ...]
    appeared: tuple[str, ...]
    vanished: tuple[str, ...]
    new_values: Mapping[str, tuple[Any, ...]]
    """By trait, values that no kernel of the family had before."""
    lost_values: Mapping[str, tuple[Any, ...]]
    """By trait, values that no kernel of the family has any more."""

    def report(self) -> Iterator[str]:
        """The counts, the trait values that came and went, and the number of kernels for each kind of change."""
        yield f"{self.family}: {_counts([self])}"
        for word, values in (("new", self.new_values), ("lost", self.lost_values)):
            if values:
                shown = (f"{trait} {', '.join(map(str, those))}" for trait, those in values.items())
                yield f"  {word}: {'; '.join(shown)}"
        for traits, n in Counter(change.traits for change in self.changed).most_common():
            yield f"  changed, {counted(n, 'kernel')}: {traits}"

    def listing(self) -> Iterator[str]:
        """Every kernel that appeared (+), vanished (-) or changed (~)."""
        for change in self.changed:
            yield f"~ {change.before} -> {change.after}"
        yield from (f"- {name}" for name in self.vanished)
        yield from (f"+ {name}" for name in self.appeared)


@dataclass(frozen=True, slots=True)
class Difference:
    """Two lineages compared with each other, optionally for one receipt only."""

    before: Lineage
    after: Lineage
    receipt: int | None
    families: tuple[FamilyDifference, ...]

    @property
    def empty(self) -> bool:
        """Whether every kernel of either lineage is in the other."""
        return not any(family.changed or family.appeared or family.vanished for family in self.families)

    def report(self) -> str:
        """The totals, then a few lines for each family, without kernel names."""
        of = "" if self.receipt is None else f", receipt {self.receipt}"
        head = f"{_title(self.before)} -> {_title(self.after)}{of}: {_counts(self.families)}"
        return "\n".join([head, *(line for family in self.families for line in family.report())])

    def family_rows(self) -> list[list[Any]]:
        """The values of :data:`FAMILY_COLUMNS`."""
        return [
            [self.receipt, of.family, len(of.appeared), len(of.vanished), len(of.changed), of.same]
            for of in self.families
        ]

    def kernel_rows(self) -> list[list[Any]]:
        """The values of :data:`KERNEL_COLUMNS`, for each kernel that differs."""
        rows: list[list[Any]] = []
        for of in self.families:
            found: list[list[Any]] = [["changed", change.after, change.before, change.traits] for change in of.changed]
            found += [["vanished", name, None, None] for name in of.vanished]
            found += [["appeared", name, None, None] for name in of.appeared]
            rows += [[self.receipt, of.family, *row] for row in found]
        return rows

    def listing(self) -> str:
        """One line for each kernel that differs."""
        return "\n".join(line for family in self.families for line in family.listing())


def difference(
    connection: sqlite3.Connection, before: Request, after: Request, receipt: int | None = None
) -> Difference:
    """What ``after`` has and ``before`` lacks, and vice versa; for one receipt if it is given.

    Raises:
        UsageError: one of the two is not populated, is populated only in part, or lacks the receipt.
    """
    for request in (before, after):
        _check_receipt(request, receipt)
        check_populated(connection, request.lineage, receipt)
    traits = operation(after.spec.operation).traits
    old, new = (_kernels(connection, request.lineage, traits, receipt) for request in (before, after))
    families = tuple(_of_family(f, old[f], new[f], traits) for f in traits.families if old[f] or new[f])
    return Difference(before.lineage, after.lineage, receipt, families)


def _check_receipt(request: Request, receipt: int | None) -> None:
    spec = request.spec
    if receipt is not None and receipt not in spec.receipt_numbers:
        there = ", ".join(map(str, spec.receipt_numbers)) or "none"
        raise UsageError(
            f"{spec.arch} has no receipt {receipt} at {spec.revision}", hint=f"Its receipts there: {there}."
        )


def _kernels(
    connection: sqlite3.Connection, lineage: Lineage, traits_of: Traits, receipt: int | None
) -> Mapping[str, Mapping[Values, str]]:
    """The names of a lineage's kernels by family, then by their traits."""
    listed = "" if receipt is None else "AND id IN (SELECT kernel_id FROM kernel_receipt WHERE receipt = :receipt)"
    rows = connection.execute(
        f"SELECT name, family, {', '.join(traits_of)} FROM {rows_of(lineage.operation)} WHERE {of_lineage()} {listed}",
        lineage.parameters | {"receipt": receipt},
    )
    families: dict[str, dict[Values, str]] = defaultdict(dict)
    for name, family, *traits in rows:
        families[family][tuple(traits)] = name
    return families


def _of_family(family: str, old: Mapping[Values, str], new: Mapping[Values, str], traits: Traits) -> FamilyDifference:
    gone, come = old.keys() - new.keys(), new.keys() - old.keys()
    pairs = _pairs({row: old[row] for row in gone}, {row: new[row] for row in come}, len(traits.signature.model_fields))
    return FamilyDifference(
        family,
        same=len(old) - len(gone),
        changed=tuple(sorted(Change(_change(a, b, traits), old[a], new[b]) for a, b in pairs.items())),
        appeared=tuple(sorted(new[row] for row in come - set(pairs.values()))),
        vanished=tuple(sorted(old[row] for row in gone - pairs.keys())),
        new_values=_values_only_in(new, old, traits),
        lost_values=_values_only_in(old, new, traits),
    )


def _pairs(gone: Mapping[Values, str], come: Mapping[Values, str], signature: int) -> dict[Values, Values]:
    """Pair each vanished kernel with the one that replaces it, most similar first; no kernel is used twice.

    ``signature``: the number of leading traits, which the kernels of a pair share.
    """
    by_signature: dict[Values, list[Values]] = defaultdict(list)
    for row in come:
        by_signature[row[:signature]].append(row)
    candidates = (
        (distance, gone[a], come[b], a, b)
        for a in gone
        for b in by_signature[a[:signature]]
        if (distance := sum(x != y for x, y in zip(a, b, strict=True))) <= FEW
    )
    pairs: dict[Values, Values] = {}
    taken = set()
    for *_, a, b in sorted(candidates):
        if a not in pairs and b not in taken:
            pairs[a] = b
            taken.add(b)
    return pairs


def _change(before: Values, after: Values, traits: Traits) -> str:
    return ", ".join(f"{trait} {x} -> {y}" for trait, x, y in zip(traits, before, after, strict=True) if x != y)


def _values_only_in(
    these: Mapping[Values, str], those: Mapping[Values, str], traits: Traits
) -> dict[str, tuple[Any, ...]]:
    """By trait, the values that only one side has; empty when the other side has no kernel at all."""
    columns = zip(traits, zip(*these, strict=True), zip(*those, strict=True), strict=True) if these and those else ()
    only = {trait: tuple(sorted(set(here) - set(there))) for trait, here, there in columns}
    return {trait: values for trait, values in only.items() if values}


def _counts(families: Sequence[FamilyDifference]) -> str:
    return (
        f"{sum(len(family.appeared) for family in families):,} appeared, "
        f"{sum(len(family.vanished) for family in families):,} vanished, "
        f"{sum(len(family.changed) for family in families):,} changed, "
        f"{sum(family.same for family in families):,} the same"
    )


def _title(lineage: Lineage) -> str:
    variant = f" {lineage.variant}" if operation(lineage.operation).variants else ""
    return f"{lineage.arch} {lineage.revision}{variant}"
