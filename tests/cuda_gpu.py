"""What the tests on a real GPU share, make test-cuda: few rows of sm_90, and problems for them.

The rows have every pair of values of two traits that some row has together, and every tile with every trait.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from host_problems import Signature, pairwise_cover, problem_fields

from catalog.backends import why_unavailable
from catalog.ops.attention.fields import Op
from catalog.ops.attention.problem import Problem
from catalog.ops.attention.stages import MAIN_STAGE
from catalog.ops.attention.traits import TRAITS
from catalog.runtime.catalog import Catalog
from catalog.runtime.plan import Plan
from catalog.runtime.tensors import Array
from catalog.runtime.validate import Check, Expected
from catalog.schema.kernel import Kernel

ARCH = "sm_90"
OPS: tuple[Op, ...] = ("fwd", "splitkv", "pagedkv", "batch_prefill", "appendkv", "bwd")
DRAWN = 6
"""Problems of a row with random lengths."""

SEVERAL_TILES: Mapping[Op, dict[str, Any]] = {
    "fwd": {"seqlen_q": 333, "seqlen_k": 457, "seqlens_q": [77, 0, 300], "seqlens_k": [400, 40, 200]},
    "splitkv": {"seqlen_q": 33, "seqlen_k": 1500, "seqlens_q": [3, 0, 70], "seqlens_k": [1500, 40, 700]},
    "pagedkv": {"seqlen_q": 77, "seqlen_k": 457, "seqlens_q": [77, 0, 300]},
    "batch_prefill": {"seqlen_k": 457, "seqlens_q": [77, 0, 300]},
    "appendkv": {"seqlen_q": 33, "seqlen_k": 457, "seqlen_new": 129},
    "bwd": {"seqlen_q": 333, "seqlen_k": 457, "seqlens_q": [77, 0, 300], "seqlens_k": [400, 40, 200]},
}
"""Lengths that no tile divides, of batch and group mode."""

PARTS: Mapping[Op, int] = {"fwd": 4, "splitkv": 2, "pagedkv": 1, "batch_prefill": 1, "appendkv": 1, "bwd": 2}
RUNS = [(op, number) for op in OPS for number in range(PARTS[op])]
"""Operations, and parts of their rows that are a test each."""


def many_heads(hdim: int) -> dict[str, int]:
    """Sizes of a backward with so much of dQ that blocks clear it for later heads: bwd_clear_ahead.hpp."""
    heads = {"nhead_q": 4096 // hdim, "nhead_k": 2048 // hdim}
    return {"batch": 8, **heads, "seqlen_q": 400, "seqlen_k": 700, "hdim_q": hdim}


def need_gpu() -> None:
    """Skip the module where there is none."""
    reason = why_unavailable(ARCH)
    if reason is not None:
        pytest.skip(reason, allow_module_level=True)


@dataclass(frozen=True)
class Row:
    """A kernel of an operation's main stage."""

    op: Op
    kernel: Kernel

    def fields(self, seed: int) -> dict[str, Any]:
        """Fields of a random problem that the kernel answers."""
        pick = random.Random(f"{self.kernel.id} {seed}")  # noqa: S311
        return problem_fields(Signature(self.op, self.kernel.to_row()), lambda *values: pick.choice(values))

    def drawn(self) -> list[Problem]:
        """Random problems."""
        return [Problem(**self.fields(seed)) for seed in range(DRAWN)]

    def of_sizes(self, sizes: Mapping[str, Any]) -> Problem:
        """A random problem, but with those of these sizes that such a problem has."""
        fields = self.fields(DRAWN)
        return Problem(**fields | {name: size for name, size in sizes.items() if name in fields})

    def problems(self) -> list[Problem]:
        """Random problems, and one of several tiles."""
        return [*self.drawn(), self.of_sizes(SEVERAL_TILES[self.op])]


def rows(catalog: Catalog, op: Op) -> list[Row]:
    """The rows of an operation that the tests run."""
    signature = [name for name, trait in TRAITS.items() if trait.group == "signature" and name != "family"]
    tile = " || ' ' || ".join(name for name, trait in TRAITS.items() if trait.group == "algorithm")
    of_family = catalog.connection.execute(
        f"SELECT {', '.join(signature)}, {tile}, id FROM attention_row WHERE family = ? AND arch = ?",
        (MAIN_STAGE[op].value, ARCH),
    ).fetchall()
    ids = {tuple(row)[:-1]: row["id"] for row in of_family}
    listed = ", ".join(f"'{ids[traits]}'" for traits in pairwise_cover(sorted(ids)))
    return [Row(op, kernel) for kernel in catalog.kernels(f"id IN ({listed})", arch=ARCH, limit=1000)]


def part(rows: Sequence[Row], number: int) -> Sequence[Row]:
    """The rows of one of an operation's :data:`RUNS`."""
    return rows[number :: PARTS[rows[0].op]]


def build(catalog: Catalog, kernels: Iterable[Kernel]) -> None:
    report = catalog.builder.build_many({kernel.id: kernel for kernel in kernels}.values())
    assert not report.failures, report.failures[0]


def wrong(plan: Plan, inputs: Mapping[str, Array]) -> list[Check]:
    """The outputs of a run that are not what the reference computes, with their errors."""
    expected = Expected(plan.problem, inputs, ARCH)
    return [check for check in expected.check(expected.run(plan)) if not check.passed]
