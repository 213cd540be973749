"""What rules of sm_90 ask about a convolution: how far TMA reaches, what shared memory holds, what a launch counts.

Source: CUDA driver API, cuTensorMapEncodeIm2col (corners of the box of positions, element strides); PTX ISA,
cp.async.bulk.tensor (offsets).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from catalog.ops.conv.problem import ConvProblem

_CORNER = {1: 1 << 15, 2: 1 << 7, 3: 1 << 4}
"""By the number of spatial axes: corners go from minus this number to this number - 1, offsets to twice this - 1."""

_STEP = 8
"""Largest distance of neighbouring positions."""

_WIDTHS = (1, 2, 4, 8, 16, 32)
"""Channels of a group that pipeline sm90_narrow computes."""

_SHARED = 224 * 1024
"""Bytes of shared memory of a block of sm90_narrow: ``narrow_bytes`` in narrow_call.hpp."""

_BOX = 256
"""Most positions along an axis of a box that TMA loads: ``narrow_box`` in narrow_patches_launch.hpp, ``longest`` in
halo_shape.hpp.
"""

_LINE = 8
"""Shortest line of a patch, unless the images' are shorter: ``shortest`` in halo_shape.hpp."""

_PHASES = 8
"""Most phases of a gradient of the input that sm90_halo computes, each in a launch."""

_PATCHES = {"small_patches": (128, 232), "large_patches": (256, 384)}
"""Rows of a tile of sm90_halo, with two wave groups or one, and of a patch with its halo: ``patch_rows`` in
halo_shape.hpp.
"""

