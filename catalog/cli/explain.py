"""``catalog explain``: the answer, the kernels and the rules' verdicts for people; one table for programs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from catalog.cli.rows_out import Format, write_rows
from catalog.errors import UsageError
from catalog.ops import operation
from catalog.ops.attention.problem import Problem
from catalog.ops.attention.stages import STAGES
from catalog.runtime.catalog import Catalog
from catalog.schema.trait_text import read_traits

FINDINGS = ("kind", "id", "verdict", "traits", "reason", "source", "quirk")
MATCHES = ("changes", "kernels", "receipts", "name", "id")
STEPS = ("stage", "kind", "id", "rejects", "left", "reason", "source")
KEPT = ("stage", "rank", "median_ms", "name", "id")

Rows = Sequence[Sequence[Any]]


def explain(catalog: Catalog, words: Sequence[str], fields: Mapping[str, Any], form: Format, **where: Any) -> None:
    """Explain the kernel of traits that ``words`` state, or the selection for the problem of ``fields``.

    ``where`` goes to :meth:`Catalog.explain` or :meth:`Catalog.narrowing`: arch, revision, mask_impl, limit.

    Raises:
        UsageError: both are stated, or none; or a word or field is wrong.
        CatalogError: as the catalog's methods.
    """
    if bool(words) == bool(fields):
        stated = "both traits and options of a problem are stated" if words else "there is nothing to explain"
        raise UsageError(
            stated,
            hint="State a kernel (catalog explain family=fwd hdim_q=128) or a problem (catalog explain --batch 1 ...).",
        )
    if words:
        _explain_traits(catalog, words, form, where)
    else:
        _explain_problem(catalog, Problem(**fields), form, where)


def _explain_traits(catalog: Catalog, words: Sequence[str], form: Format, where: Mapping[str, Any]) -> None:
    explained = catalog.explain(read_traits(words, operation().traits), **where)
    findings = [
        (f.kind, f.id, f.verdict.value, " ".join(f.traits), f.reason, f.source, f.quirk) for f in explained.findings
    ]
    matches = [(" ".join(m.changes), m.kernels, m.receipts, m.name, m.id) for m in explained.matches]
    nearest = "" if explained.kernels or not matches else "\nThe nearest kernels, and what to change for them:"
    _print(explained.summary + nearest, (FINDINGS, findings), (MATCHES, matches), form)


def _explain_problem(catalog: Catalog, problem: Problem, form: Format, where: Mapping[str, Any]) -> None:
    stages = [(family, *catalog.narrowing(problem, family=family, **where)) for family in STAGES[problem.op]]
    steps = [
        (family, step.kind, step.id, step.rejects, step.left, step.reason, step.source)
        for family, narrowed, _ in stages
        for step in narrowed
    ]
    kept = [
        (family, rank, c.median_ms, c.kernel.name, c.kernel.id)
        for family, _, candidates in stages
        for rank, c in enumerate(candidates, start=1)
    ]
    counts = ", ".join(f"{narrowed[-1].left:,} {family}" for family, narrowed, _ in stages)
    summary = f"{counts} kernels answer the problem" + ("; the best, in order:" if kept else ".")
    _print(summary, (STEPS, steps), (KEPT, kept), form)


def _print(summary: str, rules: tuple[Sequence[str], Rows], kernels: tuple[Sequence[str], Rows], form: Format) -> None:
    """Print the answer, the kernels, then the rules; other formats have one table, with kernels of kind kernel last."""
    if form is Format.TABLE:
        print(summary)
        for table in (kernels, rules):
            if table[1]:
                print(flush=True)
                write_rows(*table, form, sys.stdout)
        return
    columns = list(dict.fromkeys((*rules[0], *kernels[0])))
    rows = [dict(zip(rules[0], row, strict=True)) for row in rules[1]]
    rows += [{"kind": "kernel", **dict(zip(kernels[0], row, strict=True))} for row in kernels[1]]
    write_rows(columns, [[row.get(column) for column in columns] for row in rows], form, sys.stdout)
