"""Enumeration as a join: tiles x variants x feature domains, filtered by constraints, inside SQLite.

For one enumeration of a spec this module fills three small tables (``tile``, ``variant``, ``domain``), runs one
statement that joins them into the table ``combination``, then projects that table onto the families of the enumeration.
No loop over features runs in Python, and every filter is an expression of the spec.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from catalog.ops import operation
from catalog.ops.protocol import Operation
from catalog.schema.arch_spec import OF_VARIANT, ArchSpec, Axis, Domain, Enumeration, Rule, Sweep, Yield
from catalog.schema.expressions import columns_read
from catalog.schema.kernel import canonical_json_sql
from catalog.schema.lineage import Lineage
from catalog.schema.name_parts import sql_literal
from catalog.schema.traits import Traits, TraitValue

MAX_TILES = 1_000_000
"""Exceeds the number of tiles of any enumeration: dispatch order is the order of tiles, then of variants."""


def _all_of(expressions: Iterable[str]) -> str:
    return " AND ".join(f"({expression})" for expression in expressions) or "1"


def _as_list(domain: Domain) -> list[TraitValue]:
    return domain if isinstance(domain, list) else [domain]


@dataclass(frozen=True)
class Join:
    """The SQL that makes the rows of one enumeration of a lineage."""

    spec: ArchSpec
    name: str
    lineage: Lineage
    restrictions: tuple[str, ...] = ()
    """Conditions on the combinations, in addition to the constraints. With some, the enumeration has one yield."""
    extra_domains: Mapping[str, list[TraitValue]] = field(default_factory=dict)
    """Values of traits that the spec leaves at their default."""
    part: Enumeration | None = None
    """A part of the enumeration with some of its yields; None: all of it."""

    @cached_property
    def operation(self) -> Operation:
        """The operation that the kernels compute."""
        return operation(self.spec.operation)

    @property
    def enumeration(self) -> Enumeration:
        """The enumeration, or the part of it."""
        return self.part or self.spec.enumerations[self.name]

    @cached_property
    def constraints(self) -> list[Rule]:
        """Its constraints, as expressions over the columns of kernels."""
        return self.spec.constraints_of(self.name)

    @property
    def in_parts(self) -> bool:
        """Whether its tiles are joined with the variants in parts, because there may be millions."""
        return self.enumeration.sweep is not None or bool(self.enumeration.join)

    @property
    def traits(self) -> Traits:
        """The traits of the kernels."""
        return self.operation.traits

    @cached_property
    def tiles(self) -> list[dict[str, TraitValue]]:
        """Every tile as traits, in upstream's order."""
        _, groups = self.spec.tiles_of(self.enumeration)
        return [row for group in groups for row in group.rows()]

    @cached_property
    def domains(self) -> list[dict[str, list[TraitValue]]]:
        """The domain of every trait that each variant names."""
        of_variant: list[TraitValue] = list(self.spec.variants.get(self.lineage.variant, ()))
        about = self.operation.variant_trait
        domains = []
        for variant in self.enumeration.variants:
            named = self.enumeration.domains.get(variant.domain or "", {}) | variant.traits
            named = {**named, **self.extra_domains}
            domains.append({t: of_variant if d == OF_VARIANT and t == about else _as_list(d) for t, d in named.items()})
        return domains

    @cached_property
    def varying(self) -> list[str]:
        """Traits with several values in some variant: each takes one join."""
        return [t for t in self.traits if any(len(domain.get(t, ())) > 1 for domain in self.domains)]

    @cached_property
    def fixed(self) -> list[str]:
        """Traits with a single value in each variant: columns of the variant table."""
        return [t for t in self.traits if t not in self.varying and any(t in domain for domain in self.domains)]

    def fill(self, connection: sqlite3.Connection) -> None:
        """Fill the temporary tables ``tile``, ``variant`` and ``domain``."""
        variants = self.enumeration.variants
        if self.enumeration.sweep is not None:
            self._sweep_tiles(connection, self.enumeration.sweep)
        elif self.enumeration.join:
            self._join_relations(connection)
        else:
            make_table(
                connection, "tile", ["seq", *self.tile_traits],
                (
                    [seq, *(tile.get(t, self.traits[t].default) for t in self.tile_traits)]
                    for seq, tile in enumerate(self.tiles)
                ),
            )  # fmt: skip
        make_table(
            connection, "variant", ["seq", "dtype", *self.fixed],
            (
                [seq, dtype, *(domain.get(t, [self.traits[t].default])[0] for t in self.fixed)]
                for seq, (variant, domain) in enumerate(zip(variants, self.domains, strict=True))
                for dtype in variant.dtype
            ),
        )  # fmt: skip
        make_table(
            connection, "domain", ["variant", "trait", "value"],
            (
                [seq, trait, value]
                for seq, domain in enumerate(self.domains)
                for trait in self.varying
                for value in domain.get(trait, [self.traits[trait].default])
            ),
        )  # fmt: skip
        connection.execute("CREATE INDEX temp.domain_of ON domain (variant, trait)")

    def chunks(self, connection: sqlite3.Connection) -> list[dict[str, Any]]:
        """The parameters of :meth:`combine_sql`, one mapping for each part in which the tables are joined."""
        if not self.in_parts:
            return [{}]
        columns = self.operation.chunk
        values = connection.execute(f"SELECT DISTINCT {', '.join(columns)} FROM tile").fetchall()
        return [dict(zip(columns, row, strict=True)) for row in values]

    @cached_property
    def tile_traits(self) -> list[str]:
        """Traits that at least one tile states."""
        if self.enumeration.sweep is not None:
            return self._swept(self.enumeration.sweep)
        if self.enumeration.join:
            joined = {column for name in self.enumeration.join for column in self.spec.relations[name].columns}
            return [t for t in self.traits if t in joined]
        return [t for t in self.traits if any(t in tile for tile in self.tiles)]

    def combine_sql(self, receipts: Sequence[int]) -> str:
        """The statement that makes table ``combination``: the join, the constraints, and any of ``receipts``.

        Column ``listed`` has one bit for each receipt of the spec, in ascending order: 1 if it lists the combination.
        """
        enumeration = self.enumeration
        whens = " ".join(f"WHEN {i} THEN ({v.when})" for i, v in enumerate(enumeration.variants) if v.when is not None)
        kept = [f"CASE variant_seq {whens} ELSE 1 END"] if whens else []
        kept += [*(rule.expr for rule in self.constraints if rule not in self._of_tiles), *self.restrictions]
        bits = {receipt: 1 << i for i, receipt in enumerate(self.spec.receipt_numbers)}
        if bits:
            kept.append(f"listed & {sum(bits[receipt] for receipt in receipts)}")
        listed = " + ".join(f"({enumeration.receipts[r]}) * {bit}" for r, bit in bits.items()) or "0"
        only = " ".join(
            f"WHEN {i} THEN {sum(bits[receipt] for receipt in variant.receipts)}"
            for i, variant in enumerate(enumeration.variants)
            if variant.receipts is not None
        )
        if only:
            listed = f"({listed}) & CASE variant_seq {only} ELSE -1 END"  # -1 has all bits
        columns = ", ".join(
            f"({enumeration.derived[t]}) AS {t}" if t in enumeration.derived else t
            for t in (*self.traits.identity, *self.traits)
        )
        position = f"(({enumeration.order}) * {MAX_TILES} + tile_seq) * {len(enumeration.variants)} + variant_seq"
        if self.in_parts:
            # One chunk at a time: a sweep may have millions of combinations.
            kept += [f"{column} = :{column}" for column in self.operation.chunk]
        # SQL cannot use an alias within the SELECT that defines it, so there is one level for each: the product, the
        # derived traits, the receipts (over derived traits), the filter and position (over all of them).
        return (
            f"CREATE TEMP TABLE combination AS SELECT *, {position} AS position "
            f"FROM (SELECT *, {listed} AS listed FROM "
            f"(SELECT {columns}, tile_seq, variant_seq FROM ({self._product_sql()}))) "
            f"WHERE {_all_of(kept)}"
        )

    def _product_sql(self) -> str:
        family = self.enumeration.yields[0].family if self.restrictions else ""
        sources = {"family": sql_literal(family), "dtype": "variant.dtype"}
        sources |= {t: f"tile.{t}" for t in self.tile_traits if t != "dtype"}
        sources |= {t: f"variant.{t}" for t in self.fixed}
        sources |= {t: f"domain_{t}.value" for t in self.varying}
        columns = [f"{sql_literal(value)} AS {name}" for name, value in self._identity.items()]
        columns += [f"{sources.get(t) or sql_literal(self._default(t))} AS {t}" for t in self.traits]
        # CROSS JOIN keeps SQLite's planner from reordering: variants, then their tiles, then one feature after another.
        joins = ["variant CROSS JOIN tile ON tile.dtype = variant.dtype"]
        joins += [
            f"domain AS domain_{t} ON domain_{t}.variant = variant.seq AND domain_{t}.trait = {sql_literal(t)}"
            for t in self.varying
        ]
        columns += ["tile.seq AS tile_seq", "variant.seq AS variant_seq"]
        return f"SELECT {', '.join(columns)} FROM {' CROSS JOIN '.join(joins)}"

    @property
    def _identity(self) -> dict[str, str]:
        target, _ = self.spec.tiles_of(self.enumeration)
        return {**self.lineage.columns(self.traits.variant), "target": target}

    def combined(self, connection: sqlite3.Connection, receipts: Sequence[int]) -> Iterator[float]:
        """Make the temporary table ``combination``, part by part; yields the fraction of the parts that are done."""
        self.fill(connection)
        chunks = self.chunks(connection)
        for number, chunk in enumerate(chunks, start=1):
            connection.execute("DROP TABLE IF EXISTS temp.combination")
            connection.execute(self.combine_sql(receipts), chunk)
            yield number / len(chunks)

    def project_sql(self, made: Yield) -> str:
        """The statement that makes table ``made``: id, name and traits of each kernel of one family."""
        identity = f"sha256({canonical_json_sql(self.operation.kernel, self._constants(made))}) AS id"
        identity += f", {self._name_sql(made)} AS name"
        return f"CREATE TEMP TABLE made AS SELECT *, {identity} FROM ({self._rows_sql(made)})"

    def names_sql(self, made: Yield, *columns: str) -> str:
        """The query for the name of each kernel of one family, then traits or ``position`` (in the dispatch order)."""
        return f"SELECT {', '.join((f'{self._name_sql(made)} AS name', *columns))} FROM ({self._rows_sql(made)})"

    def _rows_sql(self, made: Yield) -> str:
        """The query for the traits, position and receipts of each kernel of one family.

        Combinations that differ only in traits that the family lacks are one kernel, listed wherever one of them is.
        """
        kept = self._kept(made)
        sources = {trait: f"({made.set[trait]})" if trait in made.set else trait for trait in self.traits}
        sources |= {column: sql_literal(value) for column, value in self._constants(made).items()}
        columns = ", ".join(f"{sources[column]} AS {column}" for column in (*self.traits.identity, *self.traits))
        if kept == set(self.traits):
            rows = f"SELECT {columns}, position, listed FROM combination WHERE {made.where or '1'}"
        else:
            named = [t for t in self.traits if (t in kept and t in self._named) or t in made.set]
            listed = " + ".join(f"max(listed & {1 << i})" for i in range(len(self.spec.receipts))) or "0"
            rows = (
                f"SELECT {columns}, min(position) AS position, {listed} AS listed FROM combination "
                f"WHERE {made.where or '1'} GROUP BY {', '.join(sources[t] for t in named)}"
            )
        return rows

    def _kept(self, made: Yield) -> set[str]:
        """The traits that kernels of the family have of the combination."""
        return set(self.traits if made.keep is None else made.keep) - set(made.drop)

    def _constants(self, made: Yield) -> dict[str, TraitValue]:
        """The columns that are equal in all kernels of one family: SQLite need not read them, nor work with them."""
        varying = ((self._kept(made) & self._named) | set(made.set)) - {"family"}
        return {
            **self._identity,
            **{t: self._default(t) for t in self.traits if t not in varying},
            "family": made.family,
        }

    def _name_sql(self, made: Yield) -> str:
        return self.operation.kernel.naming(made.family, self.lineage).sql()

    @property
    def _named(self) -> set[str]:
        """Traits that vary within the enumeration."""
        return {*self.tile_traits, *self.fixed, *self.varying, *self.enumeration.derived}

    def _default(self, trait: str) -> TraitValue:
        default = self.traits[trait].default
        return 0 if default is None else default

    @cached_property
    def survivors(self) -> frozenset[tuple[TraitValue, ...]]:
        """What the fallback's curated relation has something for, as values of the traits that the joins share."""
        fallback = self.enumeration.fallback
        if fallback is None:
            return frozenset()
        connection = sqlite3.connect(":memory:")
        try:
            self._make_relations(connection)
            found = f"SELECT {', '.join(fallback.same)} FROM {self._natural_join(fallback.survivors)}"
            return frozenset(connection.execute(found))
        finally:
            connection.close()

    @cached_property
    def _of_tiles(self) -> list[Rule]:
        """The constraints that the join of relations itself applies: those over columns of relations alone."""
        if not self.enumeration.join:
            return []
        joined = frozenset(self.tile_traits)
        return [rule for rule in self.constraints if columns_read(rule.expr, self.operation) <= joined]

    def _join_relations(self, connection: sqlite3.Connection) -> None:
        """Fill the temporary table ``tile`` with the natural join of the relations, filtered by the constraints."""
        names, fallback = self.enumeration.join, self.enumeration.fallback
        self._make_relations(connection)
        columns = ", ".join(self.tile_traits)
        joined = f"SELECT {columns} FROM {self._natural_join(names)}"
        if fallback is not None:
            same = ", ".join(fallback.same)
            survivors = f"SELECT {same} FROM {self._natural_join(fallback.survivors)}"
            others = self._natural_join([name for name in names if name != fallback.relation])
            joined += f" UNION ALL SELECT {columns} FROM (SELECT * FROM {others}) WHERE ({same}) NOT IN ({survivors})"
        connection.execute("DROP TABLE IF EXISTS temp.tile")
        connection.execute(f"CREATE TEMP TABLE tile AS SELECT row_number() OVER () AS seq, {columns} FROM ({joined})")
        for name in names:
            connection.execute(f"DROP TABLE temp.{_table_of(name)}")

    def _make_relations(self, connection: sqlite3.Connection) -> None:
        """Make a temporary table of each relation."""
        for name in self.enumeration.join:
            relation = self.spec.relations[name]
            make_table(connection, _table_of(name), relation.columns, relation.cells())

    def _natural_join(self, names: Sequence[str]) -> str:
        """The subquery that joins relations naturally, filtered by the constraints about their columns alone.

        CROSS JOIN keeps the order of the relations, and SQLite applies each condition as soon as all columns that it
        reads are there. So a rule prunes the join; nothing is filtered after it.
        """
        known: dict[str, str] = {}
        sources, conditions = list[str](), list[str]()
        for number, name in enumerate(names):
            columns = self.spec.relations[name].columns
            renamed = ", ".join(f"{column} AS {column}_{number}" if column in known else column for column in columns)
            sources.append(f"(SELECT {renamed} FROM {_table_of(name)})")
            for column in columns:
                if column in known:
                    conditions.append(f"{column}_{number} IS NULL OR {column}_{number} = {column}")
                known.setdefault(column, name)
        rules = (rule.expr for rule in self._of_tiles if columns_read(rule.expr, self.operation) <= known.keys())
        return f"(SELECT {', '.join(known)} FROM {' CROSS JOIN '.join(sources)} WHERE {_all_of([*rules, *conditions])})"

    def _swept(self, sweep: Sweep) -> list[str]:
        """The traits of a swept tile; the others derive from them."""
        return ["dtype", *(trait for axis in sweep.root for trait in self.operation.axes.get(axis, (axis,)))]

    def _sweep_tiles(self, connection: sqlite3.Connection, sweep: Sweep) -> None:
        """Fill the temporary table ``tile`` with the product of the sweep's axes."""
        joins: list[str] = []
        by_dtype = False
        for axis, values in sweep.root.items():
            traits = self.operation.axes.get(axis, (axis,))
            of_dtypes = [value for value in values if isinstance(value, Axis)]
            if of_dtypes:
                make_table(connection, axis, ["dtype", *traits], (row for each in of_dtypes for row in each.rows()))
            else:
                make_table(connection, axis, traits, ([value] for value in values))
            joins.append(f"{axis} USING (dtype)" if of_dtypes and by_dtype else axis)
            by_dtype = by_dtype or bool(of_dtypes)
        connection.execute("DROP TABLE IF EXISTS temp.tile")
        connection.execute(
            f"CREATE TEMP TABLE tile AS SELECT row_number() OVER () AS seq, {', '.join(self._swept(sweep))} "
            f"FROM {' CROSS JOIN '.join(joins)}"
        )
        for axis in sweep.root:
            connection.execute(f"DROP TABLE temp.{axis}")


def _table_of(relation: str) -> str:
    """The temporary table of a relation."""
    return f'"relation {relation}"'


def make_table(
    connection: sqlite3.Connection, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]
) -> None:
    """Make a temporary table of these untyped columns, filled with ``rows``; a table of the same name is replaced."""
    connection.execute(f"DROP TABLE IF EXISTS temp.{name}")
    connection.execute(f"CREATE TEMP TABLE {name} ({', '.join(columns)})")
    holes = ", ".join("?" * len(columns))
    connection.executemany(f"INSERT INTO temp.{name} VALUES ({holes})", rows)
