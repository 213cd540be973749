"""What a convolution kernel of our own does for a problem, in the units in which its time grows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from catalog.ops.conv.reach import gathered_taps
from catalog.ops.conv.traits import NARROW, Pipeline

if TYPE_CHECKING:
    from catalog.ops.conv.kernel import ConvKernel
    from catalog.ops.conv.problem import ConvProblem


def work_of(problem: ConvProblem, kernel: ConvKernel, units: int) -> dict[str, float]:
    """The terms of a kernel's time, by name; see :meth:`catalog.ops.protocol.Operation.work`.

    Each pipeline has terms of its own.
    """
    pipeline = kernel.algorithm.pipeline
    of_pipeline = {
        **dict.fromkeys(NARROW, _direct_work),
        Pipeline.SM90_WGMMA: _tiles_work,
        Pipeline.SM90_NARROW: _patches_work,
    }
    work = of_pipeline.get(pipeline, _panel_work)(problem, kernel, units)
    return {f"{pipeline} {name}": amount for name, amount in work.items()}


def _panel_work(problem: ConvProblem, kernel: ConvKernel, units: int) -> dict[str, float]:
    """Terms of the product of a group by packed panels; images are packed again for each tile across."""
    algorithm = kernel.algorithm
    m, n, k = problem.rows, problem.columns, problem.depth
    transposed = not problem.last and problem.direction != "bwd_weight"
    if transposed:
        m, n = n, m
    k = math.ceil(k / problem.phases)
    panel = max(1, algorithm.warp_tile_n)
    width, share = math.ceil(n / panel) * panel, problem.g / units
    down, across = math.ceil(m / max(1, algorithm.tile_m)), math.ceil(n / max(1, algorithm.tile_n))
    weighs = problem.direction == "bwd_weight"
    return {
        "launch": float(problem.phases),
        "products": share,
        "area": m * width * k * share,
        "sums": m * width * math.ceil(k / max(1, algorithm.tile_k)) * share,
        "results": m * n * share,
        "copied_a": m * k * (1 if transposed else across) * share,
        "copied_b": n * k * (down if transposed or weighs else 1) * share,
        "traffic": float(problem.traffic),
    }


def _direct_work(problem: ConvProblem, kernel: ConvKernel, units: int) -> dict[str, float]:
    """Terms of direct kernels: vectors of channels that are multiplied, and rows of images."""
    vectors = math.ceil(problem.c / max(1, kernel.algorithm.vector_c))
    positions = problem.n * math.prod(problem.out)
    return {
        "launch": float(problem.phases),
        "products": vectors * positions * math.prod(problem.filter) * problem.channels_in / units,
        "loads": vectors * positions * math.prod(problem.filter) / units,
        "rows": vectors * positions / problem.out[-1] / units,
        "traffic": float(problem.traffic),
    }


def _tiles_work(problem: ConvProblem, kernel: ConvKernel, units: int) -> dict[str, float]:
    """Terms of tiles of an implicit product: waves of them, and the steps of 64 of the depth in each."""
    algorithm, blocks, taps = kernel.algorithm, math.ceil(problem.channels_in / 64), gathered_taps(problem)
    weighs = problem.direction == "bwd_weight"
    columns = 64 * taps * blocks if weighs else problem.columns
    channels = blocks if problem.direction == "forward" else math.ceil(problem.channels_out / 64)
    steps = math.ceil(problem.depth / 64) if weighs else taps * channels / problem.phases
    down = math.ceil(problem.rows / problem.phases / algorithm.tile_m) * problem.phases
    tiles = problem.g * down * math.ceil(columns / algorithm.tile_n)
    area, share = algorithm.tile_m * algorithm.tile_n, max(1.0, tiles / units)
    return {
        "launch": 1.0,
        "tiles": share,
        "area": share * steps * area,
        "loaded": share * steps * (algorithm.tile_m + algorithm.tile_n),
        "traffic": float(problem.traffic),
    }


def _patches_work(problem: ConvProblem, kernel: ConvKernel, units: int) -> dict[str, float]:
    """Terms of patches of positions in shared memory."""
    eights = max(1, problem.channels_in // 8)
    positions = problem.n * math.prod(problem.size if problem.direction == "bwd_data" else problem.out)
    return {
        "launch": float(problem.phases),
        "products": positions * math.ceil(problem.c / 8) * problem.taps * eights / problem.phases / units,
        "traffic": float(problem.traffic),
    }
