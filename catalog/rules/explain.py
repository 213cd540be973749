"""Why a kernel exists or does not: every rule that applies to it, with its verdict, and the nearest kernels.

The rules are the spec's own expressions, evaluated by SQLite over one row with the stated traits, and NULL for the
others. SQL's three-valued logic then distinguishes three answers: the rule holds, it rejects, or it depends on traits
that are not stated.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from catalog.errors import UsageError
from catalog.ops import operation
from catalog.ops.protocol import Operation
from catalog.registry.views import rows_of
from catalog.rules.enumeration import Join
from catalog.schema.arch_spec import ArchSpec, Rule, Variant, Yield
from catalog.schema.expressions import columns_read
from catalog.schema.lineage import Lineage, of_lineage
from catalog.schema.trait_text import shown
from catalog.schema.traits import Traits, Word

Stated = Mapping[str, Any]

SHOWN = 4
"""Maximum number of nearest tiles and variants named in a reason."""


class Verdict(Word):
    """The result of a rule for the stated traits."""

    HOLDS = "holds"
    REJECTED = "rejected"
    DEPENDS = "depends"


@dataclass(frozen=True, slots=True)
class Finding:
    """The verdict of one rule. ``traits``: stated ones that it rejects, or unstated ones that it depends on."""

    kind: str
    id: str
    verdict: Verdict
    traits: tuple[str, ...]
    reason: str
    source: str
    quirk: str | None = None


@dataclass(frozen=True, slots=True)
class Match:
    """Kernels with the stated traits except for ``changes``; the first of several similar kernels represents them."""

    changes: tuple[str, ...]
    kernels: int
    name: str
    id: str
    receipts: str


@dataclass(frozen=True)
class Explanation:
    """The findings, the number of kernels with all stated traits, and those kernels or else the nearest ones."""

    arch: str
    stated: Stated
    findings: tuple[Finding, ...]
    kernels: int
    matches: tuple[Match, ...]
    base: str = ""
    """The known revision whose rules these are, if the rows are of an adopted one."""
    held: bool = True
    """Whether the catalog has kernels of the family to compare with."""

    @property
    def rejections(self) -> tuple[Finding, ...]:
        """The rules that no such kernel meets.

        Neither receipts nor rules of some revisions' headers are among them: a kernel needs only one of each.
        """
        rejected = (finding for finding in self.findings if finding.verdict is Verdict.REJECTED)
        return tuple(f for f in rejected if f.kind != "receipt" and not f.kind.startswith("headers "))

    @property
    def summary(self) -> str:
        """The answer in one line, and a second one about the rules if they are another revision's."""
        rules = f"\nThe rules are those of {self.base}, the nearest known revision." if self.base else ""
        return f"{self._answer}{rules}"

    @property
    def _answer(self) -> str:
        rejected = ", ".join(dict.fromkeys(finding.id for finding in self.rejections))
        if not self.held and all(f.kind in ("hardware", "headers") for f in self.rejections):
            verdict = f"Not runnable, rejected by: {rejected}" if rejected else "No rule alone rejects them"
            missing = f"the family {self.stated['family']} of {self.arch}"
            return f"{verdict}; populate {missing} to see which kernels have these traits."
        if not self.kernels:
            why = f"rejected by: {rejected}" if rejected else "no rule alone rejects them, but they exclude each other"
            return f"No kernel of {self.arch} has these traits; {why}."
        only = self.matches[0]
        there = f"{self.kernels:,} kernels of {self.arch} have these traits"
        if self.kernels == 1:
            there = f"It exists: {only.name} (id {only.id}, receipts {only.receipts or 'none'})"
        return f"{there}; but not runnable, rejected by: {rejected}." if rejected else f"{there}."


