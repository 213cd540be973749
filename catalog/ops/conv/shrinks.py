"""Smaller problems with the same traits, for the first run of a library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from catalog.ops.conv.problem import ConvProblem
from catalog.ops.extents import shortened

_IMAGES = 2
"""Maximum number of images."""

_EXTENT = 64
"""Spatial extents become this plus what they are modulo this, or more if the filter needs more."""

_CHANNELS = 128
"""The same for the channels of a group."""


def _few_images(problem: ConvProblem, _: int) -> dict[str, Any]:
    return {"n": min(problem.n, _IMAGES)}


def _small_images(problem: ConvProblem, _: int) -> dict[str, Any]:
    axes = zip(problem.size, problem.filter, problem.dilation, strict=True)
    return {"size": [shortened(extent, max(_EXTENT, apart * (reach - 1) + 1)) for extent, reach, apart in axes]}


def _few_channels(problem: ConvProblem, _: int) -> dict[str, Any]:
    return {
        "c": problem.g * shortened(problem.channels_in, _CHANNELS),
        "k": problem.g * shortened(problem.channels_out, _CHANNELS),
    }


SHRINKS: tuple[Callable[[ConvProblem, int], Mapping[str, Any]], ...] = (_few_images, _small_images, _few_channels)
"""Applied in this order. Each takes a problem and a length, which convolutions have no use for, and returns fields of a
smaller problem.
"""
