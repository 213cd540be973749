"""Smaller problems with the same traits, for the first run of a library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from catalog.ops.extents import shortened
from catalog.ops.gemm.problem import GemmProblem


def _small_batch(problem: GemmProblem, _: int) -> dict[str, Any]:
    return {} if problem.batch is None else {"batch": min(problem.batch, 2)}


_GROUPS = 8
"""Maximum number of groups."""


def _short(size: str) -> Callable[[GemmProblem, int], dict[str, Any]]:
    def shorter(problem: GemmProblem, length: int) -> dict[str, Any]:
        if problem.groups is None or problem.group_axis != size:
            return {size: shortened(getattr(problem, size), length)}
        groups = [shortened(extent, length) for extent in sorted(problem.groups)[-_GROUPS:]]
        return {"groups": groups, size: sum(groups)}

    return shorter


SHRINKS: tuple[Callable[[GemmProblem, int], Mapping[str, Any]], ...] = (_small_batch, *map(_short, ("m", "n", "k")))
"""Applied in this order: two products of a batch, few rows, few columns, a short depth. Each takes a problem and a
length, and returns fields of a smaller problem.
"""
