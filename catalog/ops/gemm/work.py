"""What a GEMM kernel does for a problem, in the units in which its time grows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from catalog.ops.gemm.kernel import GemmKernel
    from catalog.ops.gemm.problem import GemmProblem


def work_of(problem: GemmProblem, kernel: GemmKernel, units: int) -> dict[str, float]:
    """The terms of a kernel's time, by name; see :meth:`catalog.ops.protocol.Operation.work`.

    Tiles of C are counted whole, and their rows in register tiles. A grid takes as long as its waves, of which the last
    one is partly empty. A row of tiles reads all of B, a column of tiles all of A. Groups count as equally large ones.
    """
    algorithm = kernel.algorithm
    tile_m, tile_n = max(1, algorithm.tile_m), max(1, algorithm.tile_n)
    products = max(1, problem.products)
    m, n, k = (_of_group(problem, axis) for axis in ("m", "n", "k"))
    down, across, deep = -(-m // tile_m), -(-n // tile_n), -(-k // max(1, algorithm.tile_k))
    tiles = down * across * products
    waves = math.ceil(tiles / (units * max(1, algorithm.block_per_cu)))
    columns = -(-n // max(1, algorithm.warp_tile_n)) * max(1, algorithm.warp_tile_n)
    register = max(1, algorithm.warp_tile_m)
    half = (register + 1) // 2
    whole, left = divmod(m, register)
    halves, single = divmod(left, half)
    scale = columns * k * products / units
    return {
        "launch": 1.0,
        "tiles": tiles / units,
        "steps": tiles * deep / units,
        "area": tiles * tile_m * tile_n * k / units,
        "waves": waves * tile_m * tile_n * k,
        "busiest": math.ceil(tiles / units) * tile_m * tile_n * k,
        "whole": whole * register * scale,
        "half": halves * half * scale,
        "single": single * scale,
        "read_a": across * m * k * products / units,
        "read_b": down * n * k * products / units,
        "copied_a": m * k * products / units,
        "copied_b": n * k * products / units,
        "written": m * n * products * max(1, deep) / units,
        "flops": problem.flops / units,
        "traffic": float(problem.traffic),
    }


def _of_group(problem: GemmProblem, axis: str) -> int:
    """The extent of an axis, at least 1; the average of groups along it."""
    extent: int = getattr(problem, axis)
    if problem.groups is not None and problem.group_axis == axis:
        extent = math.ceil(extent / max(1, len(problem.groups)))
    return max(1, extent)
