"""How much the tensor cores of NVIDIA Hopper truncate sums of fp8 and bf8, before these are added in float32.

An instruction adds the products of 32 elements of K and the sum so far. It aligns them to the largest of these
magnitudes, M, and keeps 14 bits: it cuts off what is below 2^-13 M. See DeepSeek-AI, "DeepSeek-V3 Technical Report"
(2024), section 3.5.2, and Li et al., "FTTN: Feature-Targeted Testing for Numerical Properties of NVIDIA & AMD Matrix
Accelerators" (2024). GEMM kernels begin a new sum every 128 elements, as DeepGEMM does, so M stays small however deep K
is. Attention kernels do not: they multiply weights of 8 bits, whose rounding is the larger error.

Each of the 33 numbers loses between 0 and 2^-13 M, toward zero. On average that is half of it: these halves cancel
between numbers of different signs, and add up otherwise, so signs are counted. The rest varies by as much to both
sides; with lambda = 4 as for sums in float32, n of them add up to at most ``4 sqrt(n)`` of one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

PROMOTED = 128
"""Elements of K after which a GEMM kernel begins a new sum."""

_DEPTH = 32
"""Elements of K that an instruction multiplies."""

_LAMBDA = 4.0


def truncation_of_sums(a: NDArray[Any], b: NDArray[Any], bits: int, promoted: int | None = None) -> NDArray[np.float64]:
    """How far sums of products in tensor cores may be from exact ones: (..., m, n).

    Args:
        a: (..., m, k).
        b: (..., k, n).
        bits: significant bits of the largest magnitude that are kept.
        promoted: elements of k after which a sum begins anew; None: never.
    """
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    mean, squares = np.zeros(shape), np.zeros(shape)
    total = np.zeros(shape)
    for first in range(0, a.shape[-1], _DEPTH):
        of_a, of_b = a[..., first : first + _DEPTH], b[..., first : first + _DEPTH, :]
        if promoted is not None and first % promoted == 0:
            total = np.zeros(shape)
        products = np.max(np.abs(of_a), axis=-1, keepdims=True) * np.max(np.abs(of_b), axis=-2, keepdims=True)
        cut = 2.0**-bits * np.maximum(np.abs(total), products)
        mean += cut * (np.abs(np.sign(of_a) @ np.sign(of_b)) + 1)
        squares += (_DEPTH + 1) * cut * cut
        total += of_a @ of_b
    return mean + _LAMBDA * np.sqrt(squares)
