"""In how many parts a GEMM kernel multiplies K, each with sums of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from catalog.ops.gemm.problem import GemmProblem
    from catalog.ops.gemm.traits import Algorithm

_LEAST_DEPTH = 1024
"""Minimum depth of a part of K for it to be worth a pass over C of its own."""


def parts_of(problem: GemmProblem, algorithm: Algorithm, units: int, *, whole_waves: bool) -> int:
    """The parts of K, as the problem states; otherwise enough for tiles of C to keep all units busy.

    Args:
        problem: the problem.
        algorithm: that of the kernel.
        units: number of threads or multiprocessors.
        whole_waves: whether blocks should fill whole waves of the device, in clusters.
    """
    if problem.k_batch != 0:
        return problem.k_batch
    tile_m, tile_n, tile_k = (max(1, size) for size in (algorithm.tile_m, algorithm.tile_n, algorithm.tile_k))
    tiles = -(-problem.m // tile_m) * -(-problem.n // tile_n) * max(1, problem.products)
    if whole_waves:
        return parts_in_clusters(tiles, -(-problem.k // tile_k), units)
    return max(1, min(units // max(1, tiles), problem.k // _LEAST_DEPTH))


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
