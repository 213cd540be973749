"""What the stages of a plan hand to each other: how many splits there are, and the arrays of partial results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from catalog.runtime.devices import is_amd
from catalog.schema.fields import Family, Mode
from catalog.schema.kernel import Kernel
from catalog.schema.problem import Problem

MAX_SPLITS = 128
"""More splits than this never pay: combining them costs as much as they save. CK has the same limit."""

_SHORTEST_SPLIT = 512
"""Keys of a split that are worth a work item of their own."""

_ITEMS_PER_THREAD = 4
_DETERMINISTIC_SPLITS = 8


@dataclass(frozen=True, slots=True)
class Partial:
    """A dense float32 array of partial results, with its strides (batch, nhead, seqlen, split), in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, int, int, int]

    @property
    def bytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * 4


def splits_of(problem: Problem, kernels: Sequence[Kernel], threads: int) -> int:
    """Parts that the keys are divided into, at least 1.

    A deterministic backward depends on the problem alone, so that sums are the same on every machine; everything else
    also on how many threads there are to keep busy. CK's backward has no say in it: a deterministic kernel has a part
    for each of its tiles, every other one adds up in one array.
    """
    columns = max(1, problem.batch * problem.nhead_k)
    most = max(1, -(-problem.seqlen_k // _SHORTEST_SPLIT))
    if problem.op == "splitkv":
        tile_m0 = next(k.algorithm.tile_m0 for k in kernels if k.family is Family.FWD_SPLITKV)
        items = columns * max(1, -(-problem.seqlen_q * problem.ratio // tile_m0))
        wanted = -(-_ITEMS_PER_THREAD * threads // items)
        return problem.num_splits or min(wanted, most, MAX_SPLITS)
    if problem.op == "bwd":
        main = next(k for k in kernels if k.family is Family.BWD_DQ_DK_DV)
        if is_amd(main.arch):
            return max(1, -(-problem.seqlen_k // main.algorithm.tile_n0)) if problem.deterministic else 1
        if problem.deterministic:
            return min(_DETERMINISTIC_SPLITS, most)
        return min(-(-_ITEMS_PER_THREAD * threads // columns), most)
    return 1


def workspace_of(problem: Problem, num_splits: int) -> dict[str, Partial]:
    """The arrays between the stages, by their place in the argument struct; they begin uninitialised."""
    if problem.op == "splitkv":
        return {
            "o_acc": _rows(problem, num_splits, problem.hdim_v),
            "lse_acc": _scalars(problem, num_splits),
        }
    if problem.op == "bwd":
        return {"delta": _scalars(problem, 1), "dq_acc": _rows(problem, num_splits, problem.hdim_q)}
    return {}


def _rows(problem: Problem, splits: int, hdim: int) -> Partial:
    """(splits, batch, nhead_q, seqlen_q, hdim), in group mode (splits, nhead_q, tokens_q, hdim)."""
    rows = _row_shape(problem)
    return Partial((splits, *rows, hdim), _strides(rows, hdim))


def _scalars(problem: Problem, splits: int) -> Partial:
    rows = _row_shape(problem)
    return Partial((splits, *rows), _strides(rows, 1))


def _row_shape(problem: Problem) -> tuple[int, ...]:
    if problem.mode is Mode.GROUP:
        return (problem.nhead_q, sum(problem.seqlens_q or ()))
    return (problem.batch, problem.nhead_q, problem.seqlen_q)


def _strides(rows: tuple[int, ...], hdim: int) -> tuple[int, int, int, int]:
    """Of a dense array (splits, *rows, hdim); packed sequences have no batch axis."""
    token, nhead, *batch, split = accumulate((hdim, *reversed(rows)), mul)
    return batch[0] if batch else 0, nhead, token, split
