"""What the stages of an attention plan share: the number of splits, and the arrays of partial results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from catalog.ops.attention.problem import Problem
from catalog.ops.families import main_stage
from catalog.schema.kernel import Kernel
from catalog.schema.workspace import Partial, Workspace

MAX_SPLITS = 128
"""More splits never pay: combining them costs as much as they save. CK has the same limit."""

_SHORTEST_SPLIT = 512
"""Minimum number of keys in a split for it to be worth a work item of its own."""

_FEWEST_TILES = 4
"""Minimum number of a kernel's tiles of keys in a split for it to be worth a block of its own."""

_LONG = 512
"""Keys of more elements are worth splits of two tiles, or of three if there are more than :data:`_FEW` splits: on an
H200, 64 splits of two such tiles take 7 us longer than 43 of three, as combining them takes longer.
"""

_FEW = 16

_SPLITS_PER_THREAD = 2
"""Of decoding on the CPU. On a Zen 5, four take 5 to 15 % longer for 4 MB of keys and values, and as long for 16 MB.
With one, threads are idle while another one has lost its core.
"""

_ITEMS_PER_THREAD = 4
_NEARLY_FULL = 0.9
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
    columns = problem.batch * problem.nhead_k or 1
    if problem.op == "bwd":
        most = most_splits(problem)
        return most if problem.deterministic else min(-(-_ITEMS_PER_THREAD * threads // columns), most)
    if problem.op != "splitkv":
        return 1
    if problem.num_splits:
        return problem.num_splits
    main = kernels[main_stage(problem, kernels)]
    items: int = columns * max(1, -(-problem.seqlen_q * problem.ratio // max(1, main.algorithm.tile_m0)))
    if whole_waves:
        tiles = max(1, -(-problem.seqlen_k // (main.algorithm.tile_n0 or _SHORTEST_SPLIT)))
        most = -(-tiles // _FEWEST_TILES)
        if problem.hdim_q > _LONG:
            most = max(min(-(-tiles // 2), _FEW), -(-tiles // 3))
        places = threads * max(1, main.algorithm.block_per_cu)
        return _whole_waves(items, tiles, places, min(most, MAX_SPLITS))
    return _even_splits(items, threads, min(-(-problem.seqlen_k // _SHORTEST_SPLIT) or 1, MAX_SPLITS))


def most_splits(problem: Problem) -> int:
    """An upper bound of :func:`splits_of`."""
    if problem.op == "splitkv":
        return problem.num_splits or MAX_SPLITS
    most = -(-problem.seqlen_k // _SHORTEST_SPLIT) or 1
    return min(_DETERMINISTIC_SPLITS, most) if problem.deterministic else most


def _even_splits(items: int, threads: int, most: int) -> int:
    """The fewest splits of each of ``items`` that give the ``threads`` enough work, and nearly the same to each."""

    def filled(splits: int) -> float:
        return items * splits / (threads * math.ceil(items * splits / threads))

    first = min(max(1, -(-_SPLITS_PER_THREAD * threads // items)), most)
    possible = range(first, min(2 * first, most) + 1)
    enough = _NEARLY_FULL * max(map(filled, possible))
    return next(splits for splits in possible if filled(splits) >= enough)


def _whole_waves(items: int, tiles: int, places: int, most: int) -> int:
    """The fewest splits of each of ``items`` that nearly fill the ``places`` for blocks that run at the same time.

    FlashAttention-2 chooses splits this way: multiprocessors are idle only in the last wave of blocks. A split has
    whole tiles of keys, so they are also idle where the splits do not divide the ``tiles`` of an item.
    """

    def filled(splits: int) -> float:
        waves = math.ceil(items * splits / places)
        return items * tiles / (places * waves * math.ceil(tiles / splits))

    enough = _NEARLY_FULL * max(map(filled, range(1, most + 1)))
    return next(splits for splits in range(1, most + 1) if filled(splits) >= enough)


def workspace_of(problem: Problem, num_splits: int, insisting: Sequence[Any] = ()) -> Workspace:
    """The workspace with ``num_splits`` splits.

    ``insisting`` are the workspaces that the kernels of a plan need. They may require more bytes for partial results;
    those that none of them needs are left out.
    """
    packed = problem.seqlens_q is not None
    nhead_q, rows = problem.nhead_q, problem.extents["tokens_q"]
    head = rows if packed else problem.seqlen_q
    partials = {}
    for name, least in partial_bytes(problem, num_splits).items():
        needed = 0 if insisting else least
        for size in insisting:
            asked = getattr(size, name)
            if asked > needed:  # noqa: PLR1730 - max() takes longer than all else here
                needed = asked
        if needed:
            width = problem.hdim_q if name == "dq_acc" else problem.hdim_v if name == "o_acc" else 1
            of_head, of_split = head * width, nhead_q * rows * width
            strides = (0 if packed else nhead_q * of_head, of_head, width, of_split)  # packed: no axis of batches
            partials[name] = Partial(needed if needed > least else least, strides)
    return Workspace(num_splits, partials)


def partial_bytes(problem: Problem, num_splits: int) -> dict[str, int]:
    """Bytes of each partial result with ``num_splits`` splits, by its slot in the argument struct.

    Each is a dense array of float32, (splits, batch, nhead_q, seqlen_q, width), without a batch in group mode.
    """
    op, column = problem.op, 4 * problem.nhead_q * problem.extents["tokens_q"]
    if op == "bwd":
        return {"delta": column, "dq_acc": num_splits * column * problem.hdim_q}
    if op == "splitkv":
        return {"o_acc": num_splits * column * problem.hdim_v, "lse_acc": num_splits * column}
    return {}
