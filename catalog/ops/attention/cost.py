"""The work of a problem by convention, as counted in TFLOP/s."""

from __future__ import annotations

from typing import TYPE_CHECKING

from catalog.ops.attention.traits import Mode

if TYPE_CHECKING:
    from catalog.ops.attention.problem import Problem


def flops_of(problem: Problem) -> int:
    """FLOP of the matrix products; a multiply-add counts as 2.

    For each query-key pair of a query head: forward Q K^T and P V, 2 (hdim_q + hdim_v); backward Q K^T, dO V^T, P^T dO,
    dS^T Q and dS K, 2 (3 hdim_q + 2 hdim_v). Appending to a cache multiplies no matrices: 0.

    Without a mask all pairs count; under a causal mask half of all, whatever its corner (the convention of published
    figures); under a window exactly the visible pairs, without sinks. Group mode sums over its sequences. Blocks that a
    block mask leaves out count as well: which these are is a tensor's content, and a problem has none.
    """
    if problem.op == "appendkv":
        return 0
    of_q, of_v = (3, 2) if problem.op == "bwd" else (1, 1)
    flop_of_pair = 2 * problem.nhead_q * (of_q * problem.hdim_q + of_v * problem.hdim_v)
    if problem.window is not None:
        return flop_of_pair * sum(visible_pairs(problem, *lengths) for lengths in _distinct_sequences(problem))
    pairs = sum(count * seqlen_q * seqlen_k for count, seqlen_q, seqlen_k in _distinct_sequences(problem))
    return flop_of_pair * pairs if problem.mask == "no" else flop_of_pair // 2 * pairs


def _distinct_sequences(problem: Problem) -> list[tuple[int, int, int]]:
    """(count, queries, keys) of equal sequences: one entry in batch mode, where all sequences have the same lengths."""
    if problem.mode is Mode.BATCH:
        return [(problem.batch, problem.seqlen_q, problem.seqlen_k)]
    return [(1, *lengths) for lengths in problem.sequences]


def visible_pairs(problem: Problem, count: int, seqlen_q: int, seqlen_k: int) -> int:
    """Pairs of ``count`` equal sequences that the mask and window show, in closed form.

    The keys of query i end at clamp(i + to_end) and begin at clamp(i + to_begin), clamped to [0, seqlen_k].
    """

    def sum_of_clamps(offset: int) -> int:
        def below(stop: int) -> int:  # sum of clamp(i) over every i < stop
            inside = min(max(stop, 0), seqlen_k)
            return inside * (inside - 1) // 2 + max(stop - inside, 0) * seqlen_k

        return below(offset + seqlen_q) - below(offset)

    diagonal = seqlen_k - seqlen_q if problem.mask_corner else 0
    ends = seqlen_q * seqlen_k if problem.window_right < 0 else sum_of_clamps(diagonal + problem.window_right + 1)
    begins = 0 if problem.window_left < 0 else sum_of_clamps(diagonal - problem.window_left)
    return count * (ends - begins)
