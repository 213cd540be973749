"""What a GEMM problem computes, in float64, and how far from that a correct kernel may be.

With u = 2^-24, the unit roundoff of float32, to first order in u:

- A sum of k products is off by at most ``4 sqrt(k) u`` times the sum of their absolute values, in any order of
  summation: Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis" (2019), with lambda = 4,
  or 2.8 for Arm's BFDOT, which rounds to odd, off by up to 2 u, once for every two products.
- Factors and sums below 2^-126, the smallest normal float32, may be taken for zero, as AVX512-BF16 and BFDOT do.
- alpha, beta and the bias add a few roundings, each at most u times the largest number involved.
- An activation has a slope of at most 1.13, and is itself off by at most ``8 u`` times its argument, or 8 u.
- Each D tensor adds a rounding in float32; a factor multiplies the error before it.
- Tensor cores may keep fewer bits of a sum of fp8 or bf8 than float32 has: see :mod:`catalog.runtime.tensor_cores`.
- Scales add a few roundings to each factor or sum; they multiply sums that may be smaller than the smallest normal
  number, or whose product may be.
- The result is rounded once to its type. Sums of int8 products without scales, and what is done with them, are exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from catalog.ops.gemm.problem import BLOCK, GemmProblem
from catalog.runtime.tensor_cores import PROMOTED, truncation_of_sums
from catalog.runtime.tolerance import EXACT, ROUNDING, Tolerance

Array = NDArray[Any]
Float64 = NDArray[np.float64]

_U, _SMALLEST = ROUNDING["float32"]
_FEW = 8 * _U
_STEEPEST = 1.13
"""The largest slope of an activation: that of gelu, at sqrt(2)."""


def reference(problem: GemmProblem, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """C in float64, as the definition reads: the product of A and B, each with its scales."""
    if problem.groups is not None:
        return {"c": _joined(problem, [reference(*group)["c"] for group in _of_groups(problem, inputs)])}
    c = _combined(problem, inputs, _activated(problem, _before(problem, inputs)))
    return {"c": c.astype(np.float64)}


def tolerances(
    problem: GemmProblem, inputs: Mapping[str, Array], *, fp8_sum_bits: int | None = None
) -> dict[str, Tolerance]:
    """How far C of a correct kernel may be from :func:`reference`.

    Args:
        problem: the problem that was computed.
        inputs: as for the reference.
        fp8_sum_bits: bits that tensor cores keep of a sum of fp8 or bf8 products; None for all of float32.
    """
    if problem.is_integer:
        return {"c": EXACT}
    roundoff, smallest = ROUNDING[problem.tensors["c"].element]
    if problem.groups is not None:
        parts = [
            np.asarray(tolerances(*group, fp8_sum_bits=fp8_sum_bits)["c"].atol) for group in _of_groups(problem, inputs)
        ]
        return {"c": Tolerance(_joined(problem, parts), roundoff)}
    sizes = {name: np.abs(array.astype(np.float64)) for name, array in inputs.items()}
    a, b = _factors(problem, sizes)
    lost = _SMALLEST * (np.sum(a, axis=-1, keepdims=True) + np.sum(b, axis=-2, keepdims=True) + problem.k)
    if problem.has_scales:
        plain_a, plain_b = _unscaled(problem, sizes)
        lost = lost + _SMALLEST * (plain_a @ plain_b)
    products = abs(problem.alpha) * (a @ b)
    errors = 4 * math.sqrt(problem.k) * _U * products + abs(problem.alpha) * lost
    if fp8_sum_bits is not None and problem.dtype in ("fp8", "bf8"):
        errors = errors + abs(problem.alpha) * truncation_of_sums(*_factors(problem, inputs), fp8_sum_bits, PROMOTED)
    errors = errors + _FEW * (products + _added(problem, sizes, abs(problem.beta)))
    before = _before(problem, inputs)
    if problem.activation != "no":
        errors = _STEEPEST * errors + _FEW * (np.abs(before) + 1)
    x = _activated(problem, before)
    for i in range(problem.num_d):
        d = inputs[f"d{i}"].astype(np.float64)
        multiplies = problem.elementwise == "MultiDMultiply"
        x, errors = (x * d, errors * np.abs(d)) if multiplies else (x + d, errors)
        errors = errors + 2 * _U * np.abs(x) + _SMALLEST
    return {"c": Tolerance((1 + roundoff) * errors + roundoff * smallest, roundoff)}


def _of_groups(problem: GemmProblem, inputs: Mapping[str, Array]) -> Iterator[tuple[GemmProblem, dict[str, Array]]]:
    """The problem and the inputs of each group."""
    starts = [0, *accumulate(problem.groups or ())]
    axis, own = ("m", "b") if problem.group_axis == "m" else ("k", "c")
    axes = {"a": int((problem.layout[0] == "r") == (axis == "k")), "b": int(problem.layout[1] == "c"), "c": 0}
    for i, (start, end) in enumerate(pairwise(starts)):
        parts = {}
        for name, tensor in inputs.items():
            of = name.removeprefix("scale_")
            if of == own:
                parts[name] = tensor[i]
            elif name == "bias" or (of != name and axis == "k"):
                parts[name] = tensor
            else:
                along = axes[name] if of == name else 0
                parts[name] = tensor.swapaxes(0, along)[start:end].swapaxes(0, along)
        yield problem.model_copy(update={"groups": None, "group_axis": "m", axis: end - start}), parts


def _joined(problem: GemmProblem, parts: Sequence[Array]) -> Array:
    """C of all groups; ``parts`` are those of each."""
    if not parts:
        return np.zeros(problem.shapes["c"])
    return np.concatenate(parts) if problem.group_axis == "m" else np.stack(parts)


def _factors(problem: GemmProblem, inputs: Mapping[str, Array]) -> tuple[Array, Array]:
    """A and B, row-major, with their scales, in float64."""
    a, b = _unscaled(problem, inputs)
    if not problem.has_scales:
        return a, b
    scale_a, scale_b = (inputs[name].astype(np.float64) for name in ("scale_a", "scale_b"))
    if problem.scales == "row":
        return a * scale_a[..., :, None], b * scale_b[..., None, :]
    of_a = np.repeat(scale_a, BLOCK, axis=-1)[..., : problem.k]
    of_b = np.repeat(np.repeat(scale_b, BLOCK, axis=-1)[..., : problem.k], BLOCK, axis=-2)[..., : problem.n, :]
    return a * of_a, b * of_b.swapaxes(-1, -2)


def _unscaled(problem: GemmProblem, inputs: Mapping[str, Array]) -> tuple[Array, Array]:
    """A and B, row-major, in float64."""
    a, b = (inputs[name].astype(np.float64) for name in ("a", "b"))
    of_a, of_b, _ = problem.layout
    return (a if of_a == "r" else a.swapaxes(-1, -2)), (b if of_b == "r" else b.swapaxes(-1, -2))


def _before(problem: GemmProblem, inputs: Mapping[str, Array]) -> Array:
    """What the activation is applied to."""
    a, b = _factors(problem, inputs)
    product: Array = a @ b
    if problem.is_integer:  # float64 has these sums exactly; a product of matrices of int64 takes many times as long
        product = product.astype(np.int64)
    if problem.alpha != 1:
        product = np.float32(problem.alpha).astype(np.float64) * product
    before: Array = product + _added(problem, inputs, problem.beta)
    return before


def _added(problem: GemmProblem, inputs: Mapping[str, Array], beta: float) -> Any:
    """Beta C and the bias."""
    wide = np.int64 if problem.is_integer else np.float64
    added: Any = wide(0)
    if beta:
        added = added + inputs["c"].astype(wide) * wide(np.float32(beta))
    if problem.bias:
        added = added + inputs["bias"].astype(wide)
    return added


def _activated(problem: GemmProblem, x: Array) -> Array:
    activated: Array
    with np.errstate(over="ignore", invalid="ignore"):
        if problem.activation == "relu":
            activated = np.where(x < 0, 0, x)
        elif problem.activation == "gelu":
            activated = x * (1 + _erf(x / math.sqrt(2))) / 2
        elif problem.activation == "silu":
            activated = x / (1 + np.exp(-x))
        else:
            activated = x
    return activated


def _combined(problem: GemmProblem, inputs: Mapping[str, Array], x: Array) -> Array:
    for i in range(problem.num_d):
        d = inputs[f"d{i}"].astype(x.dtype)
        x = x + d if problem.elementwise == "MultiDAdd" else x * d
    return x


_erf = np.vectorize(math.erf, otypes=[np.float64])
