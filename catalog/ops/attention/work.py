"""What a kernel of attention does for a problem, in the units in which its time grows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from catalog.ops.attention.cost import visible_pairs
from catalog.ops.attention.traits import Pipeline
from catalog.ops.extents import register_blocks

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from catalog.ops.attention.kernel import AttentionKernel
    from catalog.ops.attention.problem import Problem

_HOST = frozenset((Pipeline.HOST_PANEL, Pipeline.HOST_BF16, Pipeline.HOST_AMX))

_FEW_ROWS = 16
"""Up to this many query rows of a sequence and key head, a host kernel reads K and V without copying them."""

_ITEM_BYTES = 256 << 10
"""Bytes of Q and O of the rows that share a copied tile of K and V on the host: ``kernels/host/scratch.hpp``."""

_ITEMS_PER_THREAD = 4
"""Work items of a thread below which the host divides them further: ``kernels/host/work.hpp``."""


def work_of(problem: Problem, kernel: AttentionKernel, units: int) -> dict[str, float]:
    """The terms of a kernel's time, by name; see :meth:`catalog.ops.protocol.Operation.work`.

    Packed sequences count as equally long ones.
    """
    counted = _host_work if kernel.algorithm.pipeline in _HOST else _gpu_work
    return counted(problem, kernel, units)


def _gpu_work(problem: Problem, kernel: AttentionKernel, units: int) -> dict[str, float]:
    """Terms for blocks of a grid: a tile of queries of one head, against the tiles of keys that it sees.

    A grid takes as long as its longest block, or as the busiest unit, or as its waves (the last one is partly empty).
    """
    algorithm = kernel.algorithm
    tile_m, tile_n = max(1, algorithm.tile_m0), max(1, algorithm.tile_n0)
    columns = problem.batch * problem.nhead_q
    seen = _seen(problem, 1, tile_m, tile_n)
    depth = problem.hdim_q + problem.hdim_v
    area = tile_m * depth
    blocks, total, longest = len(seen) * columns, float(seen.sum()) * columns * area, float(seen.max()) * area
    waves = math.ceil(blocks / (units * max(1, algorithm.block_per_cu)))
    mean = total / max(1, blocks)
    return {
        "launch": 1.0,
        "blocks": blocks / units,
        "steps": float(seen.sum()) / tile_n * columns / units,
        "area": total / units,
        "longest": longest,
        "busiest": math.ceil(blocks / units) * mean,
        "waves": waves * mean,
        "pairs": visible_pairs(problem, columns, *_lengths(problem)) * depth / units,
        "traffic": float(problem.traffic),
    }


def _host_work(problem: Problem, kernel: AttentionKernel, units: int) -> dict[str, float]:
    """Terms for work items of threads: rows of queries, in register blocks of a few, against copied tiles of keys.

    Rows of a tile that fill no whole register block are computed in halves, then one at a time.
    """
    algorithm = kernel.algorithm
    tile_m, tile_n = max(1, algorithm.tile_m0), max(1, algorithm.tile_n0)
    rows, columns = _lengths(problem)[0] * problem.ratio, problem.batch * problem.nhead_k
    depth = problem.hdim_q + problem.hdim_v
    scale = columns * depth / units
    seen = _seen(problem, problem.ratio, tile_m, max(1, algorithm.warp_n0))
    last = (rows - 1) % tile_m + 1  # rows of the last tile
    pairs = visible_pairs(problem, 1, *_lengths(problem)) * problem.ratio * scale
    common = {"launch": 1.0, "rows": float(rows * columns) / units}
    if rows <= _FEW_ROWS:
        return {**common, "direct": pairs}
    item = _item_rows(rows, columns, tile_m, depth, units)
    copied = _seen(problem, problem.ratio, item, 1)
    before, end = float(seen[:-1].sum()), float(seen[-1])
    terms = {**common, "pairs": pairs, "items": len(copied) * columns / units, "copied": float(copied.sum()) * scale}
    terms["area"] = (before * tile_m + end * last) * scale
    terms["steps"] = float((-(-seen // tile_n)).sum()) * columns / units
    for product, block in (("scores", algorithm.warp_m0), ("sums", algorithm.warp_m1)):
        whole, tail = register_blocks(tile_m, max(1, block)), register_blocks(last, max(1, block))
        for name, of_tile, of_last in zip(("whole", "half", "single"), whole, tail, strict=True):
            terms[f"{name}_{product}"] = (before * of_tile + end * of_last) * scale
    return terms


def _lengths(problem: Problem) -> tuple[int, int]:
    """Queries and keys of a sequence, at least 1; the average of packed ones."""
    if problem.seqlens_q is None:
        return max(1, problem.seqlen_q), max(1, problem.seqlen_k)
    lengths = list(problem.sequences)
    queries, keys = (math.ceil(sum(each) / max(1, len(lengths))) for each in zip(*lengths, strict=True))
    return max(1, queries), max(1, keys)


def _seen(problem: Problem, ratio: int, tile: int, step: int) -> NDArray[np.int64]:
    """Keys that each tile of ``tile`` rows visits, in whole steps; ``ratio`` rows belong to one query."""
    import numpy as np

    queries, keys = _lengths(problem)
    first = np.arange(-(-queries * ratio // tile)) * tile
    last = np.minimum(first + tile, queries * ratio) - 1
    diagonal = keys - queries if problem.mask_corner else 0
    left, right = problem.window_left, problem.window_right
    end = np.full(len(first), keys) if right < 0 else np.clip(last // ratio + diagonal + right + 1, 0, keys)
    begin = np.zeros(len(first), np.int64) if left < 0 else np.clip(first // ratio + diagonal - left, 0, keys)
    return np.maximum(-(-end // step) - begin // step, 0) * step


def _item_rows(rows: int, columns: int, tile: int, depth: int, threads: int) -> int:
    """Rows of a work item: as many tiles as fit in the cache, fewer if threads would be idle."""
    item = max(1, _ITEM_BYTES // (4 * depth * tile)) * tile
    while item > tile and -(-rows // item) * columns < _ITEMS_PER_THREAD * threads:
        item -= tile
    return item
