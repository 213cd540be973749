"""What a convolution problem computes, in float64, and how far from that a correct kernel may be.

With u = 2^-24, the unit roundoff of float32, to first order in u:

- A sum of k products is off by at most ``4 sqrt(k) u`` times the sum of their absolute values, in any order of
  summation: Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis" (2019), with lambda = 4.
- Factors and sums below 2^-126, the smallest normal float32, may be taken for zero, as AVX512-BF16 does.
- The result is rounded once to its type. Sums of int8 products are exact.
- Minimal filtering, F(2 x 2, 3 x 3), multiplies sums, and adds up the products of all channels. Along each axis, a
  factor of an image is rounded once, one of a weight twice, and a result twice. All errors are relative to what the
  transforms make of absolute values with absolute coefficients. The coefficients are those of Lavin and Gray, "Fast
  Algorithms for Convolutional Neural Networks" (2015).
- The gradient of a weight is F(3 x 3, 2 x 2), and adds up the products of all squares of 2 x 2 gradients. Along each
  axis, a factor of either image is rounded once, and a result twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from catalog.ops.conv.problem import ConvProblem
from catalog.runtime.tolerance import EXACT, ROUNDING, Tolerance

Array = NDArray[Any]

_U, _SMALLEST = ROUNDING["float32"]


def reference(problem: ConvProblem, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The computed tensor in float64, as the definition reads."""
    return _computed(problem, {name: array.astype(np.float64) for name, array in inputs.items()})