def explain(
    connection: sqlite3.Connection, spec: ArchSpec, lineage: Lineage, stated: Stated, limit: int
) -> Explanation:
    """Explain why ``spec`` has or lacks kernels with the ``stated`` traits; the rows are those of ``lineage``.

    Raises:
        UsageError: no family is stated.
    """
    if "family" not in stated:
        there = ", ".join(spec.families)
        raise UsageError("no family is stated", hint=f"State one, as in family=fwd; {lineage.arch} has {there}.")
    family, of = stated["family"], operation(spec.operation)
    rows = _Rows(connection, lineage, stated, of)
    sources = [_Source(Join(spec, n, lineage), y, stated) for n, y in spec.yields_of(family).items()]
    findings = [finding for source in sources for finding in source.findings()]
    if not sources:
        there = f"{lineage.arch} has kernels of other families only: {', '.join(spec.families)}"
        findings.append(Finding("family", family, Verdict.REJECTED, _words(stated, ["family"]), there, ""))
    explained = {"family"}.union(*(source.explained for source in sources))
    held = rows.held()
    findings += rows.unused([trait for trait in stated if trait not in explained]) if held else ()
    with closing(_Row(of, {**lineage.columns(of.traits.variant), **stated})) as row:
        findings += [row.finding("hardware", rule) for rule in spec.hw_rules]
        known = {revision for rule in spec.header_rules for revision in rule.headers}
        for rule in spec.demands:
            some = rule.headers if known.difference(rule.headers) else ()
            findings.append(row.finding(" ".join(("headers", *some)), rule))
        findings += [row.finding("invariant", rule) for rule in spec.invariants if rule.concerns(family)]
    kernels = rows.count() if held else 0
    matches = [] if not held else rows.exact(limit) if kernels else rows.nearest(limit)
    return Explanation(lineage.arch, stated, tuple(findings), kernels, tuple(matches), lineage.base, held)


_NOT_THREE_VALUED = re.compile(r"\b(case|is|coalesce|ifnull|nullif)\b", re.IGNORECASE)
"""SQL that turns NULL into a definite value. An expression with it is undecided while one of its traits is unstated."""


def _iif(condition: Any, then: Any, otherwise: Any) -> Any:
    """SQL's ``iif`` in three-valued logic: unknown where the condition is unknown, unless both branches agree."""
    if condition is None:
        return then if then == otherwise else None
    return then if condition else otherwise


class _Row:
    """One row in its own in-memory database: ``known`` columns have values, the others are NULL.

    ``free`` traits are traits of an enumeration that the family does not show: some combination has every value of
    them, so a rule never fails because of them alone.
    """

    def __init__(self, operation: Operation, known: Stated, free: frozenset[str] = frozenset()) -> None:
        self._operation = operation
        self._known = known
        self._free = free
        self._connection = sqlite3.connect(":memory:")
        self._connection.create_function("iif", 3, _iif, deterministic=True)
        self._columns = columns = (*operation.traits.identity, *operation.traits)
        self._connection.execute(f"CREATE TABLE kernel ({', '.join(columns)})")
        holes = ", ".join("?" * len(columns))
        self._connection.execute(f"INSERT INTO kernel VALUES ({holes})", [known.get(column) for column in columns])

    def close(self) -> None:
        """Drop the database."""
        self._connection.close()

    def finding(self, kind: str, rule: Rule) -> Finding:
        """The finding of ``rule`` for the row."""
        verdict, traits = self.verdict(rule.expr)
        return Finding(kind, rule.id, verdict, traits, rule.reason, rule.source, rule.quirk)

    def verdict(self, expr: str) -> tuple[Verdict, tuple[str, ...]]:
        """The verdict of ``expr`` for the row, and the traits that it concerns."""
        reads = columns_read(expr, self._operation)
        read = [column for column in self._columns if column in reads]
        unknown = [column for column in read if column not in self._known]
        value = self._connection.execute(f"SELECT ({expr}) FROM kernel").fetchone()[0]
        if unknown and _NOT_THREE_VALUED.search(expr):
            value = None
        if value:
            return Verdict.HOLDS, ()
        unstated = tuple(trait for trait in unknown if trait not in self._free)
        if value is None and unstated:
            return Verdict.DEPENDS, unstated
        if value is None and unknown:
            return Verdict.HOLDS, ()
        return Verdict.REJECTED, _words(self._known, (column for column in read if column in self._known))


