"""In how many parts a GEMM kernel multiplies K, each with sums of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from catalog.ops.gemm.cluster_time import parts_in_clusters

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
    if whole_waves:
        return parts_in_clusters(problem, algorithm, units)
    tile_m, tile_n = max(1, algorithm.tile_m), max(1, algorithm.tile_n)
    tiles = -(-problem.m // tile_m) * -(-problem.n // tile_n) * max(1, problem.products)
    return max(1, min(units // max(1, tiles), problem.k // _LEAST_DEPTH))