_BLOCK = 64
"""Channels of a step of sm90_wgmma: ``block_channels`` in conv_shape.hpp."""


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
    """Whether groups are narrow, and shared memory holds what a run of 16 positions meets: ``choose_patch()`` of
    narrow_patches_launch.hpp.
    """
    width = problem.channels_in
    if problem.ndim > 2 or problem.g == 1 or problem.c != problem.k or width not in _WIDTHS or problem.taps > 1024:
        return False
    of_axes = [list(_windows(problem, axis)) for axis in range(problem.ndim)]
    met = [
        max(((place == problem.ndim - 1) * 15 * of.step + (of.taps - 1) * of.apart + 1 for of in axis), default=16)
        for place, axis in enumerate(of_axes)
    ]
    boxes = -(-met[-1] // _BOX)
    loaded = math.prod(met[:-1]) * boxes * -(-met[-1] // (8 * boxes)) * 8 * 128
    if problem.direction != "bwd_weight":
        return loaded <= _SHARED
    items = problem.taps * max(1, width // 8)
    return loaded + 16 * 128 + -(-items // 2) * 512 * 8 + 4 * items <= _SHARED


def patches(most: int, with_halo: int, problem: ConvProblem) -> int:
    """Patches of positions that sm90_halo computes in all phases, 0 where it cannot."""
    if problem.g > 1 or problem.direction == "bwd_weight" or math.prod(problem.stride) > _PHASES:
        return 0
    along = [list(_positions_and_halo(problem, axis)) for axis in range(problem.ndim)]
    counts = [_patches_of_phase(most, with_halo, [(1, 0), *phase]) for phase in product(*along)]
    return sum(counts) * problem.n if all(counts) else 0


def _positions_and_halo(problem: ConvProblem, axis: int) -> Iterator[tuple[int, int]]:
    """Of each phase, the positions along an axis and how far the filter reaches beyond; nothing without neighbours."""
    size, out, taps, pad = (values[axis] for values in (problem.size, problem.out, problem.filter, problem.pad))
    stride, dilation = problem.stride[axis], problem.dilation[axis]
    if stride == 1:
        yield size if problem.direction == "bwd_data" else out, (taps - 1) * dilation
    elif problem.direction == "bwd_data" and math.gcd(stride, dilation) == 1:
        for tap in range(stride):
            first, number = (dilation * tap - pad) % stride, (taps - tap + stride - 1) // stride
            if first < size:
                yield (size - first + stride - 1) // stride if number > 0 else 0, (number - 1) * dilation


def _patches_of_phase(most: int, with_halo: int, along: Sequence[tuple[int, int]]) -> int:
    """Patches of an image: ``choose_patch()`` of halo_shape.hpp."""
    *planes, (height, above), (width, beyond) = along
    fewest = 0
    for lines in range(1, min(height, _BOX - above) + 1):
        line = min((most + beyond) // lines, with_halo // (lines + above), _BOX) - beyond
        if line < min(_LINE, width):
            break
        fewest = min(fewest or width * height, -(-width // line) * -(-height // lines))
    return fewest * math.prod(positions for positions, _ in planes)


def phase_taps(problem: ConvProblem) -> int:
    """Elements of the filter that a phase meets at most."""
    if problem.direction != "bwd_data":
        return problem.taps
    return math.prod(-(-taps // stride) for taps, stride in zip(problem.filter, problem.stride, strict=True))


def gathered_taps(problem: ConvProblem) -> int:
    """Elements of the filter at which sm90_wgmma gathers images: of few channels, only one in each row."""
    return problem.taps // problem.filter[-1] if _few(problem) else problem.taps


def positions(problem: ConvProblem) -> int:
    """Positions of all images, of the input or the output, whichever has more."""
    size = (*problem.size[:-1], problem.out[-1]) if _few(problem) else problem.size
    return problem.n * max(math.prod(size), math.prod(problem.out))


def phase_rows(problem: ConvProblem) -> int:
    """Rows of the product of the largest phase."""
    if problem.direction != "bwd_data":
        return problem.rows
    return problem.n * math.prod(-(-size // stride) for size, stride in zip(problem.size, problem.stride, strict=True))


def _few(problem: ConvProblem) -> bool:
    """Whether sm90_wgmma reads a copy of the images with a row of the filter in each position: conv_few.hpp."""
    width = problem.filter[-1]
    return problem.g == 1 and problem.direction != "bwd_data" and width > 1 and width * problem.c <= _BLOCK


def _windows(problem: ConvProblem, axis: int) -> Iterator[_Window]:
    """The positions along an axis; of the gradient of an input, those of its phases that differ most from others."""
    size, out, taps, pad = (values[axis] for values in (problem.size, problem.out, problem.filter, problem.pad))
    stride, dilation = problem.stride[axis], problem.dilation[axis]
    if problem.direction != "bwd_data":
        yield _Window(size, -pad, stride, out, taps, dilation)
        return
    # Each of the first taps meets one phase: every stride-th position from `first` on, which read neighbours in the
    # output from `origin` on. From tap to tap, `origin` never ascends; among taps with the same one, `first` ascends.
    period = stride // math.gcd(stride, dilation)
    apart, end = dilation * period // stride, min(period, taps)
    tap = 0
    while tap < end:
        origin = (pad - dilation * tap + stride - 1) // stride
        after = min(end, -(-(pad + stride * (1 - origin)) // dilation))
        met = min(after, -(-(pad + size - stride * origin) // dilation))  # beyond, `first` is outside of the image
        fewer = min(max(tap, taps % period), met)  # taps from here on have one fewer of the same phase
        for one in sorted({tap, fewer - 1, fewer, met - 1}):
            if tap <= one < met:
                first, number = dilation * one - pad + stride * origin, (taps - one + period - 1) // period
                count = (size - first + stride - 1) // stride
                yield _Window(out, origin - (number - 1) * apart, 1, count, number, apart)
        tap = after


REACH: Mapping[str, Callable[[ConvProblem], Any]] = MappingProxyType(
    {
        "gathered_taps": gathered_taps,
        "positions": positions,
        "phase_rows": phase_rows,
        "phase_taps": phase_taps,
        "gathers": reachable,
        **{name: partial(patches, *rows) for name, rows in _PATCHES.items()},
        "narrow": narrow,
    }
)
"""The parameters of rules that sm_90 alone names, by name."""
