"""Which convolutions the pipelines of sm_90 can compute: how far TMA reaches, and what shared memory holds.

Source: CUDA driver API, cuTensorMapEncodeIm2col (corners of the box of positions, element strides); PTX ISA,
cp.async.bulk.tensor (offsets).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from catalog.ops.conv.problem import ConvProblem

_CORNER = {1: 1 << 15, 2: 1 << 7, 3: 1 << 4}
"""By the number of spatial axes: corners go from minus this number to this number - 1, offsets to twice this - 1."""

_STEP = 8
"""Largest distance of neighbouring positions."""

_WIDTHS = (1, 2, 4, 8, 16, 32)
"""Channels of a group that pipeline sm90_narrow computes."""

_SHARED = 200 * 1024
"""Bytes of shared memory of a block of sm90_narrow: ``narrow_bytes`` in narrow_call.hpp."""


class _Window(NamedTuple):
    """Positions along an axis that meet the same elements of the filter, in the image that is read."""

    extent: int
    lowest: int
    step: int
    positions: int
    taps: int
    apart: int


def reachable(problem: ConvProblem) -> bool:
    """Whether all corners, offsets and steps of a problem are within what a tensor map can state."""
    corner = _CORNER[problem.ndim]
    return all(
        -corner <= of.lowest
        and -corner <= of.lowest + of.step * (of.positions - 1) - of.extent + 1 < corner
        and of.lowest < corner
        and of.apart * (of.taps - 1) < 2 * corner
        and of.step <= _STEP
        for axis in range(problem.ndim)
        for of in _windows(problem, axis)
    )


def narrow(problem: ConvProblem) -> bool:
    """Whether groups are narrow, and shared memory holds what a run of 16 positions meets: ``fit()`` of
    narrow_launch.hpp.
    """
    width = problem.channels_in
    if problem.ndim > 2 or problem.g == 1 or problem.c != problem.k or width not in _WIDTHS or problem.taps > 1024:
        return False
    of_axes = [list(_windows(problem, axis)) for axis in range(problem.ndim)]
    met = [
        max(((place == problem.ndim - 1) * 15 * of.step + (of.taps - 1) * of.apart + 1 for of in axis), default=16)
        for place, axis in enumerate(of_axes)
    ]
    loaded = math.prod(met[:-1]) * -(-met[-1] // 8) * 8 * 128
    pairs = -(-problem.taps * max(1, width // 8) // 2)
    more = 16 * 128 + pairs * 512 * 8 if problem.direction == "bwd_weight" else 4 * problem.taps * width * 64
    return loaded + more <= _SHARED


def _windows(problem: ConvProblem, axis: int) -> Iterator[_Window]:
    size, out, taps, pad = (values[axis] for values in (problem.size, problem.out, problem.filter, problem.pad))
    stride, dilation = problem.stride[axis], problem.dilation[axis]
    if problem.direction != "bwd_data":
        yield _Window(size, -pad, stride, out, taps, dilation)
        return
    period = stride // math.gcd(stride, dilation)
    for first in range(min(stride, size)):
        met = [tap for tap in range(min(period, taps)) if (first + pad - dilation * tap) % stride == 0]
        if met:
            number, apart = (taps - met[0] + period - 1) // period, dilation * period // stride
            origin = (first + pad - dilation * met[0]) // stride
            yield _Window(out, origin - (number - 1) * apart, 1, (size - first + stride - 1) // stride, number, apart)
