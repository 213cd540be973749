"""How far from the float64 reference a correct kernel may be: a rounding error analysis of every operation.

A kernel reads its inputs exactly, multiplies and adds in float32, and rounds each result once; a GPU's kernel, and one
for the host that multiplies pairs, also rounds the weights that it multiplies. Where fp16 is the sum of two bf16, a
score is a sum of exact products, 32 of which are added before they meet the sum: no more roundings follow each other
than where n products are added one by one. Weights of 16 bits, without the products of two lower parts, are off by less
than those rounded to fp16. Pairs of bf16 take subnormal factors for zero: with |q| and |k| below 2^80, that changes a
score by less than u 2^-20. In a backward, O and LSE are inputs: the forward's rounding of them is no error here. With u
= 2^-24, the unit roundoff of float32, the analysis is first-order in u and considers three kinds of error:

- A sum of n products is off by at most ``4 sqrt(n) u`` times the sum of their absolute values, in any order of
  summation: Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis" (2019), with lambda = 4. The
  worst case, n u, takes n roundings in the same direction. For a dot product, |a| |b| (the 2-norms) bounds that sum.
  Arm's BFDOT rounds to odd, off by up to 2 u, once for every two products: lambda is 2.8 then.
- A few roundings in a row (scaling, a change of base, exp2 of a few units in the last place, log, a reciprocal) are off
  by at most ``8 u`` relative to the largest number involved.
- Rounding a result to its type, or weights to the type in which they are multiplied, is off by the unit roundoff
  relative to the number, or half a step below the smallest normal one. Keys and values of 8 bits may be multiplied as
  fp16, whatever the type of Q: each error is then that of the type for which it is larger. Where blocks or pages
  of values have factors, weights may be multiplied by them before they are rounded: half a step is then one of the
  largest weight times the largest factor.

Tensor cores may cut off sums of 8-bit products: E, and O's error, then have the terms of
:mod:`catalog.runtime.tensor_cores` for Q K^T and P V.

Tensor cores multiply float32 as sums of two numbers of TF32, with 11 significant bits each. The rest of a number
that is rounded to TF32 is at most 2^-11 of it, and loses at most 2^-22 when it is cut to 11 bits. The product of two
rests is left out, so a product is off by at most 3 x 2^-22 = 12 u. An instruction adds eight such products to 0 or to
the products with rests, which are 2^-11 times as large. It aligns these nine numbers to the largest one, and cuts off
what float32 has no bits for: at most 2 u of the largest one for each, and 2 u for their sum. These sums are added in
float32. So a sum of n products is off by at most ``(4 sqrt(n / 8) + 32) u`` times the sum of their absolute values:
12 u, 20 u, and the roundings of n / 8 additions.

So a score's error E is ``(4 sqrt(hdim_q) + 8) u scale |q| |k| + 8 u (|score| + |bias| + |lse| + 2)``, and 8 u times the
cap if there is one: tanh has a slope of at most 1. Descales are part of q and k. From there, with weights
P = exp(score - lse) that are off by a factor of exp(E):

- lse: sum(P E), because it is a weighted mean of the scores, plus the errors of the sum and of the logarithm.
- O = P V: sum(P |V| (E + error of lse + error of the sum)).
- dS = P (dP - delta): P |dP - delta| E, plus P times the errors of two dot products over hdim_v, and P 8 u |dLSE| where
  delta has the gradient of LSE in it. That is dbias.
- cap' = 1 - tanh^2, the slope of the soft cap: its slope is at most 2 / cap, so E 2 / cap times itself, plus 16 u.
- dQ = scale (cap' * dS) K: scale times sum(error of cap' * dS |K|), plus the error of the sum. dK likewise.
- dV = P^T dO: sum(P |dO| (E + error of the sum)).

Data that is only copied, and random bytes, must be exact. Tokens that are rotated may be rounded to their type before
they are rounded to that of a cache of fp8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from catalog.ops.attention.fields import OF_CACHES, QUANTISED, Op
from catalog.ops.attention.problem import Problem
from catalog.ops.attention.reference.answers import log_sum_exp, lse_gradient, lse_shape, probabilities
from catalog.ops.attention.reference.append import appended, rotary_pairs, rotated
from catalog.ops.attention.reference.sequences import Head, sequences
from catalog.ops.attention.traits import Rope
from catalog.runtime.tensor_cores import truncation_of_sums
from catalog.runtime.tolerance import EXACT, ROUNDING, Tolerance

Array = NDArray[Any]
Float64 = NDArray[np.float64]

_U = 2.0**-24
_FEW = 8 * _U

_LOST = 2.0**-90
"""Weights below 2^-126, the smallest normal float32, may be lost: this error per weight, for sums up to 2^36."""


def tolerances(
    problem: Problem,
    inputs: Mapping[str, Array],
    weights: str = "float32",
    fp8_sum_bits: int | None = None,
    *,
    splits: bool = False,
) -> dict[str, Tolerance]:
    """How far each result of a correct kernel may be from ``reference(problem, inputs)``, by the result's name.

    Args:
        problem: the problem that was computed.
        inputs: the tensors passed to the kernel, as for the reference.
        weights: the element type that the kernel rounds P and dS to before it multiplies them: float32, or the type of
            Q where it multiplies pairs or in matrix units.
        fp8_sum_bits: bits that matrix units keep of a sum of 8-bit products; None for all of float32.
        splits: whether matrix units multiply float32 as sums of two numbers of TF32.
    """
    sum_bits = fp8_sum_bits if problem.dtype in QUANTISED - OF_CACHES else None
    as_fp16 = weights != "float32" and problem.dtype in OF_CACHES
    rounding = [ROUNDING[element] for element in ((weights, "float16") if as_fp16 else (weights,))]
    roundoff = max(roundoff for roundoff, _ in rounding)
    half_step = max(roundoff * smallest for roundoff, smallest in rounding)
    return _OPERATIONS[problem.op](problem, inputs, _Products(roundoff, half_step, sum_bits, splits))


@dataclass(frozen=True, slots=True)
class _Products:
    """How P and dS are rounded before they are multiplied, how many bits sums of 8-bit products keep, and whether
    products of float32 are those of parts.
    """

    roundoff: float
    half_step: float
    sum_bits: int | None
    splits: bool

    def of_dot(self, terms: int) -> float:
        """Error of a dot product, relative to the sum of its products' absolute values."""
        return _of_sum(-(-terms // 8)) + 32 * _U if self.splits else _of_sum(terms)

    def lost(self, weights: Float64) -> Float64:
        """Absolute error of each weight below the smallest normal number; hidden weights are exactly 0."""
        return np.where(weights > 0, self.half_step, 0.0)

    def cut_off(self, a: Float64, b: Float64) -> Float64 | float:
        """What sums of the product of two matrices lose."""
        return 0.0 if self.sum_bits is None else truncation_of_sums(a, b, self.sum_bits)


def _attention(problem: Problem, inputs: Mapping[str, Array], rounded: _Products) -> dict[str, Tolerance]:
    o_errors, lse_errors = np.zeros(problem.shapes["o"]), np.zeros(lse_shape(problem))
    for sequence in sequences(problem, inputs):
        o, lse_error = sequence.tokens(o_errors, "q"), sequence.rows(lse_errors)
        of_sum, of_products = _of_sum(sequence.seqlen_k), rounded.of_dot(sequence.seqlen_k)
        for head in sequence.heads():
            largest_v = np.abs(sequence.values_of_largest_factor(head.key_index))
            for rows in sequence.blocks():
                scores = head.scores(rows)
                lse = log_sum_exp(scores, head.sink)
                p = probabilities(scores, lse)
                of_scores = _of_scores(head, rows, scores, lse, rounded)
                of_lse = np.sum(p * of_scores, axis=1) + of_sum + 2 * _FEW
                of_weights = of_scores + (of_lse + of_products + _FEW + rounded.roundoff)[:, np.newaxis]
                lse_error[head.index, rows] = of_lse
                # A kernel rounds weights relative to the largest of the row, and factors of values alike.
                lost = rounded.lost(p) * np.max(p, axis=1, initial=0.0, keepdims=True)
                z, of_sums = head.dropout(rows), rounded.cut_off(p, head.v) + _step(problem, "o")
                o[head.index, rows] = (z * p * of_weights) @ np.abs(head.v) + (z * lost) @ largest_v + of_sums
    results = {"o": Tolerance(o_errors, _roundoff(problem, "o")), "lse": Tolerance(lse_errors, _FEW)}
    return results | ({"randval": EXACT} if problem.randval else {})


def _backward(problem: Problem, inputs: Mapping[str, Array], rounded: _Products) -> dict[str, Tolerance]:
    names = [name for name in ("dq", "dk", "dv", "dbias") if name in problem.shapes]
    errors = {name: np.zeros(problem.shapes[name]) for name in names}
    scale, step = problem.softmax_scale, _step(problem, "dq")
    of_dot = _of_sum(problem.hdim_v) + _FEW
    for sequence in sequences(problem, inputs):
        lse, dlse = sequence.rows(inputs["lse"]), sequence.rows(lse_gradient(problem, inputs))
        dq = sequence.tokens(errors["dq"], "q")
        dk, dv = (sequence.tokens(errors[name], "k") for name in ("dk", "dv"))
        of_dq, of_dk = _of_sum(sequence.seqlen_k) + _FEW, _of_sum(sequence.seqlen_q * problem.ratio) + _FEW
        for head in sequence.heads():
            o, do = (sequence.tokens(inputs[name], "q")[head.index].astype(np.float64) for name in ("o", "do"))
            for rows in sequence.blocks():
                z, scores = head.dropout(rows), head.scores(rows)
                p = probabilities(scores, lse[head.index, rows])
                of_lse = dlse[head.index, rows, np.newaxis]
                delta = np.sum(do[rows] * o[rows], axis=1, keepdims=True) - of_lse
                ds = p * np.abs(z * (do[rows] @ head.v.T) - delta)
                of_scores = _of_scores(head, rows, scores, lse[head.index, rows], rounded)
                of_p = of_scores + _FEW + rounded.roundoff
                dots = _norms(do[rows]) * (z * _norms(head.v).T + _norms(o[rows]))
                lost = rounded.lost(p)
                of_ds = ds * of_p + p * (of_dot * dots + _FEW * np.abs(of_lse))
                slope = head.slope(rows)
                of_products = slope * of_ds + ds * _of_slope(problem, slope, of_scores) + lost
                dq[head.index, rows] = scale * (of_products + of_dq * slope * ds) @ np.abs(head.k)
                dk[head.key_index] += scale * (of_products + of_dk * slope * ds).T @ np.abs(head.q[rows])
                dv[head.key_index] += (z * (p * (of_p + of_dk) + lost)).T @ np.abs(do[rows])
                if "dbias" in errors:
                    sequence.pairs(errors["dbias"], head.index)[rows] = of_ds + lost + step
        for gradient in (dq, dk, dv):
            gradient[...] += step
    results = {name: Tolerance(errors[name], _roundoff(problem, name)) for name in names}
    return results | ({"randval": EXACT} if problem.randval else {})


def _append(problem: Problem, inputs: Mapping[str, Array], _: _Products) -> dict[str, Tolerance]:
    quantises = problem.dtype in OF_CACHES
    if problem.rope is Rope.NO and not quantises:
        return dict.fromkeys(("q", "k_cache", "v_cache"), EXACT)
    caches = {name: np.zeros(problem.shapes[name]) for name in ("k_cache", "v_cache")}
    copied = ("v_new",) if problem.rope is not Rope.NO else ("q", "k_new", "v_new")
    empty = caches | {name: np.zeros(problem.shapes[name]) for name in copied}
    errors = appended(problem, {**inputs, **empty}, _of_rotated)
    if quantises:
        stored = appended(problem, {**inputs, **caches}, rotated)
        for name in caches:
            sizes = np.abs(stored[name]) + errors[name]
            errors[name] += (_roundoff(problem, name) + _FEW) * sizes + np.where(sizes > 0, _step(problem, name), 0.0)
    return {name: Tolerance(atol, 0.0) for name, atol in errors.items()}


def _of_rotated(problem: Problem, tokens: Float64, cos: Float64, sin: Float64) -> Float64:
    """Errors of ``rotated``: two products, their sum, and rounding to the type of Q; 0 after rotary_dim."""
    first, second = rotary_pairs(problem)
    x, y = tokens[..., first], tokens[..., second]
    errors = np.zeros(tokens.shape)
    for half, a, b in ((first, x * cos, -y * sin), (second, y * cos, x * sin)):
        in_float32 = 2 * _U * (np.abs(a) + np.abs(b))
        errors[..., half] = in_float32 + _roundoff(problem, "q") * np.abs(a + b) + _step(problem, "q")
    return errors


def _of_scores(head: Head, rows: slice, scores: Float64, lse: Array, rounded: _Products) -> Float64:
    """The error E of each score; 0 where the query does not see the key."""
    problem = head.sequence.problem
    of_dots = (rounded.of_dot(problem.hdim_q) + _FEW) * problem.softmax_scale * _norms(head.q[rows])
    finite_lse = np.where(np.isfinite(lse), lse, 0.0).astype(np.float64)
    of_rows = np.abs(finite_lse) + (problem.logits_soft_cap or 0.0) + 2
    errors = of_dots * _norms(head.k).T
    errors += _FEW * np.abs(scores)
    errors += _FEW * (np.abs(head.bias(rows)) + of_rows[:, np.newaxis])
    errors += problem.softmax_scale * rounded.cut_off(head.q[rows], head.k.T)
    return np.where(np.isfinite(scores), errors, 0.0)


def _of_slope(problem: Problem, slope: Float64, of_scores: Float64) -> Float64 | float:
    """Absolute error of the soft cap's slope."""
    cap = problem.logits_soft_cap
    return 0.0 if cap is None else slope * of_scores * 2 / cap + 2 * _FEW


def _of_sum(terms: int) -> float:
    """Error of a float32 sum of products, relative to the sum of their absolute values."""
    return 4 * math.sqrt(terms) * _U


def _norms(rows: Float64) -> Float64:
    """The 2-norm of each row, (rows, 1)."""
    norms: Float64 = np.linalg.norm(rows, axis=1, keepdims=True)
    return norms


def _roundoff(problem: Problem, name: str) -> float:
    return ROUNDING[problem.tensors[name].element][0]


def _step(problem: Problem, name: str) -> float:
    """Absolute error of a result: half the gap between numbers below the smallest normal one, and lost weights."""
    roundoff, smallest = ROUNDING[problem.tensors[name].element]
    return max(roundoff * smallest, _LOST)


_OPERATIONS: Mapping[Op, Callable[[Problem, Mapping[str, Array], _Products], dict[str, Tolerance]]] = MappingProxyType(
    {
        "fwd": _attention,
        "splitkv": _attention,
        "pagedkv": _attention,
        "batch_prefill": _attention,
        "appendkv": _append,
        "bwd": _backward,
    }
)
