"""Table ``rule``: every expression of a spec as a row, with its reason and source."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Any

from catalog.errors import UsageError
from catalog.messages import did_you_mean
from catalog.schema.arch_spec import ArchSpec
from catalog.schema.name_parts import sql_literal

KINDS = ("variant", "constraint", "fallback", "receipt", "hardware", "headers", "invariant", "applicability", "order")
"""The kinds of rules, in the order of the listing."""

COLUMNS = ("arch", "revision", "space", "id", "kind", "scope", "expr", "reason", "source", "quirk")
"""The columns of the listing."""


def read_kind(text: str) -> str:
    """``text`` when it is one of :data:`KINDS`.

    Raises:
        UsageError: it is not.
    """
    if text not in KINDS:
        raise UsageError(
            f"no rule has the kind {text!r}{did_you_mean(text, KINDS)}", hint=f"Kinds: {', '.join(KINDS)}."
        )
    return text


def list_rules(
    connection: sqlite3.Connection, spec: ArchSpec, *, family: str | None = None, kind: str | None = None
) -> list[list[Any]]:
    """The rules of a populated arch as rows of :data:`COLUMNS`, optionally only those of one family or one kind.

    A rule applies to a family if its scope is the family, an enumeration that makes kernels of it, or everything; the
    scope of a rule of kind headers is the revisions of the headers, empty for a row's own.
    """
    rows = connection.execute(
        f"SELECT {', '.join(COLUMNS)} FROM rule WHERE operation = ? AND arch = ? AND revision = ? AND space = ? "
        "ORDER BY scope, position, id",
        (spec.operation, spec.arch, spec.revision, spec.space),
    )
    scopes = None if family is None else {"", family, *spec.yields_of(family)}
    about_it = (row for row in rows if scopes is None or row["scope"] in scopes or row["kind"] == "headers")
    wanted = [row for row in about_it if kind in (None, row["kind"])]
    return [list(row) for row in sorted(wanted, key=lambda row: KINDS.index(row["kind"]))]


def rules_of(spec: ArchSpec) -> Iterator[dict[str, Any]]:
    """Every expression of the spec as a row of table ``rule``."""
    base = {"operation": spec.operation, "arch": spec.arch, "revision": spec.revision, "space": spec.space}

    def row(kind: str, scope: str, position: int, rule: dict[str, Any]) -> dict[str, Any]:
        return base | {"kind": kind, "scope": scope, "position": position, "quirk": None} | rule

    for scope, enumeration in spec.enumerations.items():
        source = enumeration.source or ""
        for i, variant in enumerate(enumeration.variants):
            dtypes = ", ".join(sql_literal(dtype) for dtype in variant.dtype)
            yield row("variant", scope, i, {
                "id": variant.id, "expr": f"dtype IN ({dtypes})" + (f" AND ({variant.when})" if variant.when else ""),
                "reason": "the combinations that this pipeline variant is generated for", "source": source,
                "quirk": variant.quirk,
            })  # fmt: skip
        for i, rule in enumerate(spec.constraints_of(scope)):
            yield row("constraint", scope, i, rule.model_dump(exclude={"spaces", "enumerations"}))
        if enumeration.fallback is not None:
            fallback = enumeration.fallback
            yield row("fallback", scope, 0, {
                "id": fallback.id, "expr": fallback.expr, "reason": fallback.reason, "source": fallback.source,
                "quirk": fallback.quirk,
            })  # fmt: skip
        about = {receipt.receipt: receipt for receipt in spec.receipts}
        for i, (receipt, expr) in enumerate(enumeration.receipts.items()):
            yield row("receipt", scope, i, {
                "id": str(receipt), "expr": expr, "reason": about[receipt].about, "source": source,
                "quirk": enumeration.receipt_quirks.get(receipt),
            })  # fmt: skip
    for i, rule in enumerate(spec.hw_rules):
        yield row("hardware", "", i, rule.model_dump(exclude={"spaces"}))
    for i, rule in enumerate(spec.demands):
        yield row("headers", " ".join(rule.headers), i, rule.model_dump(exclude={"spaces", "headers"}))
    for i, invariant in enumerate(spec.invariants):
        for scope in invariant.families or [""]:
            yield row("invariant", scope, i, invariant.model_dump(exclude={"spaces", "families"}))
    for family in spec.select:
        for i, rule in enumerate(spec.applicability_of(family)):
            yield row("applicability", family, i, rule.model_dump(exclude={"spaces"}))
        for i, expr in enumerate(spec.order_of(family)):
            yield row("order", family, i, {
                "id": f"order_{i}", "expr": expr, "reason": "static order of the applicable kernels", "source": "",
            })  # fmt: skip
