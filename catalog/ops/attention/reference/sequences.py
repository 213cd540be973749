"""Sequences of a problem and their heads, independent of how tensors are stored: float64 matrices and scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from catalog.ops.attention.fields import OF_CACHES
from catalog.ops.attention.problem import Problem
from catalog.ops.attention.reference.dropout import dropout_factors, random_bytes
from catalog.ops.attention.traits import Bias, KvLookupTable, KvMemoryLayout, Mask, Mode, Qscale

Array = NDArray[Any]
Float64 = NDArray[np.float64]
Axis = Literal["q", "k", "v"]

_PAIRS_AT_ONCE = 2**21
"""Query-key pairs whose scores are in memory at the same time: 16 MB per matrix."""


@dataclass(frozen=True, slots=True)
class Sequence:
    """The sequence ``index`` of a problem; ``seqlen_q`` and ``seqlen_k`` are its numbers of real tokens."""

    problem: Problem
    inputs: Mapping[str, Array]
    index: int
    seqlen_q: int
    seqlen_k: int

    def tokens(self, tensor: Array, axis: Axis) -> Array:
        """The real tokens of a dense or packed tensor: a view, (nhead, seqlen, hdim)."""
        start, stop = self._range(axis)
        if self.problem.mode is Mode.GROUP:
            return tensor[start:stop].swapaxes(0, 1)
        heads = tensor[self.index] if self.problem.layout == "bhsd" else tensor[self.index].swapaxes(0, 1)
        real: Array = heads[:, start:stop]
        return real

    def rows(self, tensor: Array) -> Array:
        """The real rows of a tensor shaped like lse: a view, (nhead_q, seqlen_q)."""
        start, stop = self._range("q")
        return (tensor if self.problem.mode is Mode.GROUP else tensor[self.index])[:, start:stop]

    def pairs(self, tensor: Array, head: int) -> Array:
        """The real query-key pairs of a tensor shaped like bias: a view, (seqlen_q, seqlen_k).

        A batch or head axis of one element is shared by all.
        """
        if self.problem.mode is Mode.BATCH:
            tensor = tensor[self.index if len(tensor) > 1 else 0]
        matrix: Array = tensor[head if len(tensor) > 1 else 0]
        start, stop = self._range("q")
        return matrix[start:stop, : self.seqlen_k]

    def blocks(self) -> Iterator[slice]:
        """The query rows in blocks whose scores fit into memory."""
        step = max(_PAIRS_AT_ONCE // max(self.seqlen_k, 1), 1)
        for start in range(0, self.seqlen_q, step):
            yield slice(start, min(start + step, self.seqlen_q))

    def heads(self) -> Iterator[Head]:
        """Every query head, with its inputs."""
        for key_index in range(self.problem.nhead_k):
            k, v = self._rows("k", key_index), self._rows("v", key_index)
            for index in range(key_index * self.problem.ratio, (key_index + 1) * self.problem.ratio):
                yield Head(self, index, key_index, self._rows("q", index), k, v)

    def _range(self, axis: Axis) -> tuple[int, int]:
        """The range of the real tokens on the token axis."""
        packed = self.problem.seqlens_q if axis == "q" else self.problem.seqlens_k
        start = sum(packed[: self.index]) if packed else 0
        return start, start + (self.seqlen_q if axis == "q" else self.seqlen_k)

    def _rows(self, axis: Axis, head: int) -> Float64:
        """Q, K or V of a head, multiplied by its scales: (seqlen, hdim)."""
        stored = self._stored(axis, head)
        rows: Float64 = stored * self._descale(axis, head, len(stored))
        return rows

    def values_of_largest_factor(self, head: int) -> Float64:
        """V of a head, each value multiplied by the largest of the head's factors: (seqlen_k, hdim_v)."""
        stored = self._stored("v", head)
        values: Float64 = stored * np.max(np.abs(self._descale("v", head, len(stored))), initial=0.0)
        return values

    def _stored(self, axis: Axis, head: int) -> Float64:
        if axis != "q" and self.problem.paged:
            return self._paged(axis, head).astype(np.float64)
        stored: Float64 = self.tokens(self.inputs[axis], axis)[head].astype(np.float64)
        return stored

    def _pages(self) -> Array:
        """The numbers of the sequence's pages."""
        if self.problem.kv_lookup_table is KvLookupTable.SGLANG:
            first, last = self.inputs["kv_indptr"][self.index : self.index + 2]
            return self.inputs["kv_page_indices"][first:last]
        return self.inputs["block_table"][self.index, : -(-self.seqlen_k // self.problem.page_size)]

    def _paged(self, axis: Axis, head: int) -> Array:
        """K or V of a head, gathered: (seqlen_k, hdim)."""
        cache = self.inputs[f"{axis}_cache"]
        if self.problem.kv_memory_layout is not KvMemoryLayout.VECTORIZED:
            pages = cache[self._pages(), :, head]
        elif axis == "k":  # (page, hdim / x, page_size, x)
            pages = cache[self._pages(), head].swapaxes(1, 2)
        else:  # (page, page_size / x, hdim, x)
            pages = cache[self._pages(), head].swapaxes(2, 3)
        hdim = self.problem.hdim_q if axis == "k" else self.problem.hdim_v
        return pages.reshape(-1, hdim)[: self.seqlen_k]

    def _descale(self, axis: Axis, head: int, seqlen: int) -> Float64 | float:
        """Factors of the tokens, (seqlen, 1), or one factor."""
        problem = self.problem
        if problem.qscale is Qscale.NO or (axis == "q" and problem.dtype in OF_CACHES):
            return 1.0
        scale = self.inputs[f"{axis}_descale"]
        if problem.qscale is Qscale.BLOCKSCALE:
            size = problem.block_scale_size_q if axis == "q" else problem.block_scale_size_kv
            of_tokens = scale[self.index, head, np.arange(seqlen) // size]
        elif problem.qscale is Qscale.KV_BLOCKSCALE and axis != "q":
            of_tokens = scale[self._pages(), head][np.arange(seqlen) // problem.page_size]
        else:
            return float(scale[0])
        factors: Float64 = of_tokens.astype(np.float64)[:, np.newaxis]
        return factors


@dataclass(frozen=True, slots=True)
class Head:
    """A query head of a sequence.

    ``q`` (seqlen_q, hdim_q), ``k`` (seqlen_k, hdim_q) and ``v`` (seqlen_k, hdim_v) are float64, multiplied by scales.
    ``key_index`` is the head of K and V.
    """

    sequence: Sequence
    index: int
    key_index: int
    q: Float64
    k: Float64
    v: Float64

    @property
    def sink(self) -> float:
        """The logit of the sink, which has no value; -inf if there is no sink."""
        sinks = self.sequence.inputs.get("sink")
        return -np.inf if sinks is None else float(sinks[self.index])

    def scores(self, rows: slice) -> Float64:
        """The input of the softmax, (rows, seqlen_k); -inf where the query does not see the key."""
        scores = self._products(rows)
        cap = self.sequence.problem.logits_soft_cap
        if cap is not None:
            scores = cap * np.tanh(scores / cap)
        visible_scores: Float64 = np.where(self._visible(rows), scores + self.bias(rows), -np.inf)
        return visible_scores

    def slope(self, rows: slice) -> Float64:
        """The derivative of the soft cap, (rows, seqlen_k); (1, 1) if there is none."""
        cap = self.sequence.problem.logits_soft_cap
        if cap is None:
            return np.ones((1, 1))
        slope: Float64 = 1 - np.tanh(self._products(rows) / cap) ** 2
        return slope

    def _products(self, rows: slice) -> Float64:
        """Scaled products of queries and keys, (rows, seqlen_k)."""
        return self.sequence.problem.softmax_scale * self.q[rows] @ self.k.T

    def bias(self, rows: slice) -> Float64:
        """The bias added to the scores, (rows, seqlen_k); (1, 1) if there is none."""
        sequence, problem = self.sequence, self.sequence.problem
        if problem.bias is Bias.BIAS:
            return sequence.pairs(sequence.inputs["bias"], self.index)[rows].astype(np.float64)
        if problem.bias is Bias.NO:
            return np.zeros((1, 1))
        slopes = sequence.inputs["alibi_slopes"]
        slope = float(slopes[sequence.index if len(slopes) > 1 else 0, self.index])
        query, key = self._positions(rows)
        if problem.kernel_mask is Mask.CAUSAL:
            # -slope * (query - key), without the part shared by all keys of a row: it changes lse, but not O.
            distance = np.broadcast_to(-key, (len(query), key.size))
        else:
            # Without a mask, too, the last query is aligned with the last key.
            to_diagonal = 0 if problem.mask == "top_left" else sequence.seqlen_k - sequence.seqlen_q
            distance = np.abs(query + to_diagonal - key)
        return -slope * distance.astype(np.float64)

    def dropout(self, rows: slice) -> Float64:
        """Factors of the weights: 1 / (1 - p) or 0, (rows, seqlen_k); without dropout 1, (1, 1)."""
        if not self.sequence.problem.dropout:
            return np.ones((1, 1))
        return dropout_factors(self.sequence.problem.dropout, self.random_bytes(rows))

    def random_bytes(self, rows: slice) -> NDArray[np.uint8]:
        """The dropout's random byte of every query-key pair, (rows, seqlen_k)."""
        sequence = self.sequence
        number = sequence.index * sequence.problem.nhead_q + self.index
        return random_bytes(sequence.inputs.get("rng_state"), number, rows, sequence.seqlen_k)

    def _positions(self, rows: slice) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Indices of the queries, (rows, 1), and of the keys, (1, seqlen_k)."""
        query = np.arange(rows.start, rows.stop, dtype=np.int64)
        return query[:, np.newaxis], np.arange(self.sequence.seqlen_k, dtype=np.int64)[np.newaxis]

    def _visible(self, rows: slice) -> NDArray[np.bool_]:
        """(rows, seqlen_k): whether the query sees the key."""
        sequence, problem = self.sequence, self.sequence.problem
        query, key = self._positions(rows)
        diagonal = query + (sequence.seqlen_k - sequence.seqlen_q if problem.mask_corner else 0)
        visible = np.ones(np.broadcast_shapes(query.shape, key.shape), bool)
        if problem.window_left >= 0:
            visible &= (key >= diagonal - problem.window_left) | (key < problem.sink_size)
        if problem.window_right >= 0:
            visible &= key <= diagonal + problem.window_right
        if problem.block_masked:
            bitmap = sequence.inputs["block_mask"][sequence.index, self.index]
            visible &= bitmap[query // problem.block_mask_q, key // problem.block_mask_kv] != 0
        return visible


def sequences(problem: Problem, inputs: Mapping[str, Array]) -> Iterator[Sequence]:
    """Every sequence that is computed: those with at most min_seqlen_q queries are skipped."""
    queries, keys = _lengths(problem, inputs, "q"), _lengths(problem, inputs, "k")
    for index, (seqlen_q, seqlen_k) in enumerate(zip(queries, keys, strict=True)):
        if problem.min_seqlen_q == 0 or seqlen_q > problem.min_seqlen_q:
            yield Sequence(problem, inputs, index, seqlen_q, seqlen_k)


def _lengths(problem: Problem, inputs: Mapping[str, Array], axis: Literal["q", "k"]) -> list[int]:
    """The real tokens of each sequence: as stated by an input, otherwise all that are stored."""
    if f"seqlens_{axis}" in inputs:
        return [int(length) for length in inputs[f"seqlens_{axis}"]]
    if axis == "k" and problem.kv_lookup_table is KvLookupTable.SGLANG:
        pages, last = np.diff(inputs["kv_indptr"]), inputs["kv_last_page_lens"]
        return [int(length) for length in np.where(pages > 0, (pages - 1) * problem.page_size + last, 0)]
    return [stored[axis == "k"] for stored in problem.sequences]
