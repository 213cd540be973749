"""Random inputs of attention, and inputs that follow from others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from catalog.ops.attention.problem import Problem
from catalog.ops.attention.reference.answers import reference
from catalog.runtime.elements import element_type

Array = NDArray[Any]
Rng = np.random.Generator

ROPE_BASE = 10_000.0
"""Base of the angles in generated rotary tables: position / base^(2 i / rotary_dim)."""


def draw(problem: Problem, name: str, rng: Rng) -> Array:
    """A random input like a user's.

    Q, K, V, new tokens, biases and gradients are standard normal; scales are near 1; ALiBi slopes and rotary tables are
    the usual ones. Sequences are as long as the problem allows; pages are in random order. Block masks show half of the
    blocks.
    """
    return _MAKERS.get(name, _normal)(problem, name, rng)


def complete(problem: Problem, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """O and LSE for a backward: computed by the reference of its forward."""
    if problem.op != "bwd":
        return {}
    forward = forward_of(problem)
    given = {name: array for name, array in inputs.items() if name in forward.tensors and name not in ("o", "lse")}
    expected = reference(forward, given)
    return {name: expected[name].astype(element_type(problem, name)) for name in ("o", "lse")}


def _normal(problem: Problem, name: str, rng: Rng) -> Array:
    return rng.standard_normal(problem.shapes[name], dtype=np.float32)


def _scales(problem: Problem, name: str, rng: Rng) -> Array:
    return rng.uniform(0.5, 1.5, problem.shapes[name])


def _slopes(problem: Problem, name: str, _: Rng) -> Array:
    """Geometric from 2^(-8/n) to 2^-8, as in the ALiBi paper for n heads a power of two."""
    heads = np.arange(1, problem.nhead_q + 1)
    return np.broadcast_to(2.0 ** (-8.0 * heads / problem.nhead_q), problem.shapes[name])


def _bitmap(problem: Problem, name: str, rng: Rng) -> Array:
    """Half of the blocks, and none for one in eight blocks of queries."""
    shape = problem.shapes[name]
    seen = (rng.random(shape) < 0.5) & (rng.random((*shape[:-1], 1)) >= 0.125)
    return seen * rng.integers(1, 256, shape)  # every value but 0 means the same


def _longest(problem: Problem, name: str, _: Rng) -> Array:
    return np.full(problem.shapes[name], problem.seqlen_k - problem.appended)


def _pages(problem: Problem, name: str, rng: Rng) -> Array:
    """Every page once, in random order, repeated if the sequences need more pages than there are."""
    shape = problem.shapes[name]
    return np.resize(rng.permutation(problem.num_pages or 0), shape)


def _page_starts(problem: Problem, *_: Any) -> Array:
    return np.arange(problem.batch + 1) * problem.pages_per_sequence


def _last_pages(problem: Problem, name: str, _: Rng) -> Array:
    return np.full(problem.shapes[name], (problem.seqlen_k - 1) % problem.page_size + 1)


def _rotary(problem: Problem, name: str, _: Rng) -> Array:
    positions, pairs = problem.shapes[name]
    angles = np.arange(positions)[:, np.newaxis] * ROPE_BASE ** (-np.arange(pairs) / max(pairs, 1))
    return np.cos(angles) if name == "rotary_cos" else np.sin(angles)


_MAKERS: Mapping[str, Callable[[Problem, str, Rng], Array]] = MappingProxyType(
    {
        "q_descale": _scales,
        "k_descale": _scales,
        "v_descale": _scales,
        "alibi_slopes": _slopes,
        "block_mask": _bitmap,
        "seqlens_k": _longest,
        "block_table": _pages,
        "kv_indptr": _page_starts,
        "kv_page_indices": _pages,
        "kv_last_page_lens": _last_pages,
        "rotary_cos": _rotary,
        "rotary_sin": _rotary,
    }
)


def forward_of(problem: Problem) -> Problem:
    """The forward problem whose gradient a backward problem computes."""
    only_backward = {"dbias": False, "dlse": False, "deterministic": False, "randval": False}
    return problem.model_copy(update={"op": "fwd", "lse": True, **only_backward})
