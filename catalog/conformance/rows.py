"""Checks that need no compiler: the spec is valid, every row survives a round trip, every rule has an effect."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from catalog.conformance.findings import Finding, Verdict, failed, passed
from catalog.errors import CatalogError
from catalog.ops import operation
from catalog.ops.protocol import Operation
from catalog.registry.views import rows_of
from catalog.rules.enumeration import Join
from catalog.runtime.catalog import Catalog
from catalog.schema.arch_spec import ArchSpec, Rule
from catalog.schema.expressions import DEVICE_PARAMETERS, columns_read
from catalog.schema.lineage import of_lineage
from catalog.schema.name_parts import sql_literal
from catalog.schema.spec_files import own_content


def spec_findings(spec: ArchSpec, path: Path) -> Iterator[Finding]:
    """Checks beyond loading: the arch is named like its file, and every family with kernels can be selected."""
    arch = str(spec.arch)
    if spec.arch != path.stem:
        yield failed("spec", arch, f"{path}: arch: {arch!r} differs from the file's name, {path.stem!r}")
    if spec.hardware is None:
        yield failed("spec", arch, f"{path}: hardware: missing; vendor and isa are required")
    if not spec.families:
        yield failed("spec", arch, f"{path}: enumerations: none of them yields a family")
    for family in spec.families:
        if family not in spec.select:
            yield failed("spec", family, f"{path}: select.{family}: missing, so that no problem finds it")
    yield passed("spec", arch, f"{path.name}: {len(spec.enumerations)} enumerations, {len(spec.families)} families")


def row_findings(catalog: Catalog, spec: ArchSpec, variant: str) -> Iterator[Finding]:
    """Check each row of a variant: its id and its name survive a round trip.

    Raises:
        CatalogError: as :meth:`Catalog.populate`.
    """
    lineage, of = spec.lineage(variant), operation(spec.operation)
    of_variant = of.about_variant(variant)
    populated = catalog.populate(**lineage.wanted.keywords, operation=of.name)
    for family in spec.families:
        rows = populated.families.get(family, 0)
        found = passed if rows else failed
        yield found("rows", family, f"{rows:,} rows{of_variant}")
    connection = catalog.connection
    of = operation(lineage.operation)
    sharing = [family for family in spec.families if of.kernel.naming(family, lineage).hidden]
    twice = connection.execute(
        f"SELECT name, count(*) FROM kernel WHERE {of_lineage()} "
        f"AND family NOT IN ({', '.join(map(sql_literal, sharing))}) GROUP BY name HAVING count(*) > 1",
        lineage.parameters,
    ).fetchall()
    about = f"{len(twice)} names of several rows, such as {twice[0][0]}{of_variant}" if twice else variant
    yield (failed if twice else passed)("names unique", str(spec.arch), about)
    columns = (*of.traits.identity, *of.traits)
    wrong: dict[str, tuple[int, str]] = {}
    count = 0
    for id, name, *values in connection.execute(
        f"SELECT id, name, {', '.join(columns)} FROM {rows_of(lineage.operation)} WHERE {of_lineage()}",
        lineage.parameters,
    ):
        count += 1
        for check, reason in _misfits(id, name, dict(zip(columns, values, strict=True)), of):
            wrong[check] = (wrong.get(check, (0, reason))[0] + 1, wrong.get(check, (0, reason))[1])
    for check in ("ids round trip", "names round trip"):
        if check in wrong:
            number, example = wrong[check]
            yield failed(check, str(spec.arch), f"{number:,} rows, such as {example}{of_variant}")
        else:
            yield passed(check, str(spec.arch), f"{count:,} rows{of_variant}")


def _misfits(id: str, name: str, written: Mapping[str, Any], of: Operation) -> Iterator[tuple[str, str]]:
    """The checks that a row fails: what is lost when it is read and written again."""
    try:
        kernel = of.kernel.from_row(written)
    except ValidationError as error:
        first = error.errors()[0]
        yield "ids round trip", f"{name}: {first['loc'][-1]}: {first['msg']}"
        return
    again, grammar = kernel.to_row(), of.kernel.naming(kernel.family, kernel.lineage)
    if kernel.id != id or again != written:
        yield "ids round trip", f"{name}: id {id}, as a model {kernel.id}"
    if (renamed := grammar.name(again)) != name:
        yield "names round trip", f"{name}, as a model {renamed}"
        return
    parsed = grammar.parse(name)
    if parsed is None:
        yield "names round trip", f"{name}: read as none"
        return
    lost = [column for column in ("target", *of.traits) if parsed[column] != written[column]]
    if lost := [column for column in lost if column not in grammar.hidden]:
        yield "names round trip", f"{name}: read as another {', '.join(lost)}"


def rule_findings(catalog: Catalog, spec: ArchSpec, variant: str, path: Path) -> Iterator[Finding]:
    """Check that every constraint rejects something, every variant yields something, and every rule is about kernels.

    A rule without effect is a failure if the arch's own file states it, and a note if it comes from a base.

    Raises:
        SpecError: an expression cannot be evaluated.
    """
    own, about = _own_ids(path), operation(spec.operation).about_variant(variant)
    for name, enumeration in spec.enumerations.items():
        if enumeration.sweep is not None or enumeration.join:
            continue
        idle, barren = _without_work(catalog.connection, spec, name, variant)
        for what, ids, reason in (
            ("constraint", idle, "rejects nothing"),
            ("variant", barren, "yields nothing: every combination is rejected, or its dtype has no tiles"),
        ):
            for rule_id in ids:
                is_own = (name, rule_id) in own
                verdict = Verdict.FAILED if is_own else Verdict.NOTED
                whose = f"stated in {path.name}" if is_own else "stated in a base, for other archs"
                yield Finding(f"{what} reachable", f"{name}: {rule_id}", verdict, f"{reason}{about}; {whose}")
        constraints, variants = len(enumeration.constraints) - len(idle), len(enumeration.variants) - len(barren)
        yield passed("rules reachable", name, f"{constraints} constraints reject, {variants} variants yield{about}")


def naming_findings(spec: ArchSpec) -> Iterator[Finding]:
    """Check that every rule names a column of the kernels, else it holds for all or none.

    Only a selection rule may depend on the problem alone.
    """
    rules: list[tuple[str, Rule]] = [("hw_rules", rule) for rule in spec.hw_rules]
    rules += [("header_rules", rule) for rule in spec.demands]
    rules += [("invariants", rule) for rule in spec.invariants]
    rules += [(f"select.{family}", rule) for family in spec.select for rule in spec.applicability_of(family)]
    of = operation(spec.operation)
    for scope, rule in rules:
        asks = scope.startswith("select.") and any(
            f":{name}" in rule.expr for name in (*of.parameters, *DEVICE_PARAMETERS)
        )
        if not columns_read(rule.expr, of) and not asks:
            yield failed("rules name columns", f"{scope}: {rule.id}", f"{rule.expr!r} names no column of the kernels")
    orders = [(family, expr) for family in spec.select for expr in spec.order_of(family)]
    for family, expr in orders:
        if not columns_read(expr, of):
            yield failed("rules name columns", f"select.{family}.order", f"{expr!r} names no column of the kernels")
    yield passed("rules name columns", str(spec.arch), f"{len(rules)} rules, {len(orders)} orders")


def _own_ids(path: Path) -> set[tuple[str, str]]:
    """(enumeration, id) of the constraints and variants that the file itself states."""
    return {
        (name, rule["id"])
        for name, enumeration in own_content(path).get("enumerations", {}).items()
        for kind in ("constraints", "variants")
        for rule in enumeration.get(kind, ())
    }


def _without_work(
    connection: sqlite3.Connection, spec: ArchSpec, name: str, variant: str
) -> tuple[list[str], list[str]]:
    """The ids of the constraints that reject nothing, and of the variants that yield nothing."""
    enumeration = spec.enumerations[name]
    without = {**spec.enumerations, name: enumeration.model_copy(update={"constraints": []})}
    free = Join(spec.model_copy(update={"enumerations": without}), name, spec.lineage(variant))
    try:
        free.fill(connection)
        connection.execute("DROP TABLE IF EXISTS temp.combination")
        connection.execute(free.combine_sql(spec.receipt_numbers))
        idle = [
            rule.id
            for rule in enumeration.constraints
            if connection.execute(f"SELECT 1 FROM combination WHERE NOT ({rule.expr}) LIMIT 1").fetchone() is None
        ]
        kept = " AND ".join(f"({rule.expr})" for rule in enumeration.constraints) or "1"
        yielding = {
            place for (place,) in connection.execute(f"SELECT DISTINCT variant_seq FROM combination WHERE {kept}")
        }
        connection.execute("DROP TABLE temp.combination")
    except sqlite3.Error as error:
        raise CatalogError(f"enumerations.{name}: {error}") from None
    return idle, [variant.id for place, variant in enumerate(enumeration.variants) if place not in yielding]
