"""Appending to a K/V cache, with rotary position embedding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from catalog.ops.attention.fields import OF_CACHES
from catalog.ops.attention.problem import Problem
from catalog.ops.attention.traits import Mask, Rope

Array = NDArray[Any]
Float64 = NDArray[np.float64]
LARGEST_FP8 = 448.0
"""The largest number of OCP's e4m3, to which conversions saturate."""
Rotate = Callable[[Problem, Float64, Float64, Float64], Float64]
"""(problem, tokens, cos, sin) to tokens, (seqlen, nhead, hdim_q); cos and sin are (seqlen, 1, rotary_dim / 2)."""


def appended(problem: Problem, inputs: Mapping[str, Array], rotate: Rotate) -> dict[str, Array]:
    """``q``, ``k_cache`` and ``v_cache`` of an appendkv, float64, with ``rotate`` for the rotary embedding.

    The new tokens of sequence b have the positions from seqlens_k[b] on. With a mask the queries have these positions
    too; without one all queries have the first of them. If the cache is fp8 and queries have 16 bits, new tokens are
    divided by the cache's factor, if there is one, and clamped to the range of fp8, but not rounded.
    """
    q, k_cache, v_cache = (inputs[name].astype(np.float64) for name in ("q", "k_cache", "v_cache"))
    for sequence in range(problem.batch):
        before = int(inputs["seqlens_k"][sequence])
        queries = np.arange(problem.seqlen_q) if problem.kernel_mask is not Mask.NO else np.zeros(problem.seqlen_q, int)
        q_tokens = _tokens(problem, q, sequence)
        q_tokens[...] = _rotated_to(problem, inputs, q_tokens, before + queries, rotate)

        positions = before + np.arange(problem.seqlen_new or 0)
        k_new, v_new = (_tokens(problem, inputs[name], sequence).astype(np.float64) for name in ("k_new", "v_new"))
        k_new = _rotated_to(problem, inputs, k_new, positions, rotate)
        k_new, v_new = (_divided(problem, inputs, f"{axis}_descale", new) for axis, new in (("k", k_new), ("v", v_new)))
        for cache, tokens in ((k_cache, k_new), (v_cache, v_new)):
            if problem.paged:
                pages = inputs["block_table"][sequence, positions // problem.page_size]
                cache[pages, positions % problem.page_size] = tokens
            else:
                _tokens(problem, cache, sequence)[positions] = tokens
    return {"q": q, "k_cache": k_cache, "v_cache": v_cache}


def rotated(problem: Problem, tokens: Float64, cos: Float64, sin: Float64) -> Float64:
    """Each pair of elements rotated by its angle; elements after rotary_dim are unchanged."""
    first, second = rotary_pairs(problem)
    result = tokens.copy()
    result[..., first] = tokens[..., first] * cos - tokens[..., second] * sin
    result[..., second] = tokens[..., second] * cos + tokens[..., first] * sin
    return result


def rotary_pairs(problem: Problem) -> tuple[slice, slice]:
    """The first and the second elements of the pairs: neighbours, or one from each half of rotary_dim."""
    rotary_dim = problem.rotary_dim or 0
    if problem.rope is Rope.INTER:
        return slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
    return slice(0, rotary_dim // 2), slice(rotary_dim // 2, rotary_dim)


def _divided(problem: Problem, inputs: Mapping[str, Array], descale: str, tokens: Float64) -> Float64:
    if problem.dtype not in OF_CACHES:
        return tokens
    factor = float(inputs[descale][0]) if descale in inputs else 1.0
    quotients: Float64 = np.clip(tokens / factor, -LARGEST_FP8, LARGEST_FP8)
    return quotients


def _rotated_to(
    problem: Problem, inputs: Mapping[str, Array], tokens: Float64, positions: Array, rotate: Rotate
) -> Float64:
    if problem.rope is Rope.NO:
        return tokens
    cos, sin = (inputs[name][positions].astype(np.float64)[:, np.newaxis] for name in ("rotary_cos", "rotary_sin"))
    return rotate(problem, tokens, cos, sin)


def _tokens(problem: Problem, tensor: Array, sequence: int) -> Array:
    """A view of a dense tensor's sequence: (seqlen, nhead, hdim)."""
    tokens: Array = tensor[sequence]
    return tokens if problem.layout == "bshd" else tokens.swapaxes(0, 1)
