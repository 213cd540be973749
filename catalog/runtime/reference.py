"""The answer that kernels are checked against: attention in float64 NumPy, and how far from it a kernel may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from catalog.schema.fields import Dtype
from catalog.schema.problem import Problem

Array = NDArray[Any]
Float64 = NDArray[np.float64]

_ROWS_AT_ONCE = 512
"""Query rows whose scores are in memory together."""


def attention_fwd(problem: Problem, q: Array, k: Array, v: Array) -> tuple[Float64, Float64]:
    """O = softmax(scale Q K^T + mask) V, and the natural logarithm of each softmax's denominator.

    Args:
        problem: the layout, the mask and the scale.
        q: queries, of the problem's shape and any real dtype; ``k`` and ``v`` likewise.
        k: keys.
        v: values.

    Returns:
        ``o`` of the problem's shape, and ``lse``, (batch, nhead_q, seqlen_q) or, in group mode, (nhead_q, tokens_q),
        whether or not the problem asks for it; both float64. A row that sees no key has o = 0 and lse = -inf.
    """
    shapes = problem.model_copy(update={"lse": True}).shapes
    o, lse = np.zeros(shapes["o"]), np.zeros(shapes["lse"])
    lse_of_sequences = lse if problem.seqlens_q is None else [lse[:, part] for part in _parts(problem.seqlens_q)]
    for q_heads, k_heads, v_heads, o_heads, lse_heads in zip(
        _sequences(problem, q, problem.seqlens_q),
        _sequences(problem, k, problem.seqlens_k),
        _sequences(problem, v, problem.seqlens_k),
        _sequences(problem, o, problem.seqlens_q),
        lse_of_sequences,
        strict=True,
    ):
        seqlen_q, seqlen_k = q_heads.shape[1], k_heads.shape[1]
        for head in range(problem.nhead_q):
            keys = k_heads[head // problem.ratio].astype(np.float64)
            values = v_heads[head // problem.ratio].astype(np.float64)
            for start in range(0, seqlen_q, _ROWS_AT_ONCE):
                rows = slice(start, min(start + _ROWS_AT_ONCE, seqlen_q))
                scores = problem.softmax_scale * q_heads[head, rows].astype(np.float64) @ keys.T
                visible = _visible(problem, rows, seqlen_q, seqlen_k)
                o_heads[head, rows], lse_heads[head, rows] = _softmax_times(scores, visible, values)
    return o, lse


def _parts(lengths: tuple[int, ...]) -> list[slice]:
    """Where each sequence lies on the token axis."""
    return [slice(stop - length, stop) for length, stop in zip(lengths, accumulate(lengths), strict=True)]


def _sequences(problem: Problem, tensor: Array, lengths: tuple[int, ...] | None) -> list[Array]:
    """Views of the tensor, (nhead, seqlen, hdim) for each sequence."""
    if lengths is not None:
        return [tensor[part].swapaxes(0, 1) for part in _parts(lengths)]
    return [sequence if problem.layout == "bhsd" else sequence.swapaxes(0, 1) for sequence in tensor]


def _visible(problem: Problem, rows: slice, seqlen_q: int, seqlen_k: int) -> NDArray[np.bool_]:
    """(rows, seqlen_k): whether the query sees the key."""
    query = np.arange(rows.start, rows.stop)[:, np.newaxis]
    key = np.arange(seqlen_k)[np.newaxis, :]
    diagonal = query + (seqlen_k - seqlen_q if problem.mask_corner else 0)
    visible = np.ones((len(query), seqlen_k), bool)
    if problem.window_left >= 0:
        visible &= key >= diagonal - problem.window_left
    if problem.window_right >= 0:
        visible &= key <= diagonal + problem.window_right
    return visible


def _softmax_times(scores: Float64, visible: NDArray[np.bool_], values: Float64) -> tuple[Float64, Float64]:
    """(softmax(visible scores) values, log-sum-exp) of each row."""
    seen = visible.any(axis=1)
    largest = np.where(seen, np.max(scores, axis=1, initial=-np.inf, where=visible), 0.0)
    weights = np.exp(scores - largest[:, np.newaxis], out=np.zeros_like(scores), where=visible)
    total = np.where(seen, weights.sum(axis=1), 1.0)
    lse = np.where(seen, largest + np.log(total), -np.inf)
    return weights @ values / total[:, np.newaxis], lse


@dataclass(frozen=True, slots=True)
class Tolerance:
    """|actual - expected| may be ``atol + rtol * |expected|``."""

    atol: float
    rtol: float

    def allows(self, actual: Array, expected: Array) -> bool:
        """Whether every element is near enough; infinities must agree, a NaN matches only a NaN."""
        expected = expected.astype(np.float64)
        bound = self.atol + self.rtol * np.where(np.isfinite(expected), np.abs(expected), 0.0)
        return bool(np.all(_errors(actual, expected) <= bound))


_FP32, _FP16, _BF16, _FP8, _BF8 = 2.0**-24, 2.0**-11, 2.0**-8, 2.0**-4, 2.0**-3

_ROUNDOFF: Mapping[Dtype, tuple[float, float]] = MappingProxyType(
    {
        Dtype.FP32: (_FP32, _FP32),
        Dtype.FP16: (_FP16, _FP16),
        Dtype.BF16: (_BF16, _BF16),
        Dtype.FP8: (_FP8, _FP8),
        Dtype.BF8: (_BF8, _BF8),
        Dtype.FP8FP16: (_FP8, _FP16),
        Dtype.FP8BF16: (_FP8, _BF16),
        Dtype.FP8FP32: (_FP8, _FP32),
    }
)
"""Unit roundoff (half the gap between 1 and the next number) of the input type and of O's."""

