"""The reference results that kernels are checked against: every operation in float64 NumPy, by its definition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from catalog.ops.attention.fields import Op
from catalog.ops.attention.problem import Problem
from catalog.ops.attention.reference.append import appended, rotated
from catalog.ops.attention.reference.sequences import sequences

Array = NDArray[Any]
Float64 = NDArray[np.float64]


def reference(problem: Problem, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The results of ``problem`` by name: the ``outputs`` of a run in float64, ``randval`` in uint8.

    Attention always has ``lse``, even if the problem does not ask for it. A row that sees no key and has no sink has
    o = 0 and lse = -inf. Elements that a run does not write are 0: rows after the real length of a sequence, skipped
    sequences, and dbias where a mask hides the key.

    Args:
        problem: the problem to compute.
        inputs: the tensors of a run by name, of the problem's shapes and any real dtype; optional ones may be absent.
            They are not modified: an updated tensor is returned as a new one.
    """
    return _OPERATIONS[problem.op](problem, inputs)


def _attention(problem: Problem, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """O = (Z * softmax(S)) V, where Z are the dropout factors, and the logarithm of the softmax's denominator."""
    results = {"o": np.zeros(problem.shapes["o"]), "lse": np.zeros(lse_shape(problem))} | _zeros(problem, "randval")
    for sequence in sequences(problem, inputs):
        o, lse = sequence.tokens(results["o"], "q"), sequence.rows(results["lse"])
        for head in sequence.heads():
            for rows in sequence.blocks():
                scores = head.scores(rows)
                lse[head.index, rows] = log_sum_exp(scores, head.sink)
                p = probabilities(scores, lse[head.index, rows])
                o[head.index, rows] = (head.dropout(rows) * p) @ head.v
                if "randval" in results:
                    sequence.pairs(results["randval"], head.index)[rows] = head.random_bytes(rows)
    return results


def _backward(problem: Problem, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The gradients of sum(dO * O) + sum(dLSE * LSE).

    With P = softmax(S), S = cap(scale Q K^T) + bias and Z the dropout's factors, O = (Z * P) V. So dV = (Z * P)^T dO,
    and dP = Z * (dO V^T). The softmax's derivative is dS = P * (dP - delta), delta = sum over keys of dP * P, which is
    the sum over the head dim of dO * O; that of LSE is P, so dLSE is subtracted from delta. dbias = dS. With cap' the
    slope of the soft cap, 1 without one, dQ = scale (cap' * dS) K and dK = scale (cap' * dS)^T Q. Keys and values
    gather from all query heads that read them.
    """
    results = _zeros(problem, "dq", "dk", "dv", "dbias", "randval")
    for sequence in sequences(problem, inputs):
        lse, dlse = sequence.rows(inputs["lse"]), sequence.rows(lse_gradient(problem, inputs))
        dq = sequence.tokens(results["dq"], "q")
        dk, dv = (sequence.tokens(results[name], "k") for name in ("dk", "dv"))
        for head in sequence.heads():
            o, do = (sequence.tokens(inputs[name], "q")[head.index].astype(np.float64) for name in ("o", "do"))
            for rows in sequence.blocks():
                z = head.dropout(rows)
                p = probabilities(head.scores(rows), lse[head.index, rows])
                dp = z * (do[rows] @ head.v.T)
                delta = np.sum(do[rows] * o[rows], axis=1, keepdims=True) - dlse[head.index, rows, np.newaxis]
                ds = p * (dp - delta)
                of_products = problem.softmax_scale * head.slope(rows) * ds
                dq[head.index, rows] = of_products @ head.k
                dk[head.key_index] += of_products.T @ head.q[rows]
                dv[head.key_index] += (z * p).T @ do[rows]
                if "dbias" in results:
                    sequence.pairs(results["dbias"], head.index)[rows] = ds
                if "randval" in results:
                    sequence.pairs(results["randval"], head.index)[rows] = head.random_bytes(rows)
    return results


def _append(problem: Problem, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The cache with the new tokens, keys rotated to their positions, and the rotated queries."""
    return appended(problem, inputs, rotated)


def lse_shape(problem: Problem) -> tuple[int, ...]:
    """(batch, nhead_q, seqlen_q), or (nhead_q, tokens_q) for packed sequences."""
    if problem.seqlens_q is not None:
        return problem.nhead_q, sum(problem.seqlens_q)
    return problem.batch, problem.nhead_q, problem.seqlen_q


def lse_gradient(problem: Problem, inputs: Mapping[str, Array]) -> Float64:
    """The gradient of LSE for every row; 0 if none is given, and where a row sees no key: its LSE is constant."""
    if not problem.dlse:
        return np.zeros(lse_shape(problem))
    return np.where(np.isneginf(inputs["lse"]), 0.0, inputs["dlse"].astype(np.float64))


def log_sum_exp(scores: Float64, sink: float) -> Float64:
    """The natural logarithm of sum(exp(score)) + exp(sink) of each row; -inf where all of them are -inf."""
    largest = np.max(scores, axis=1, initial=sink)
    shift = np.where(np.isneginf(largest), 0.0, largest)
    total = np.exp(scores - shift[:, np.newaxis]).sum(axis=1) + np.exp(sink - shift)
    with np.errstate(divide="ignore"):
        lse: Float64 = shift + np.log(total)
    return lse


def probabilities(scores: Float64, lse: Array) -> Float64:
    """exp(score - lse); 0 in a row whose lse is -inf."""
    lse = lse.astype(np.float64)[:, np.newaxis]
    blind = np.isneginf(lse)
    p: Float64 = np.where(blind, 0.0, np.exp(scores - np.where(blind, np.inf, lse)))
    return p


def _zeros(problem: Problem, *names: str) -> dict[str, Array]:
    """Zeros for those of the named results that the problem has."""
    return {
        name: np.zeros(problem.shapes[name], np.uint8 if name == "randval" else np.float64)
        for name in names
        if name in problem.shapes
    }


_OPERATIONS: Mapping[Op, Callable[[Problem, Mapping[str, Array]], dict[str, Array]]] = MappingProxyType(
    {
        "fwd": _attention,
        "splitkv": _attention,
        "pagedkv": _attention,
        "batch_prefill": _attention,
        "appendkv": _append,
        "bwd": _backward,
    }
)
