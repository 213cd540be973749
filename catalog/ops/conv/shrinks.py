"""Smaller problems with the same traits, for the first run of a library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from catalog.ops.conv.problem import ConvProblem


def _few_images(problem: ConvProblem, _: int) -> dict[str, Any]:
    return {"n": min(problem.n, 2)}


def _small_images(problem: ConvProblem, length: int) -> dict[str, Any]:
    reaches = zip(problem.filter, problem.dilation, strict=True)
    least = [dilation * (extent - 1) + 1 for extent, dilation in reaches]
    pairs = zip(problem.size, least, strict=True)
    return {"size": [min(extent, max(reach, length // 8 + extent % 8)) for extent, reach in pairs]}


def _few_channels(size: str) -> Callable[[ConvProblem, int], dict[str, Any]]:
    def fewer(problem: ConvProblem, length: int) -> dict[str, Any]:
        of_group = getattr(problem, size) // problem.g
        return {size: problem.g * (of_group if of_group < 2 * length else length + of_group % length)}

    return fewer


SHRINKS: tuple[Callable[[ConvProblem, int], Mapping[str, Any]], ...] = (
    _few_images,
    _small_images,
    *map(_few_channels, ("c", "k")),
)
"""Applied in this order: two images, small ones, few channels of a group. Each takes a problem and a length, and
returns fields of a smaller problem.
"""
