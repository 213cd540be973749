"""What the stages of a plan hand to each other: how many splits there are, and the arrays of partial results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from catalog.backends import backend_of
from catalog.schema.fields import Family, Mode
from catalog.schema.kernel import Kernel
from catalog.schema.problem import Problem

if TYPE_CHECKING:
    from catalog.runtime.devices.abi import CatalogWorkspace

MAX_SPLITS = 128
"""More splits than this never pay: combining them costs as much as they save. CK has the same limit."""

_SHORTEST_SPLIT = 512
"""Keys of a split that are worth a work item of their own."""

_ITEMS_PER_THREAD = 4
_NEARLY_FULL = 0.85
_DETERMINISTIC_SPLITS = 8


class Partial(NamedTuple):
    """Float32 partial results, dense: bytes, and strides (batch, nhead, seqlen, split) in elements."""

    bytes: int
    strides: tuple[int, int, int, int]


class Workspace(NamedTuple):
    """What the stages of a plan share: the parts that the keys are divided into, and partial results by their place in
    the argument struct, which begin uninitialised.
    """

    num_splits: int = 1
    partials: Mapping[str, Partial] = MappingProxyType({})


NO_WORKSPACE = Workspace()
"""That of a single stage."""


def splits_of(problem: Problem, kernels: Sequence[Kernel], threads: int) -> int:
    """Parts that the keys are divided into, at least 1.

    A deterministic backward depends on the problem alone, so that sums are the same on every machine; everything else
    also on how many threads there are to keep busy. It is a wish: the kernels say how many there will be.
    """
    columns = max(1, problem.batch * problem.nhead_k)
    most = max(1, -(-problem.seqlen_k // _SHORTEST_SPLIT))
    if problem.op == "splitkv":
        main = next(kernel for kernel in kernels if kernel.family is Family.FWD_SPLITKV)
        items = columns * max(1, -(-problem.seqlen_q * problem.ratio // main.algorithm.tile_m0))
        if problem.num_splits:
            return problem.num_splits
        if backend_of(main.arch).whole_waves:
            return _whole_waves(items, threads * max(1, main.algorithm.block_per_cu), min(most, MAX_SPLITS))
        return min(-(-_ITEMS_PER_THREAD * threads // items), most, MAX_SPLITS)
    if problem.op == "bwd":
        if problem.deterministic:
            return min(_DETERMINISTIC_SPLITS, most)
        return min(-(-_ITEMS_PER_THREAD * threads // columns), most)
    return 1


def _whole_waves(items: int, places: int, most: int) -> int:
    """The fewest splits of each of ``items`` that nearly fill the ``places`` whenever blocks run side by side.

    As FlashAttention-2 chooses them: the last wave of blocks is what leaves multiprocessors idle.
    """

    def filled(splits: int) -> float:
        waves = items * splits / places
        return waves / math.ceil(waves)

    enough = _NEARLY_FULL * max(map(filled, range(1, most + 1)))
    return next(splits for splits in range(1, most + 1) if filled(splits) >= enough)


def workspace_of(problem: Problem, num_splits: int, insisting: Sequence[CatalogWorkspace] = ()) -> Workspace:
    """The workspace with so many splits; kernels may insist on more bytes of partial results."""
    partials = {}
    if problem.op == "splitkv":
        partials = {"o_acc": _rows(problem, num_splits, problem.hdim_v), "lse_acc": _rows(problem, num_splits, 1)}
    if problem.op == "bwd":
        partials = {"delta": _rows(problem, 1, 1), "dq_acc": _rows(problem, num_splits, problem.hdim_q)}
    for needed in insisting:
        for name, partial in partials.items():
            if getattr(needed, name) > partial.bytes:
                partials[name] = partial._replace(bytes=getattr(needed, name))
    return Workspace(num_splits, partials)


def _rows(problem: Problem, splits: int, width: int) -> Partial:
    """``width`` numbers for each row of O: (splits, batch, nhead_q, seqlen_q, width), without a batch in group mode."""
    rows = _row_shape(problem)
    return Partial(4 * splits * math.prod(rows) * width, _strides(rows, width))


def _row_shape(problem: Problem) -> tuple[int, ...]:
    if problem.mode is Mode.GROUP:
        return (problem.nhead_q, problem.tokens_q)
    return (problem.batch, problem.nhead_q, problem.seqlen_q)


def _strides(rows: tuple[int, ...], hdim: int) -> tuple[int, int, int, int]:
    """Of a dense array (splits, *rows, hdim); packed sequences have no batch axis."""
    token, nhead, *batch, split = accumulate((hdim, *reversed(rows)), mul)
    return batch[0] if batch else 0, nhead, token, split