@dataclass(frozen=True)
class _Source:
    """Findings of one enumeration about the stated traits of a family that it makes."""

    join: Join
    made: Yield
    stated: Stated

    def findings(self) -> Iterator[Finding]:
        """Findings of the tile table, the variants, the constant and derived traits, the constraints, the receipts."""
        enumeration = self.join.enumeration
        known = {**self.join.lineage.columns(self._traits.variant), "target": enumeration.target, **self._visible}
        with closing(_Row(self.join.operation, known, frozenset(self._traits) - self._shown)) as row:
            if enumeration.join:
                yield from self._relations()
            elif enumeration.sweep is None:
                yield self._tiles()
            fitting, finding = self._variants(row)
            yield finding
            yield from self._derived(row)
            for rule in self.join.constraints:
                yield row.finding("constraint", rule)
            yield from self._receipts(row, fitting)

    @property
    def _traits(self) -> Traits:
        return self.join.traits

    @cached_property
    def _shown(self) -> frozenset[str]:
        """The traits of the enumeration that the family keeps unchanged."""
        kept = set(self._traits if self.made.keep is None else self.made.keep)
        return frozenset(kept - set(self.made.drop) - set(self.made.set))

    @cached_property
    def _visible(self) -> Stated:
        return {trait: value for trait, value in self.stated.items() if trait in self._shown and trait != "family"}

    @property
    def explained(self) -> frozenset[str]:
        """The traits that its table of tiles, if it has one, its variants and derived traits decide."""
        enumeration = self.join.enumeration
        of_table = self.join.tile_traits if enumeration.sweep is None else ()
        spoken = {*of_table, *self._variant_traits, *enumeration.derived}
        return frozenset(spoken & self._shown)

    @property
    def _source(self) -> str:
        return self.join.enumeration.source or ""

    def _relations(self) -> Iterator[Finding]:
        """Whether each relation about stated traits has a row with their values."""
        fallback = self.join.enumeration.fallback
        for name in self.join.enumeration.join:
            relation = self.join.spec.relations[name]
            wanted = {trait: value for trait, value in self._visible.items() if trait in relation.columns}
            rows = [dict(zip(relation.columns, row, strict=True)) for row in relation.cells()]
            fitting = [row for row in rows if all(row[t] in (None, value) for t, value in wanted.items())]
            source = relation.source or self._source
            falls_back = self._falls_back() if fallback is not None and name == fallback.relation else False
            if falls_back and fallback is not None:
                yield Finding(
                    "fallback", fallback.id, Verdict.HOLDS, (), fallback.reason, fallback.source, fallback.quirk
                )
            elif wanted and not fitting and fallback is not None and falls_back is None:
                unstated = tuple(trait for trait in fallback.same if trait not in self._visible)
                reason = f"no row of the relation {name} matches; {fallback.reason}"
                yield Finding(
                    "fallback", fallback.id, Verdict.DEPENDS, unstated, reason, fallback.source, fallback.quirk
                )
            elif wanted and fitting:
                reason = f"the relation {name} has such rows: {len(fitting)} of {len(rows)}"
                yield Finding("relation", name, Verdict.HOLDS, (), reason, source, relation.quirk)
            elif wanted:
                there = dict.fromkeys(" ".join(_words(row, wanted)) for row in rows)
                reason = f"no row of the relation {name} matches; it has {' or '.join(list(there)[:SHOWN]) or 'no row'}"
                reason += ", ..." if len(there) > SHOWN else ""
                words = _words(wanted, wanted)
                yield Finding("relation", name, Verdict.REJECTED, words, reason, source, relation.quirk)

    def _falls_back(self) -> bool | None:
        """Whether the enumeration's fallback applies to the stated traits; None where unstated ones decide."""
        fallback = self.join.enumeration.fallback
        if fallback is None:
            return False
        wanted = [self._visible.get(trait) for trait in fallback.same]
        there = any(
            all(value in (None, its) for value, its in zip(wanted, survivor, strict=True))
            for survivor in self.join.survivors
        )
        if not there:
            return True
        return None if None in wanted else False

    def _tiles(self) -> Finding:
        """Whether the tile table has a tile with the stated extents."""
        of_variants = {*self.join.fixed, *self.join.varying}
        wanted = {t: v for t, v in self._visible.items() if t in self.join.tile_traits and t not in of_variants}
        tiles = self.join.tiles
        changes = [
            {
                t: tile.get(t, self._traits[t].default)
                for t, value in wanted.items()
                if tile.get(t, self._traits[t].default) != value
            }
            for tile in tiles
        ]
        if {} in changes:
            reason = f"the tile table has such tiles: {changes.count({})} of {len(tiles)}"
            return Finding("tile", "tile_table", Verdict.HOLDS, (), reason, self._source)
        fewest = min(map(len, changes), default=0)
        nearest = dict.fromkeys(" ".join(_words(change, change)) for change in changes if len(change) == fewest)
        reason = f"no tile of the table matches; the nearest have {' or '.join(list(nearest)[:SHOWN])}"
        return Finding("tile", "tile_table", Verdict.REJECTED, _words(wanted, wanted), reason, self._source)

    def _variants(self, row: _Row) -> tuple[list[Variant], Finding]:
        """The pipeline variants that may have the stated traits, and the finding whether there is one."""
        verdicts = [self._variant(row, i) for i in range(len(self.join.domains))]
        variants = self.join.enumeration.variants
        fitting = [v for v, (verdict, _, _) in zip(variants, verdicts, strict=True) if verdict is not Verdict.REJECTED]
        if not fitting:
            fewest = min((len(misfits) for _, _, misfits in verdicts), default=0)
            nearest = [
                f"{variant.id} needs {' and '.join(misfits)}"
                for variant, (_, _, misfits) in zip(variants, verdicts, strict=True)
                if len(misfits) == fewest
            ]
            stated = [t for t in self._visible if t in self._variant_traits]
            reason = f"no pipeline variant matches; the nearest: {'; '.join(nearest[:SHOWN])}"
            return [], Finding(
                "variant", "variants", Verdict.REJECTED, _words(self.stated, stated), reason, self._source
            )
        certain = any(verdict is Verdict.HOLDS for verdict, _, _ in verdicts)
        unstated = () if certain else _in_order((trait for _, traits, _ in verdicts for trait in traits), self._traits)
        reason = f"pipeline variants that may match: {', '.join(variant.id for variant in fitting)}"
        verdict = Verdict.HOLDS if certain else Verdict.DEPENDS
        quirk = "; ".join(variant.quirk for variant in fitting if variant.quirk) or None
        return fitting, Finding("variant", "variants", verdict, unstated, reason, self._source, quirk)

    @property
    def _variant_traits(self) -> set[str]:
        return {"dtype", *self.join.fixed, *self.join.varying}

    def _variant(self, row: _Row, place: int) -> tuple[Verdict, tuple[str, ...], list[str]]:
        """The verdict of one variant, the unstated traits that it depends on, and the changes that it needs."""
        variant, domain = self.join.enumeration.variants[place], self.join.domains[place]
        allowed: dict[str, list[Any]] = {
            t: list(domain.get(t, [self._traits[t].default])) for t in self._variant_traits
        }
        allowed["dtype"] = list(variant.dtype)
        misfits = [
            f"{trait}={'|'.join(map(shown, allowed[trait]))}"
            for trait, value in self._visible.items()
            if trait in allowed and value not in allowed[trait]
        ]
        verdict, traits = (Verdict.HOLDS, ()) if variant.when is None else row.verdict(variant.when)
        if verdict is Verdict.REJECTED:
            misfits.append(f"({variant.when})")
        if misfits:
            return Verdict.REJECTED, (), misfits
        return verdict, traits, []

    def _derived(self, row: _Row) -> Iterator[Finding]:
        """Findings for stated traits that the enumeration computes from others."""
        for trait, expr in self.join.enumeration.derived.items():
            if trait in self._visible:
                verdict, traits = row.verdict(f"{trait} = ({expr})")
                reason = f"{trait} follows from other traits: {expr}"
                yield Finding("derived", trait, verdict, traits, reason, self._source)

    def _receipts(self, row: _Row, fitting: Sequence[Variant]) -> Iterator[Finding]:
        """Which receipts would list the kernel, and whether any does: the catalog holds what some receipt lists."""
        enumeration = self.join.enumeration
        findings = []
        for receipt in self.join.spec.receipts:
            expr = enumeration.receipts.get(receipt.receipt)
            if expr is None:
                continue
            verdict, traits = row.verdict(expr)
            if fitting and not any(v.receipts is None or receipt.receipt in v.receipts for v in fitting):
                verdict, traits = Verdict.REJECTED, ("pipeline",)
            quirk = enumeration.receipt_quirks.get(receipt.receipt)
            id_ = str(receipt.receipt)
            findings.append(Finding("receipt", id_, verdict, traits, receipt.about, self._source, quirk))
        if findings:
            verdicts = {finding.verdict for finding in findings}
            best = next(v for v in (Verdict.HOLDS, Verdict.DEPENDS, Verdict.REJECTED) if v in verdicts)
            traits = _in_order(
                (t for f in findings for t in f.traits if best is f.verdict is Verdict.DEPENDS), self._traits
            )
            reason = "the catalog holds kernels that at least one receipt lists"
            yield Finding("listed", "some_receipt", best, traits, reason, self._source)
        yield from findings


