"""Smaller problems with the same traits, for the first run of a library."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from catalog.ops.attention.problem import Problem
from catalog.ops.extents import shortened

_FEW_SPLITS = 8
"""Number of splits in a first run of a problem that states more."""


def _one_sequence(problem: Problem, _: int) -> dict[str, Any]:
    if problem.seqlens_q is None:
        return {"batch": min(problem.batch, 1), **_fitting_pages(problem)}
    q, k = max(problem.sequences, key=math.prod, default=(0, 0))
    return _packed(problem, q, k) | _fitting_pages(problem)


def _one_group(problem: Problem, _: int) -> dict[str, Any]:
    return {"nhead_q": problem.ratio, "nhead_k": 1}


def _no_spare_pages(problem: Problem, _: int) -> dict[str, Any]:
    return _fitting_pages(problem)


def _few_splits(problem: Problem, _: int) -> dict[str, Any]:
    return {"num_splits": min(problem.num_splits, _FEW_SPLITS)}


def _short_sequences(problem: Problem, length: int) -> dict[str, Any]:
    q, k = shortened(problem.seqlen_q, length), shortened(problem.seqlen_k, length)
    if problem.seqlens_q is not None:
        return _packed(problem, q, k) | _fitting_pages(problem)
    new = {} if problem.seqlen_new is None else {"seqlen_new": shortened(problem.seqlen_new, length)}
    return {"seqlen_q": q, "seqlen_k": k, **new, **_fitting_pages(problem)}


def _two_heads(problem: Problem, _: int) -> dict[str, Any]:
    return {"nhead_q": min(problem.nhead_q, 2 * problem.nhead_k)}


def _packed(problem: Problem, q: int, k: int) -> dict[str, Any]:
    """One packed sequence; for a paged one, seqlen_k is the room in the page table."""
    keys = {} if problem.seqlens_k is None else {"seqlens_k": (k,)}
    return {"seqlens_q": (q,), "seqlen_q": q, "seqlen_k": k, "batch": 1, **keys}


def _fitting_pages(problem: Problem) -> dict[str, Any]:
    """As many pages as the sequences fill, which is the default."""
    return {"num_pages": None} if problem.paged else {}


SHRINKS: tuple[Callable[[Problem, int], Mapping[str, Any]], ...] = (
    _one_sequence,
    _one_group,
    _no_spare_pages,
    _few_splits,
    _short_sequences,
    _two_heads,
)
"""Applied in this order: one sequence, the longest; one group of heads; a cache without spare pages; few splits;
shortened sequences; two query heads of a group. Each takes a problem and a length, and returns fields of a smaller
problem.
"""
