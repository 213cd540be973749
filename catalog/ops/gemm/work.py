"""What a GEMM kernel does for a problem, in the units in which its time grows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from catalog.ops.extents import register_blocks
from catalog.ops.gemm.cluster_time import MOST_PARTS, cluster_work, parts_in_clusters
from catalog.ops.gemm.parts import parts_of
from catalog.ops.gemm.stage_layout import along_k_of
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
        Pipeline.HOST_FEW_COLUMNS: _few_columns_work,
        Pipeline.HOST_PANEL: _panel_work,
        Pipeline.HOST_STREAM: _stream_work,
        Pipeline.SM90_WGMMA: _cluster_work,
    }
    counted = pipelines.get(kernel.algorithm.pipeline, _gpu_work)
    work = counted(problem, kernel, units)
    return {f"{kernel.algorithm.pipeline} {name}": amount for name, amount in work.items()}


def _gpu_work(problem: GemmProblem, kernel: GemmKernel, units: int) -> dict[str, float]:
    """Terms for blocks of a grid: whole tiles of C, in waves of which the last one is partly empty.

    A row of tiles reads all of B, a column of tiles all of A. A part of K is a tile of its own, whose sums are added.
    """
    algorithm = kernel.algorithm
    tile_m, tile_n = max(1, algorithm.tile_m), max(1, algorithm.tile_n)
    m, n, k = _extents(problem)
    parts = _parts(problem, kernel, units)
    k = -(-k // parts)
    down, across, deep = -(-m // tile_m), -(-n // tile_n), -(-k // max(1, algorithm.tile_k))
    tiles = down * across * _products(problem) * parts
    area = tile_m * tile_n * k
    return {
        "launch": 1.0,
        "tiles": tiles / units,
        "steps": tiles * deep / units,
        "area": tiles * area / units,
        "waves": math.ceil(tiles / (units * max(1, algorithm.block_per_cu))) * area,
        "busiest": math.ceil(tiles / units) * area,
        "depth": float(k),
        "parts": (parts - 1) * tile_m * tile_n * math.ceil(tiles / units),
        "read_a": tiles * tile_m * k / units,
        "read_b": tiles * tile_n * k / units,
        "flops": problem.flops / units,
        "traffic": float(problem.traffic),
    }


def _cluster_work(problem: GemmProblem, kernel: GemmKernel, units: int) -> dict[str, float]:
    """Terms for blocks of clusters that share a tile of C, a part of K for each: the static order, and what it sums.

    Rows of C that are no multiples of 16 bytes are written element by element, and such rows of A and B are copied
    first, as are operands that must be transposed.
    """
    m, n, k = _extents(problem)
    parts = problem.k_batch or parts_in_clusters(problem, kernel.algorithm, units)
    work = cluster_work(problem, kernel.algorithm, 1 << min(parts, MOST_PARTS).bit_length() - 1, units)
    of_bytes = bytes_of_element(problem.tensors["a"].element)
    given = (problem.layout[0] == "r", problem.layout[1] == "c")  # contiguous along K
    copied = 0
    for extent, given_along, along in zip((m, n), given, along_k_of(problem), strict=True):
        count, width = (extent, k) if given_along else (k, extent)
        copied += count * width if given_along != along or (count > 1 and width * of_bytes % 16) else 0
    return {
        "launch": 1.0,
        "time": work.time,
        "waves": float(work.waves),
        "depth": 64.0 * work.steps,
        "cycles": work.cycles,
        "results": work.results,
        "low_tiles": float(work.low_tiles),
        "scattered": work.scattered + work.scattered_sums,
        "copied": float(copied),
        "parts": work.waves * (work.parts - 1.0),
        "shared": work.shared,
        "traffic": float(problem.traffic),
    }


def _panel_work(problem: GemmProblem, kernel: GemmKernel, units: int) -> dict[str, float]:
    """Terms of the product by packed panels: A and B are copied, then multiplied in register tiles."""
    algorithm = kernel.algorithm
    m, n, k = _extents(problem)
    parts = _parts(problem, kernel, units)
    share = _products(problem) / units
    panels = -(-n // max(1, algorithm.warp_tile_n)) * max(1, algorithm.warp_tile_n)
    steps = parts * -(-k // (parts * max(1, algorithm.tile_k)))
    depth = panels * k * share
    whole, half, single = register_blocks(m, max(1, algorithm.warp_tile_m))
    return {
        "launch": 1.0,
        "products": _products(problem) * parts / units,
        "whole": whole * depth,
        "half": half * depth,
        "single": single * depth,
        "sums": m * panels * steps * share,
        "parts": m * n * (parts - 1) * share,
        "results": m * n * share,
        "tasks": -(-m // max(1, algorithm.tile_m)) * (steps + -(-n // max(1, algorithm.tile_n))) * share,
        "copied_a": m * k * share,
        "copied_b": panels * k * share,
        "far": _beyond(problem, _NEAR_BYTES) * share,
        "farther": _beyond(problem, _FAR_BYTES) * share,
    }


def _stream_work(problem: GemmProblem, kernel: GemmKernel, units: int) -> dict[str, float]:
    """Terms of the product of few rows: B is read once for each tile of rows, straight from the tensor.

    Threads take tiles of columns: the busiest one has a whole number of them.
    """
    algorithm = kernel.algorithm
    m, n, k = _extents(problem)
    parts = _parts(problem, kernel, units)
    tile = max(1, algorithm.tile_m)
    tiles = -(-n // max(1, algorithm.tile_n)) * _products(problem) * parts
    share = _products(problem) * math.ceil(tiles / units) / tiles
    passes = -(-m // tile)
    of_layout = _along_work if problem.layout[1] == "c" else _across_work
    terms = {name: amount * share for name, amount in of_layout(m, n, k, parts, kernel).items()}
    return {
        "launch": 1.0,
        "products": _products(problem) * parts / units,
        **terms,
        "parts": m * n * (parts - 1) * share,
        "results": m * n * share,
        "copied_a": float(m * k * math.ceil(_products(problem) / units)),
        "read_b": passes * n * k * share,
        "far": passes * _beyond(problem, _NEAR_BYTES) * share,
        "farther": passes * _beyond(problem, _FAR_BYTES) * share,
    }


def _few_columns_work(problem: GemmProblem, kernel: GemmKernel, units: int) -> dict[str, float]:
    """Terms of the transpose, a product of few rows."""
    algorithm = kernel.algorithm
    turned = {"r": "c", "c": "r"}
    sides = {
        **{"tile_m": algorithm.tile_n, "tile_n": algorithm.tile_m},
        **{"warp_tile_m": algorithm.warp_tile_n, "warp_tile_n": algorithm.warp_tile_m},
    }
    layout = turned[problem.layout[1]] + turned[problem.layout[0]] + "r"
    transpose = problem.model_copy(update={"m": problem.n, "n": problem.m, "layout": layout})
    return _stream_work(transpose, kernel.model_copy(update={"algorithm": algorithm.model_copy(update=sides)}), units)


def _along_work(m: int, n: int, k: int, parts: int, kernel: GemmKernel) -> dict[str, float]:
    """Vectors along the depth of B, whose lanes rows share: the next power of two of rows, or whole register tiles."""
    algorithm = kernel.algorithm
    register = max(1, algorithm.warp_tile_m)
    whole, rest = divmod(m, register)
    held = 1 << (rest - 1).bit_length() if rest else 0
    depth = n * parts * -(-k // (parts * _LANES)) * _LANES
    steps = parts * -(-k // (parts * max(1, algorithm.tile_k)))
    tiles = whole + bool(rest)
    return {
        "whole": whole * register * depth,
        "held": held * depth,
        "tiles": tiles * depth,
        "alone": depth * (m == 1),
        "sums": n * tiles * steps,
        "edge": float(m * (n % max(1, algorithm.warp_tile_n)) * k),
    }


def _across_work(m: int, n: int, k: int, parts: int, kernel: GemmKernel) -> dict[str, float]:
    """Strips of columns of B, a register tile of rows at a time."""
    algorithm = kernel.algorithm
    tile, register, strip = max(1, algorithm.tile_m), max(1, algorithm.warp_tile_m), max(_LANES, algorithm.warp_tile_n)
    tiles, rest = divmod(m, tile)
    whole, half, single = (
        tiles * full + part
        for full, part in zip(register_blocks(tile, register), register_blocks(rest, register), strict=True)
    )
    depth = -(-n // strip) * strip * k
    return {
        "whole": whole * depth,
        "half": half * depth,
        "single": single * depth,
        "sums": m * n * parts * -(-k // (parts * max(1, algorithm.tile_k))),
        "edge": -(-m // tile) * bool(n % strip) * strip * k,
        "unaligned": bool(n % _LANES) * m * n * k,
    }


def _parts(problem: GemmProblem, kernel: GemmKernel, units: int) -> int:
    """The parts of K; a grouped product has one. Kernels in clusters, which fill whole waves, count their own parts."""
    if problem.groups is not None:
        return 1
    return parts_of(problem, kernel.algorithm, units, whole_waves=False)


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
