"""How the kernels for NVIDIA GPUs read A and B into stages: operands that are given otherwise are transposed first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from catalog.schema.problem_tensors import bytes_of_element

if TYPE_CHECKING:
    from catalog.ops.gemm.problem import GemmProblem


def along_k(layout: str, *, grouped: bool) -> tuple[bool, bool]:
    """Whether A and B of 16 bits, without groups of K, are contiguous along K where they are read.

    TMA reads columns of 16 bytes, and a group of rows begins anywhere: a column-major A of groups is transposed.
    """
    return layout[0] == "r" or grouped, layout[1] == "c"


def along_k_of(problem: GemmProblem) -> tuple[bool, bool]:
    """Whether A and B of a problem are contiguous along K where they are read.

    Tensor cores read elements of 8 bits along K alone; groups of K are read with K as rows.
    """
    if problem.group_axis == "k":
        return False, False
    if bytes_of_element(problem.tensors["a"].element) == 1:
        return True, True
    return along_k(problem.layout, grouped=problem.groups is not None)
