"""What the stages of a plan hand to each other: how many splits there are, and the arrays of partial results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from catalog.ops.attention.problem import Problem
from catalog.ops.attention.traits import Family
from catalog.schema.kernel import Kernel
from catalog.schema.workspace import Partial, Workspace

MAX_SPLITS = 128
"""More splits than this never pay: combining them costs as much as they save. CK has the same limit."""

_SHORTEST_SPLIT = 512
"""Keys of a split that are worth a work item of their own."""

_ITEMS_PER_THREAD = 4
_NEARLY_FULL = 0.85
_DETERMINISTIC_SPLITS = 8


def splits_of(problem: Problem, kernels: Sequence[Kernel], threads: int, *, whole_waves: bool) -> int:
    """Parts that the keys are divided into, at least 1.

    A deterministic backward depends on the problem alone, so that sums are the same on every machine; everything else
    also on how many threads there are to keep busy. It is a wish: the kernels say how many there will be.

    Args:
        problem: what is computed.
        kernels: the stages of its plan.
        threads: what a kernel's work is divided among.
        whole_waves: the keys are split so that blocks fill whole waves of the device.
    """
    if not problem.divided:
        return 1
    columns = max(1, problem.batch * problem.nhead_k)
    most = max(1, -(-problem.seqlen_k // _SHORTEST_SPLIT))
    if problem.op == "splitkv":
        main = next(kernel for kernel in kernels if kernel.family == Family.FWD_SPLITKV)
        items: int = columns * max(1, -(-problem.seqlen_q * problem.ratio // main.algorithm.tile_m0))
        if problem.num_splits:
            return problem.num_splits
        if whole_waves:
            return _whole_waves(items, threads * max(1, main.algorithm.block_per_cu), min(most, MAX_SPLITS))
        return min(-(-_ITEMS_PER_THREAD * threads // items), most, MAX_SPLITS)
    if problem.deterministic:
        return min(_DETERMINISTIC_SPLITS, most)
    return min(-(-_ITEMS_PER_THREAD * threads // columns), most)


def _whole_waves(items: int, places: int, most: int) -> int:
    """The fewest splits of each of ``items`` that nearly fill the ``places`` whenever blocks run side by side.

    As FlashAttention-2 chooses them: the last wave of blocks is what leaves multiprocessors idle.
    """

    def filled(splits: int) -> float:
        waves = items * splits / places
        return waves / math.ceil(waves)

    enough = _NEARLY_FULL * max(map(filled, range(1, most + 1)))
    return next(splits for splits in range(1, most + 1) if filled(splits) >= enough)


def workspace_of(problem: Problem, num_splits: int, insisting: Sequence[Any] = ()) -> Workspace:
    """The workspace with so many splits; kernels may insist on more bytes of partial results."""
    if not problem.divided:
        return Workspace(num_splits)
    least, partials = partial_bytes(problem, num_splits), {}
    for name, (_, width) in _parts(problem, num_splits).items():
        size = max([least[name], *[getattr(needed, name) for needed in insisting]])
        partials[name] = Partial(size, _strides(problem, width))
    return Workspace(num_splits, partials)


def partial_bytes(problem: Problem, num_splits: int) -> dict[str, int]:
    """Bytes of each partial result with so many splits, by its place in the argument struct."""
    if not problem.divided:
        return {}
    rows = problem.nhead_q * problem.tokens_q
    return {name: 4 * splits * rows * width for name, (splits, width) in _parts(problem, num_splits).items()}


def _parts(problem: Problem, num_splits: int) -> Mapping[str, tuple[int, int]]:
    """Of each partial result, (splits, ``width``): each split has ``width`` numbers for each row of O.

    It is an array (splits, batch, nhead_q, seqlen_q, width), without a batch in group mode.
    """
    if problem.op == "splitkv":
        return {"o_acc": (num_splits, problem.hdim_v), "lse_acc": (num_splits, 1)}
    return {"delta": (1, 1), "dq_acc": (num_splits, problem.hdim_q)}


def _strides(problem: Problem, width: int) -> tuple[int, int, int, int]:
    """Of a dense array as :func:`_parts` has them; packed sequences have no batch axis."""
    if problem.seqlens_q is not None:
        nhead = problem.tokens_q * width
        return 0, nhead, width, problem.nhead_q * nhead
    nhead = problem.seqlen_q * width
    batch = problem.nhead_q * nhead
    return batch, nhead, width, problem.batch * batch