_SCORE_ERROR = 2.0**-15
"""Bound on the error of a score, and so on the relative error of exp(score), in float32: see :func:`tolerance`."""


def tolerance(dtype: Dtype, tensor: Literal["o", "lse"]) -> Tolerance:
    """How far a correct kernel's ``o`` or ``lse`` may be from the reference, for inputs of variance 1.

    A kernel multiplies exactly and adds in float32. The errors, with u the unit roundoff of a type:

    - Scores: a sum of hdim <= 256 products of magnitude about 1, times a scale of 1/sqrt(hdim). The worst case,
      hdim^1.5 u(fp32), is never near: errors add like a random walk, and exp() adds some units in the last place of
      its argument. 2^-15 has a factor of about ten in hand. It is all of lse's absolute error, and all of o's in fp32
      but the last rounding. The relative part of lse is its own rounding and log(): 16 u(fp32).
    - P is rounded to the input type before P V: o is off by at most u(input) sum(P |V|). Where one key dominates, that
      is u(input) |o|, hence its share of rtol; where many keys share, sum(P |V|) is the mean of |V|, 0.8, and below 2
      in all but freak rows: 2 u(input) of atol.
    - O is rounded once: u(output) |o|, the other share of rtol. An fp8 O below its smallest normal number, 2^-6, is
      rounded absolutely, by less than the atol above.
    """
    if tensor == "lse":
        return Tolerance(atol=_SCORE_ERROR, rtol=16 * _FP32)
    of_input, of_output = _ROUNDOFF[dtype]
    return Tolerance(atol=2 * of_input + _SCORE_ERROR, rtol=of_input + of_output)


def max_error(actual: Array, expected: Array) -> float:
    """The largest |actual - expected|; 0 of nothing, inf where infinities or NaNs disagree."""
    return float(np.max(_errors(actual, expected), initial=0.0))


def _errors(actual: Array, expected: Array) -> Float64:
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(actual) & np.isfinite(expected)
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    errors = np.where(same, 0.0, np.inf)
    np.subtract(actual, expected, out=errors, where=finite)
    return np.abs(errors, out=errors)