def tolerances(problem: ConvProblem, inputs: Mapping[str, Array], *, transforms: bool = False) -> dict[str, Tolerance]:
    """How far the computed tensor of a correct kernel may be from :func:`reference`.

    ``transforms``: of a kernel that computes a problem of two or three axes by minimal filtering of the last two.
    """
    [name] = problem.made
    if problem.dtype == "int8":
        return {name: EXACT}
    sizes = {name: np.abs(array.astype(np.float64)) for name, array in inputs.items()}
    computed, depth, roundings = _computed, problem.depth, 1
    if transforms and problem.direction == "bwd_weight":
        planes, high, wide = (1, *problem.out)[-3:]
        computed, depth, roundings = _filtered, problem.n * planes * -(-high // 2) * -(-wide // 2), 1 + 2 * (1 + 1 + 2)
    elif transforms:
        computed, depth, roundings = _filtered, problem.depth // 9, 1 + 2 * (1 + 2 + 2)
    one, size = next(iter(sizes.items()))
    terms = _with_ones(_filtered, problem, one, np.ones_like(size)) if transforms else depth
    products = computed(problem, sizes)[name]
    factors = sum(_with_ones(computed, problem, one, size) for one, size in sizes.items())
    errors = (4 * math.sqrt(depth) + roundings) * _U * products + _SMALLEST * (factors + terms)
    roundoff, smallest = ROUNDING[problem.tensors[name].element]
    return {name: Tolerance((1 + roundoff) * errors + roundoff * smallest, roundoff)}


_Computation = Callable[[ConvProblem, Mapping[str, Array]], dict[str, Array]]

_ELSEWHERE: Mapping[str, str] = {"input": "k", "weight": "n", "output": "c"}
"""The number of images or channels that a tensor does not have, but the two others do."""


def _with_ones(computed: _Computation, problem: ConvProblem, name: str, given: Array) -> Array:
    """The computed tensor where the other factor of each product is 1.

    Images, or channels of a group, that differ in this factor only have equal results: one of them is computed.
    """
    extent = _ELSEWHERE[name]
    small = problem.model_copy(update={extent: 1 if extent == "n" else problem.g})
    [made] = problem.made
    ones = {other: np.ones(small.shapes[other]) for other in ("input", "weight", "output") if other != made}
    result = computed(small, ones | {name: given})[made]
    outermost = extent == "n" or (made, extent) == ("weight", "k")
    axis = 0 if outermost else -1 if problem.layout == "nhwgc" else 1
    return np.repeat(result, problem.shapes[made][axis] // result.shape[axis], axis)


_SUMS: Mapping[str, str] = {
    "forward": "ngc...,gkc->ngk...",
    "bwd_data": "ngk...,gkc->ngc...",
    "bwd_weight": "ngcx,ngkx->gkc",
}
"""The product of images, or of an image and a weight, at one element of the filter."""


def _computed(problem: ConvProblem, given: Mapping[str, Array]) -> dict[str, Array]:
    """The computed tensor, a sum over the elements of the filter."""
    x, w, y = (_by_groups(problem, name, given.get(name)) for name in ("input", "weight", "output"))
    padded = np.pad(x, ((0, 0),) * 3 + tuple((pad, pad) for pad in problem.pad))
    sums = _SUMS[problem.direction]
    for tap, window in _windows(problem):
        at: Any = (..., *tap)
        if problem.direction == "forward":
            y += np.einsum(sums, padded[window], w[at])
        elif problem.direction == "bwd_data":
            padded[window] += np.einsum(sums, y, w[at])
        else:
            seen = padded[window]
            w[at] = np.einsum(sums, *(image.reshape(*image.shape[:3], math.prod(problem.out)) for image in (seen, y)))
    inside: Any = (..., *(slice(pad, pad + extent) for pad, extent in zip(problem.pad, problem.size, strict=True)))
    [name] = problem.made
    results: Mapping[str, Callable[[], Array]] = {
        "input": lambda: padded[inside],
        "weight": lambda: w,
        "output": lambda: y,
    }
    return {name: _as_given(problem, name, results[name]())}


def _of_square(coefficients: list[list[float]]) -> Array:
    """The matrix that transforms both axes of a square whose elements are one axis, from coefficients of one axis."""
    return np.kron(coefficients, coefficients).T


_OF_IMAGE = _of_square([[1, 0, 1, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 1, 0, 1]])
_OF_WEIGHT = _of_square([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, 0.5, 0.5], [0, 0, 1]])
_OF_RESULT = _of_square([[1, 1, 1, 0], [0, 1, 1, 1]])
"""Absolute coefficients of the transforms: from 4 elements of an image and 3 of a filter, by axis, to 2 results."""
_OF_GRADIENT = _of_square([[1, 0], [1, 1], [1, 1], [0, 1]])
_OF_FILTER = _of_square([[1, 0.5, 0.5, 0], [0, 0.5, 0.5, 0], [0, 0.5, 0.5, 1]])
"""The same from 4 elements of an image and 2 of the gradient of the output to 3 of a filter."""


def _filtered(problem: ConvProblem, given: Mapping[str, Array]) -> dict[str, Array]:
    """The computed tensor by minimal filtering with absolute coefficients: of sizes, the size of all terms of a sum."""
    direction = problem.direction
    [made] = problem.made
    x = _by_groups(problem, "output" if direction == "bwd_data" else "input", given.get("input", given.get("output")))
    other = "output" if direction == "bwd_weight" else "weight"
    w = _by_groups(problem, other, given[other])
    if direction == "bwd_data":
        w = np.flip(w.swapaxes(1, 2), tuple(range(3, w.ndim)))
    extents = problem.size if direction == "bwd_data" else problem.out
    begins = [pad - 2 if direction == "bwd_data" else -pad for pad in problem.pad]
    if problem.ndim == 2:
        x, w, extents, begins = x[..., None, :, :], w[..., None, :, :], (1, *extents), [0, *begins]
    high, wide = (-(-extent // 2) for extent in extents[1:])
    ends = [begin + extent + 2 + extent % 2 for begin, extent in zip(begins, extents, strict=True)]
    sides = [(max(0, -begin), max(0, end - size)) for begin, end, size in zip(begins, ends, x.shape[3:], strict=True)]
    seen: Any = (..., *(slice(max(0, begin), None) for begin in begins))
    squares = sliding_window_view(np.pad(x, [(0, 0)] * 3 + sides)[seen], (4, 4), (4, 5))[..., ::2, ::2, :, :]
    images = _transformed(squares[..., :high, :wide, :, :], _OF_IMAGE)
    if direction == "bwd_weight":
        result = _filtered_weight(problem, images, w)
    else:
        weights = _transformed(w, _OF_WEIGHT)
        products = np.zeros((*x.shape[:2], w.shape[1], extents[0], high, wide, 16))
        for plane in range(w.shape[3]):
            met = images[:, :, :, plane : plane + extents[0]]
            products += np.einsum("ngczyxt,gkct->ngkzyxt", met, weights[:, :, :, plane], optimize=True)
        results = (products @ _OF_RESULT).reshape(*products.shape[:-1], 2, 2).swapaxes(-3, -2)
        result = results.reshape(*results.shape[:4], 2 * high, 2 * wide)[..., : extents[1], : extents[2]]
    return {made: _as_given(problem, made, result[..., 0, :, :] if problem.ndim == 2 else result)}


def _filtered_weight(problem: ConvProblem, images: Array, y: Array) -> Array:
    """The gradient of the weight from transformed squares of the input, (n, g, c, z, y, x, 16), and that of the
    output, (n, g, k, z, h, w), with absolute coefficients."""
    *outer, planes, height, width = y.shape
    high, wide = images.shape[4:6]
    even = np.pad(y, [(0, 0)] * 4 + [(0, 2 * high - height), (0, 2 * wide - width)])
    pairs = even.reshape(*outer, planes, high, 2, wide, 2)
    gradients = _transformed(pairs.swapaxes(-3, -2), _OF_GRADIENT)
    taps = range((1, *problem.filter)[-3])
    sums = [
        np.einsum("ngczyxt,ngkzyxt->gkct", images[:, :, :, tap : tap + planes], gradients, optimize=True)
        for tap in taps
    ]
    filters = np.stack(sums, axis=3) @ _OF_FILTER
    return filters.reshape(*filters.shape[:-1], 3, 3)


def _transformed(squares: Array, matrix: Array) -> Array:
    """Squares, the last two axes, as transformed elements, the last one."""
    transformed: Array = squares.reshape(*squares.shape[:-2], len(matrix)) @ matrix
    return transformed


def _windows(problem: ConvProblem) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Each element of the filter, and what it meets in a padded input."""
    for tap in product(*map(range, problem.filter)):
        axes = zip(tap, problem.dilation, problem.stride, problem.out, strict=True)
        begins = [(place * dilation, step, extent) for place, dilation, step, extent in axes]
        yield tap, (..., *(slice(begin, begin + step * (extent - 1) + 1, step) for begin, step, extent in begins))


def _by_groups(problem: ConvProblem, name: str, array: Array | None) -> Array:
    """A tensor with the axes (image, group, channel, extents), or (group, out, in, extents); zeros if not given."""
    shape = problem.shapes[name]
    if array is None:
        array = np.zeros(shape)
    if problem.layout == "nhwgc":
        array = np.moveaxis(array, -1, 1)
    first, channels, *extents = array.shape
    if name == "weight":
        return array.reshape(problem.g, first // problem.g, channels, *extents)
    return array.reshape(first, problem.g, channels // problem.g, *extents)


def _as_given(problem: ConvProblem, name: str, array: Array) -> Array:
    """The inverse of :func:`_by_groups`."""
    first, second, third, *extents = array.shape
    shape = (first * second, third) if name == "weight" else (first, second * third)
    array = array.reshape(*shape, *extents)
    return np.ascontiguousarray(np.moveaxis(array, 1, -1)) if problem.layout == "nhwgc" else array
