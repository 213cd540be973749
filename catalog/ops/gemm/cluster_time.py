"""A model of the time of the kernels for NVIDIA Hopper, in which the blocks of a cluster share a tile of C.

The static order of ``data/arch_specs/gemm/native/sm_90.json`` is the same model in SQL; its factors are fitted to the
times of 14 kernels on 140 products on an H200. Here it also chooses the parts of K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from catalog.ops.gemm.stage_layout import along_k_of
from catalog.schema.problem_tensors import bytes_of_element

if TYPE_CHECKING:
    from catalog.ops.gemm.problem import GemmProblem
    from catalog.ops.gemm.traits import Algorithm

MOST_PARTS = 8
"""Maximum number of blocks of a cluster, and of parts of K."""

_LEAST_STEPS = 4
"""Minimum number of steps of a part of K that the model chooses."""

_SHIFTED = 1.53
"""How much longer rows take to load that are no multiples of a cache line, 128 bytes: they lie in more lines. Copies of
rows that TMA cannot read begin with lines."""


@dataclass(frozen=True)
class ClusterWork:
    """What the busiest multiprocessor does, with a number of parts of K; the amounts are those of all its waves.

    Attributes:
        waves: number of blocks, one after the other; blocks without parts of K go on from tile to tile.
        steps: steps of the depth, of 128 bytes each, together.
        cycles: of these steps: the longest of products, loads, reading shared memory, and a step's latency.
        results: elements of C for each warpgroup that leave registers for memory.
        shared: elements of C for each warpgroup whose sums the blocks of a cluster add.
        scattered: elements of C for each warpgroup that are written one by one.
        scattered_sums: of these, those that the blocks of a cluster add, each for its part of the tile.
        parts: number of parts of K.
    """

    waves: int
    steps: int
    cycles: float
    results: float
    shared: float
    scattered: float
    scattered_sums: float
    parts: int

    @property
    def time(self) -> float:
        """The time in cycles of about 1.7 GHz, without what all kernels have in common."""
        split = self.parts > 1
        return (
            500.0 * self.waves
            + self.cycles
            + 0.05 * self.results
            + split * (2100.0 * self.waves + 5800.0 * (self.waves - 1))
            + 0.16 * self.shared
            + 1.0 * self.scattered
            + 0.3 * self.scattered_sums
        )


def cluster_work(problem: GemmProblem, algorithm: Algorithm, parts: int, units: int) -> ClusterWork:
    """What a kernel does for a problem with a number of parts of K.

    Args:
        problem: the problem.
        algorithm: that of the kernel.
        parts: 1, 2, 4 or 8 blocks share a tile of C.
        units: number of multiprocessors.
    """
    tile_m, tile_n = algorithm.tile_m, algorithm.tile_n
    of_bytes = bytes_of_element(problem.tensors["a"].element)
    in_step = algorithm.tile_k * of_bytes / 128
    rows = _rows(problem)
    down, across = max(1, -(-rows // tile_m)), max(1, -(-problem.n // tile_n))
    waves = max(1, -(-_tiles(problem, algorithm) * parts // resident(parts, units)))
    steps = waves * -(-_steps(problem, algorithm) // parts)
    swapped = algorithm.warp_tile_m < 64
    warpgroups = algorithm.wave_m * algorithm.wave_n // 4
    a_along, b_along = along_k_of(problem)
    of_a, of_b = problem.k if a_along else problem.m, problem.k if b_along else problem.n
    loaded = _line_share(of_a * of_bytes) * rows / down + _line_share(of_b * of_bytes) * problem.n / across
    read = (tile_n * (64 + tile_m) if swapped else tile_m * (64 + tile_n)) / 64
    of_128 = max(0.87 * tile_m * tile_n / 32, 1.37 * loaded, 1.25 * read, 95.0)
    area = waves * tile_m * tile_n / warpgroups
    scattered = waves * rows / down * problem.n / across / warpgroups if problem.n % 8 else 0.0
    return ClusterWork(
        waves=waves,
        steps=int(steps * in_step),
        cycles=steps * (52 + in_step * of_128),
        results=0.0 if swapped else area,
        shared=area if parts > 1 else 0.0,
        scattered=scattered / parts,
        scattered_sums=scattered if parts > 1 else 0.0,
        parts=parts,
    )


def parts_in_clusters(problem: GemmProblem, algorithm: Algorithm, units: int) -> int:
    """The parts of K that take the least time, where the blocks of a cluster compute a tile of C, a part for each.

    Args:
        problem: the problem.
        algorithm: that of the kernel.
        units: number of multiprocessors.
    """
    most = max(1, _steps(problem, algorithm) // _LEAST_STEPS)
    return min(
        (parts for parts in (1, 2, 4, MOST_PARTS) if parts <= most),
        key=lambda parts: cluster_work(problem, algorithm, parts, units).time,
    )


def resident(parts: int, units: int) -> int:
    """The number of blocks that run at a time, in clusters of as many as there are parts.

    A cluster runs within a part of the GPU, whose multiprocessors larger ones rarely fill.
    """
    return max(1, units * 10 // 11 if parts > 2 else units)


def _rows(problem: GemmProblem) -> int:
    """The rows of a product; groups count as equally large ones."""
    return problem.m if problem.groups is None or problem.group_axis == "k" else -(-problem.m // _groups(problem))


def _groups(problem: GemmProblem) -> int:
    return max(1, len(problem.groups or ()))


def _tiles(problem: GemmProblem, algorithm: Algorithm) -> int:
    return -(-_rows(problem) // algorithm.tile_m) * -(-problem.n // algorithm.tile_n) * max(1, problem.products)


def _steps(problem: GemmProblem, algorithm: Algorithm) -> int:
    depth = problem.k if problem.groups is None or problem.group_axis == "m" else -(-problem.k // _groups(problem))
    return -(-depth // algorithm.tile_k)


def _line_share(row: int) -> float:
    """The time to load a row of ``row`` bytes, over that of one that is a multiple of a cache line."""
    return _SHIFTED if row % 16 == 0 and row % 128 else 1.0
