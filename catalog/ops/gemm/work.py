"""What a GEMM kernel does for a problem, in the units in which its time grows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from catalog.ops.gemm.traits import Pipeline
from catalog.schema.problem_tensors import bytes_of_element

if TYPE_CHECKING:
    from catalog.ops.gemm.kernel import GemmKernel
    from catalog.ops.gemm.problem import GemmProblem

_NEAR_BYTES, _FAR_BYTES = 512 << 10, 8 << 20
"""Sizes up to which B stays in the private caches of a usual CPU, and in its share of the last one."""

_LANES = 16


def work_of(problem: GemmProblem, kernel: GemmKernel, units: int) -> dict[str, float]:
    """The terms of a kernel's time, by name; see :meth:`catalog.ops.protocol.Operation.work`.

    Groups count as equally large ones. The pipelines of the host have terms of their own, because they divide the work
    differently.
    """
    pipelines = {
        Pipeline.HOST_PANEL: _panel_work,
        Pipeline.HOST_STREAM: _stream_work,
        Pipeline.SM90_WGMMA: _cluster_work,
    }
    counted = pipelines.get(kernel.algorithm.pipeline, _gpu_work)
    work = counted(problem, kernel, units)
    return {f"{kernel.algorithm.pipeline} {name}": amount for name, amount in work.items()}


def _gpu_work(problem: GemmProblem, kernel: GemmKernel, units: int) -> dict[str, float]:
    """Terms for blocks of a grid: whole tiles of C, in waves of which the last one is partly empty.

    A row of tiles reads all of B, a column of tiles all of A.
    """
    algorithm = kernel.algorithm
    tile_m, tile_n = max(1, algorithm.tile_m), max(1, algorithm.tile_n)
    m, n, k = _extents(problem)
    down, across, deep = -(-m // tile_m), -(-n // tile_n), -(-k // max(1, algorithm.tile_k))
    tiles = down * across * _products(problem)
    area = tile_m * tile_n * k
    return {
        "launch": 1.0,
        "tiles": tiles / units,
        "steps": tiles * deep / units,
        "area": tiles * area / units,
        "waves": math.ceil(tiles / (units * max(1, algorithm.block_per_cu))) * area,
        "busiest": math.ceil(tiles / units) * area,
        "depth": float(k),
        "read_a": tiles * tile_m * k / units,
        "read_b": tiles * tile_n * k / units,
        "flops": problem.flops / units,
        "traffic": float(problem.traffic),
    }


def _cluster_work(problem: GemmProblem, kernel: GemmKernel, units: int) -> dict[str, float]:
    """Terms for blocks of clusters that share a tile of C, a part of K for each.

    A step multiplies, or it waits for its loads, or for the step before. Rows of C that are no multiples of 16 bytes
    are written element by element, and such rows of A and B are copied first.
    """
    algorithm = kernel.algorithm
    tile_m, tile_n = algorithm.tile_m, algorithm.tile_n
    m, n, k = _extents(problem)
    tiles = -(-m // tile_m) * -(-n // tile_n) * _products(problem)
    deep = -(-k // algorithm.tile_k)
    parts = problem.k_batch or parts_in_clusters(tiles, deep, units)
    steps = -(-deep // parts) * algorithm.tile_k
    waves = math.ceil(tiles * parts / resident(parts, units))
    share = tiles * parts / units
    edges = min(tile_m, m) + min(tile_n, n)
    cycles = max(tile_m * tile_n / 32, 1.6 * edges, 200)  # of 64 of the depth, as in the static order
    rows = {"a": (m, k) if problem.layout[0] == "r" else (k, m), "b": (n, k) if problem.layout[1] == "c" else (k, n)}
    return {
        "launch": 1.0,
        "waves": waves,
        "depth": waves * steps,
        "cycles": waves * steps * cycles,
        "results": waves * tile_m * tile_n,
        "scattered": waves * tile_m * tile_n if n % 8 else 0.0,
        "copied": float(sum(count * width for count, width in rows.values() if count > 1 and width % 8)),
        "parts": parts - 1.0,
        "all": share * steps * tile_m * tile_n,
        "traffic": float(problem.traffic),
    }


def parts_in_clusters(tiles: int, steps: int, units: int) -> int:
    """The parts of K that take the least time where the blocks of a cluster compute a tile of C, a part for each.

    A wave of blocks takes as many steps of the kernel's ``tile_k`` as its part has, about six besides, and one for each
    part whose sums are added.

    Args:
        tiles: number of tiles of C.
        steps: number of steps of K.
        units: number of multiprocessors.
    """

    def time_of(parts: int) -> int:
        added = parts if parts > 1 else 0
        return -(-tiles * parts // resident(parts, units)) * (-(-steps // parts) + 6 + added)

    return min((parts for parts in (1, 2, 4, 8) if parts <= max(1, steps // 4)), key=time_of)


def resident(parts: int, units: int) -> int:
    """The number of blocks that run at a time, in clusters of as many as there are parts.

    A cluster runs within a part of the GPU, whose multiprocessors larger ones rarely fill.
    """
    return max(1, units * 10 // 11 if parts > 2 else units)


def _panel_work(problem: GemmProblem, kernel: GemmKernel, units: int) -> dict[str, float]:
    """Terms of the product by packed panels: A and B are copied, then multiplied in register tiles."""
    algorithm = kernel.algorithm
    m, n, k = _extents(problem)
    share = _products(problem) / units
    panels = -(-n // max(1, algorithm.warp_tile_n)) * max(1, algorithm.warp_tile_n)
    steps = -(-k // max(1, algorithm.tile_k))
    depth = panels * k * share
    whole, half, single = _blocks(m, max(1, algorithm.warp_tile_m))
    return {
        "launch": 1.0,
        "products": _products(problem) / units,
        "whole": whole * depth,
        "half": half * depth,
        "single": single * depth,
        "sums": m * panels * steps * share,
        "results": m * n * share,
        "tasks": -(-m // max(1, algorithm.tile_m)) * (steps + -(-n // max(1, algorithm.tile_n))) * share,
        "copied_a": m * k * share,
        "copied_b": panels * k * share,
        "far": _beyond(problem, _NEAR_BYTES) * share,
        "farther": _beyond(problem, _FAR_BYTES) * share,
    }


def _stream_work(problem: GemmProblem, kernel: GemmKernel, units: int) -> dict[str, float]:
    """Terms of the product of few rows: B is read once for each tile of rows, straight from the tensor."""
    algorithm = kernel.algorithm
    m, n, k = _extents(problem)
    share = _products(problem) / units
    tile, register = max(1, algorithm.tile_m), max(1, algorithm.warp_tile_m)
    passes, steps = -(-m // tile), -(-k // max(1, algorithm.tile_k))
    tiles, rest = divmod(m, tile)
    whole, half, single = (
        tiles * full + part for full, part in zip(_blocks(tile, register), _blocks(rest, register), strict=True)
    )
    strip = max(_LANES, algorithm.warp_tile_n)
    along = problem.layout[1] == "c"  # vectors along the depth of B, otherwise across its columns
    if along:
        depth, edge, unaligned = n * -(-k // _LANES) * _LANES * share, m * (n % (strip // _LANES)) * k * share, 0.0
    else:
        depth, edge = -(-n // strip) * strip * k * share, passes * bool(n % strip) * strip * k * share
        unaligned = bool(n % _LANES) * m * n * k * share
    return {
        "launch": 1.0,
        "products": _products(problem) / units,
        "whole": whole * depth,
        "half": half * depth,
        "single": single * depth,
        "edge": edge,
        "unaligned": unaligned,
        "sums": m * n * steps * share,
        "results": m * n * share,
        "copied_a": m * k * share,
        "read_b": passes * n * k * share,
        "far": passes * _beyond(problem, _NEAR_BYTES) * share,
        "farther": passes * _beyond(problem, _FAR_BYTES) * share,
    }


def _products(problem: GemmProblem) -> int:
    return max(1, problem.products)


def _extents(problem: GemmProblem) -> tuple[int, int, int]:
    """M, N and K of one product, at least 1; the average of groups."""
    extents = {name: getattr(problem, name) for name in ("m", "n", "k")}
    if problem.groups is not None:
        extents[problem.group_axis] = math.ceil(extents[problem.group_axis] / max(1, len(problem.groups)))
    m, n, k = (max(1, extent) for extent in extents.values())
    return m, n, k


def _beyond(problem: GemmProblem, size: int) -> float:
    """Bytes of B beyond ``size``."""
    _, n, k = _extents(problem)
    return float(max(0, n * k * bytes_of_element(problem.tensors["b"].element) - size))


def _blocks(rows: int, block: int) -> tuple[int, int, int]:
    """Rows in whole register tiles, in half ones, and single ones."""
    half = (block + 1) // 2
    whole, left = divmod(rows, block)
    halves, single = divmod(left, half)
    return whole * block, halves * half, single