_RECEIPTS = "coalesce((SELECT group_concat(receipt, ' ') FROM kernel_receipt WHERE kernel_id = id), '')"
"""SQL expression for the receipts that list a kernel."""


@dataclass(frozen=True)
class _Rows:
    """The rows of a lineage, compared with the stated traits."""

    connection: sqlite3.Connection
    lineage: Lineage
    stated: Stated
    operation: Operation

    @property
    def _table(self) -> str:
        return rows_of(self.operation.name)

    @property
    def _family(self) -> str:
        return f"{of_lineage()} AND family = :family"

    @property
    def _parameters(self) -> dict[str, Any]:
        return {**self.lineage.parameters, **self.stated}

    @property
    def _all(self) -> str:
        return " AND ".join((self._family, *(f"{trait} = :{trait}" for trait in self.stated if trait != "family")))

    def held(self) -> bool:
        """Whether there are rows of the family. The view of an operation's rows exists once some are populated."""
        populated = self._one(f"SELECT EXISTS (SELECT 1 FROM population WHERE {of_lineage()})")[0]
        return bool(populated and self._one(f"SELECT EXISTS (SELECT 1 FROM {self._table} WHERE {self._family})")[0])

    def count(self) -> int:
        """Number of rows with all of the stated traits."""
        return int(self._one(f"SELECT count(*) FROM {self._table} WHERE {self._all}")[0])

    def unused(self, traits: Sequence[str]) -> Iterator[Finding]:
        """A finding for each of the stated ``traits`` that has other values in every row of the family."""
        family = self.stated["family"]
        found = ", ".join(["count(*)", *(f"max({trait} = :{trait})" for trait in traits)])
        kernels, *occurs = self._one(f"SELECT {found} FROM {self._table} WHERE {self._family}")
        missing = [trait for trait, there in zip(traits, occurs, strict=True) if kernels and not there]
        for trait in missing:
            (values,) = self._one(f"SELECT group_concat(DISTINCT {trait}) FROM {self._table} WHERE {self._family}")
            reason = f"{family} kernels of {self.lineage.arch} have {trait}={values} only"
            yield Finding("trait", trait, Verdict.REJECTED, _words(self.stated, [trait]), reason, "")

    def _one(self, statement: str) -> sqlite3.Row:
        row: sqlite3.Row = self.connection.execute(statement, self._parameters).fetchone()
        return row

    def exact(self, limit: int) -> list[Match]:
        """Rows with all of the stated traits, in upstream's dispatch order."""
        rows = self.connection.execute(
            f"SELECT name, id, {_RECEIPTS} AS receipts FROM {self._table} "
            f"WHERE {self._all} ORDER BY dispatch_order, id LIMIT {limit:d}",
            self._parameters,
        )
        return [Match((), 1, row["name"], row["id"], row["receipts"]) for row in rows]

    def nearest(self, limit: int) -> list[Match]:
        """Rows with the fewest changes, signature changes last; rows with the same changes are one match."""
        compared = [trait for trait in self.stated if trait != "family"]

        def changes(traits: Iterable[str]) -> str:
            return " + ".join(f"({trait} <> :{trait})" for trait in traits) or "0"

        signature = changes(trait for trait in compared if self.operation.traits[trait].group == "signature")
        rows = self.connection.execute(
            f"SELECT *, {_RECEIPTS} AS receipts FROM "
            f"(SELECT {', '.join(['name', 'id', *compared])}, count(*) AS kernels, "
            f"{changes(compared)} AS changes, {signature} AS signature_changes, "
            "min(printf('%012d', dispatch_order) || id) AS first "  # bare columns come from the row of min()
            f"FROM {self._table} WHERE {self._family} GROUP BY {', '.join(['family', *compared])}) "
            f"ORDER BY changes, signature_changes, first LIMIT {limit:d}",
            self._parameters,
        )
        return [
            Match(
                _words(row, [trait for trait in compared if row[trait] != self.stated[trait]]),
                row["kernels"],
                row["name"],
                row["id"],
                row["receipts"],
            )
            for row in rows
        ]


def _words(row: Any, traits: Iterable[str]) -> tuple[str, ...]:
    """``trait=value`` for some traits of ``row``."""
    return tuple(f"{trait}={shown(row[trait])}" for trait in traits)


def _in_order(names: Iterable[str], traits: Traits) -> tuple[str, ...]:
    """Each trait once, in column order."""
    named = set(names)
    return tuple(trait for trait in traits if trait in named)
