"""How far sums of fp8 in tensor cores may be from exact ones, against sums that are cut off as the hardware does it."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from catalog.ops.gemm.tensor_cores import rounding_of_eight_bits

Matrix = NDArray[np.float64]


def cut_off(a: Matrix, b: Matrix, promoted: int) -> Matrix:
    """A B; sums that tensor cores cut off begin anew every ``promoted`` elements."""
    c, total = np.zeros((len(a), b.shape[1])), np.zeros((len(a), 1, b.shape[1]))
    for first in range(0, a.shape[1], 32):
        if first % promoted == 0:
            c, total = c + total[:, 0], np.zeros_like(total)
        products = a[:, first : first + 32, None] * b[None, first : first + 32]
        numbers = np.concatenate([products, total], axis=1)
        unit = 2.0 ** (np.floor(np.log2(np.max(np.abs(numbers), axis=1, keepdims=True))) - 13)
        total = np.sum(np.trunc(numbers / unit) * unit, axis=1, keepdims=True)
    return c + total[:, 0]


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("k", [7, 128, 1031])
def test_promoted_sums_are_within_the_bound(k: int, positive: bool) -> None:
    rng = np.random.default_rng(k)
    a, b = np.round(4 * rng.standard_normal((9, k))) + 0.5, np.round(4 * rng.standard_normal((k, 11))) + 0.5
    a, b = (np.abs(a), np.abs(b)) if positive else (a, b)
    error, bound = np.abs(cut_off(a, b, 128) - a @ b), rounding_of_eight_bits(a, b)
    assert np.all(error <= bound)
    assert np.all(bound <= 0.02 * np.sqrt(k) * np.max(np.abs(a)) * np.max(np.abs(b)) * (np.sqrt(k) if positive else 1))


def test_sums_that_are_not_promoted_exceed_it() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.uniform(1, 2, (4, 16384)), rng.uniform(1, 2, (16384, 4))
    assert np.all(np.abs(cut_off(a, b, 1 << 30) - a @ b) > rounding_of_eight_bits(a, b))
