"""A model of the time of the kernels for NVIDIA Hopper, in which the blocks of a cluster share a tile or loads of B.

The static order of ``data/arch_specs/gemm/native/sm_90.json`` is the same model in SQL; its factors are fitted to the
times of 24 to 34 kernels, with all parts of K, on 192 products on an H100, in bf16 and fp8, and what low tiles cost to
those of 12 kernels on 16 small products. Here it also chooses the parts of K.
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

_BYTES_A_CYCLE = 1785.0
"""Of memory, where most multiprocessors read it: 3.1 TB/s."""

_SHIFTED = 1.53
"""How much longer rows take to load that are no multiples of a cache line, 128 bytes: they lie in more lines. Copies of
rows that TMA cannot read begin with lines."""

_SPLIT = 3.0
"""The same of rows that are no multiples of a sector, 32 bytes, either: fitted to 12 kernels on 41 such products."""

_SPLIT_OF_PARTS = 1.9
"""The same where the blocks of a cluster read different parts of K, which takes longer anyway."""

_AGAIN, _AGAIN_FROM, _AGAIN_MOST = 0.4, 8e6, 2500.0
"""How much longer products of up to 64 rows take where low tiles, one below the other, read the same columns of B: a
part of the time to read what B has beyond a number of bytes, up to a number of cycles. Fitted to 88 products on an
H200, each alone and as one of many."""


@dataclass(frozen=True)
class ClusterWork:
    """What the busiest multiprocessor does, with a number of parts of K; the amounts are those of all its waves.

    Attributes:
        waves: number of blocks, one after the other; blocks without parts of K go on from tile to tile.
        steps: steps of the depth, of 128 bytes each, together.
        cycles: of these steps: the longest of products, loads, and reading shared memory, and half of the time by which
            reading A and B from memory takes longer.
        results: elements of C for each warpgroup that TMA stores.
        low_tiles: tiles of fewer than 64 rows, which threads store.
        shared: elements of C for each warpgroup whose sums the blocks of a cluster add.
        scattered: elements of C for each warpgroup that are written one by one.
        scattered_sums: of these, those that the blocks of a cluster add, each for its part of the tile.
        again: cycles in which low tiles, one below the other, read B again.
        parts: number of parts of K.
        below: number of blocks of a cluster that share the loads of B.
    """

    waves: int
    steps: int
    cycles: float
    results: float
    low_tiles: int
    shared: float
    scattered: float
    scattered_sums: float
    again: float
    parts: int
    below: int

    @property
    def time(self) -> float:
        """The time in cycles of about 1.7 GHz, without what all kernels have in common."""
        split = self.parts > 1
        return (
            1100.0 * self.waves
            + self.cycles
            + 0.02 * self.results
            + 600.0 * self.low_tiles
            + split * (300.0 * self.parts + 4000.0 * (self.waves - 1))
            + 0.85 * self.shared
            + 2.2 * self.scattered
            + 0.85 * self.scattered_sums
            + self.again
            + (self.below > 1) * 2500.0
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
    below = max(1, algorithm.cluster_m)
    tiles = -(-down // below) * below * across * max(1, problem.products) * parts
    waves = max(1, -(-tiles // resident(parts, units)))
    active = min(1.0, tiles / (waves * units))
    steps = waves * -(-_steps(problem, algorithm) // parts)
    swapped = algorithm.wave_n > 1
    low = swapped and tile_m < 64
    warpgroups = algorithm.wave_m * algorithm.wave_n // 4
    a_along, b_along = along_k_of(problem)
    of_a, of_b = problem.k if a_along else problem.m, problem.k if b_along else problem.n
    present_m, present_n = min(tile_m, rows), min(tile_n, problem.n)
    read_m = min(tile_m, problem.m)  # of a group, with rows of the next ones
    loaded_a, loaded_b = _rows_loaded(read_m, a_along), _rows_loaded(present_n, b_along)
    most = _SPLIT if parts == 1 else _SPLIT_OF_PARTS
    odd_a, odd_b = min(_line_share(of_a * of_bytes), most), min(_line_share(of_b * of_bytes), most)
    loaded = odd_a * loaded_a + odd_b * loaded_b / below
    # Blocks that are fewer than multiprocessors get more of the L2 cache each. It serves the blocks of a cluster that
    # read different parts of K more slowly than neighbours that read the same rows.
    loads = 1.9 * loaded * (0.1 + 0.9 * active) * (2.4 if parts > 1 else 1.0)
    read = (tile_n * (64 + tile_m) if swapped else tile_m * (64 + tile_n)) / 64
    of_128 = max((1.07 if below == 1 else 1.04) * tile_m * tile_n / 32, loads, 1.39 * read)
    begin = 158 if of_bytes == 2 and in_step > 1 else 78
    cycles = steps * (begin + in_step * of_128)
    depth = _depth(problem)
    of_column = depth * max(1, problem.products) * of_bytes
    memory = (rows + problem.n) * of_column / _BYTES_A_CYCLE / min(1.0, 1.5 * active)
    area = waves * tile_m * tile_n / warpgroups
    scattered = waves * present_m * present_n / warpgroups if problem.n % 8 else 0.0
    return ClusterWork(
        waves=waves,
        steps=int(steps * in_step),
        cycles=cycles + 0.5 * max(0.0, memory - cycles),
        results=0.0 if low else area,
        low_tiles=waves if low else 0,
        shared=area if parts > 1 else 0.0,
        scattered=scattered / parts,
        scattered_sums=scattered if parts > 1 else 0.0,
        again=_again(problem.n * of_column) if low and tile_m < rows <= 64 else 0.0,
        parts=parts,
        below=below,
    )


def parts_in_clusters(problem: GemmProblem, algorithm: Algorithm, units: int) -> int:
    """The parts of K that take the least time, where the blocks of a cluster compute a tile of C, a part for each.

    Args:
        problem: the problem.
        algorithm: that of the kernel.
        units: number of multiprocessors.
    """
    most = max(1, _steps(problem, algorithm) // _LEAST_STEPS) if algorithm.cluster_m == 1 else 1
    return min(
        (parts for parts in (1, 2, 4, MOST_PARTS) if parts <= most),
        key=lambda parts: cluster_work(problem, algorithm, parts, units).time,
    )


def resident(parts: int, units: int) -> int:
    """The number of blocks that run at a time, in clusters of as many as there are parts.

    A cluster runs within a part of the GPU, whose multiprocessors larger ones rarely fill.
    """
    return max(1, units * 10 // 11 if parts > 2 else units)


def _again(of_b: int) -> float:
    return min(_AGAIN_MOST, _AGAIN * max(0.0, of_b - _AGAIN_FROM) / _BYTES_A_CYCLE)


def _rows(problem: GemmProblem) -> int:
    """The rows of a product; groups count as equally large ones."""
    return problem.m if problem.groups is None or problem.group_axis == "k" else -(-problem.m // _groups(problem))


def _groups(problem: GemmProblem) -> int:
    return max(1, len(problem.groups or ()))


def _depth(problem: GemmProblem) -> int:
    return problem.k if problem.groups is None or problem.group_axis == "m" else -(-problem.k // _groups(problem))


def _steps(problem: GemmProblem, algorithm: Algorithm) -> int:
    return -(-_depth(problem) // algorithm.tile_k)


def _rows_loaded(extent: int, along: bool) -> int:
    """The rows that TMA loads for a tile's extent in M or N and 128 bytes of K.

    Along K each has 128 bytes. Otherwise they are those of K, in panels of 64 columns, and short ones take as long.
    """
    return extent if along else -(-extent // 64) * 64


def _line_share(row: int) -> float:
    """The time to load a row of ``row`` bytes, over that of one that is a multiple of a cache line."""
    if row % 16 or row % 128 == 0:
        return 1.0
    return _SPLIT if row % 32 else _SHIFTED
