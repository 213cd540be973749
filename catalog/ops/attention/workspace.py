"""What the stages of an attention plan share: the number of splits, and the arrays of partial results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from catalog.ops.attention.problem import Problem
from catalog.ops.families import main_stage
from catalog.schema.kernel import Kernel
from catalog.schema.workspace import Partial, Workspace

MAX_SPLITS = 128
"""More splits never pay: combining them costs as much as they save. CK has the same limit."""

_SHORTEST_SPLIT = 512
"""Minimum number of keys in a split for it to be worth a work item of its own."""

_FEWEST_TILES, _FEWEST_LONG_TILES = 4, 2
"""Minimum number of a kernel's tiles of keys in a split for it to be worth a block of its own. The second one is for
keys of more than :data:`_LONG` elements.
"""

_LONG = 512

_ITEMS_PER_THREAD = 4
_NEARLY_FULL = 0.85
_DETERMINISTIC_SPLITS = 8


def splits_of(problem: Problem, kernels: Sequence[Kernel], threads: int, *, whole_waves: bool) -> int:
    """The preferred number of parts to divide the keys into, at least 1.

    For a deterministic backward it depends only on the problem, so that sums are equal on every machine; otherwise also
    on the number of threads to keep busy. The kernels decide the actual number.

    Args:
        problem: the problem to compute.
        kernels: the stages of its plan.
        threads: number of threads that share the work of a kernel.
        whole_waves: whether to split the keys so that blocks fill whole waves of the device.
    """
    if not problem.divided:
        return 1
    columns = max(1, problem.batch * problem.nhead_k)
    most = max(1, -(-problem.seqlen_k // _SHORTEST_SPLIT))
    if problem.op == "splitkv":
        main = kernels[main_stage(problem, kernels)]
        items: int = columns * max(1, -(-problem.seqlen_q * problem.ratio // max(1, main.algorithm.tile_m0)))
        if problem.num_splits:
            return problem.num_splits
        if whole_waves:
            fewest = _FEWEST_LONG_TILES if problem.hdim_q > _LONG else _FEWEST_TILES
            shortest = fewest * main.algorithm.tile_n0 or _SHORTEST_SPLIT
            blocks = max(1, -(-problem.seqlen_k // shortest))
            return _whole_waves(items, threads * max(1, main.algorithm.block_per_cu), min(blocks, MAX_SPLITS))
        return min(-(-_ITEMS_PER_THREAD * threads // items), most, MAX_SPLITS)
    if problem.deterministic:
        return min(_DETERMINISTIC_SPLITS, most)
    return min(-(-_ITEMS_PER_THREAD * threads // columns), most)


def _whole_waves(items: int, places: int, most: int) -> int:
    """The fewest splits of each of ``items`` that nearly fill the ``places`` for blocks that run at the same time.

    FlashAttention-2 chooses splits this way: multiprocessors are idle only in the last wave of blocks.
    """

    def filled(splits: int) -> float:
        waves = items * splits / places
        return waves / math.ceil(waves)

    enough = _NEARLY_FULL * max(map(filled, range(1, most + 1)))
    return next(splits for splits in range(1, most + 1) if filled(splits) >= enough)


def workspace_of(problem: Problem, num_splits: int, insisting: Sequence[Any] = ()) -> Workspace:
    """The workspace with ``num_splits`` splits.

    ``insisting`` are the workspaces that the kernels of a plan need. They may require more bytes for partial results;
    those that none of them needs are left out.
    """
    if not problem.divided:
        return Workspace(num_splits)
    partials, strides = {}, _strides(problem)
    for name, (width, least) in _parts(problem, num_splits).items():
        needed = [getattr(size, name) for size in insisting] or [least]
        if any(needed):
            partials[name] = Partial(max(least, *needed), tuple([stride * width for stride in strides]))
    return Workspace(num_splits, partials)


def partial_bytes(problem: Problem, num_splits: int) -> dict[str, int]:
    """Bytes of each partial result with ``num_splits`` splits, by its slot in the argument struct."""
    if not problem.divided:
        return {}
    return {name: size for name, (_, size) in _parts(problem, num_splits).items()}


def _parts(problem: Problem, num_splits: int) -> Mapping[str, tuple[int, int]]:
    """For each partial result ``width``, the float32 numbers of a split for each row of O, and its bytes.

    It is an array (splits, batch, nhead_q, seqlen_q, width), without a batch in group mode.
    """
    column = 4 * problem.nhead_q * problem.extents["tokens_q"]
    split = num_splits * column
    if problem.op == "splitkv":
        return {"o_acc": (problem.hdim_v, split * problem.hdim_v), "lse_acc": (1, split)}
    return {"delta": (1, column), "dq_acc": (problem.hdim_q, split * problem.hdim_q)}


def _strides(problem: Problem) -> tuple[int, int, int, int]:
    """Strides of a dense array of :func:`_parts` of width 1; packed sequences have no batch axis."""
    if problem.seqlens_q is not None:
        tokens = problem.extents["tokens_q"]
        return 0, tokens, 1, problem.nhead_q * tokens
    batch = problem.nhead_q * problem.seqlen_q
    return batch, problem.seqlen_q, 1, problem.batch * batch
