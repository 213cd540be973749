"""How far sums of fp8 in tensor cores may be from exact ones, against sums that are cut off as the hardware does it."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from catalog.backends import backend_of
from catalog.ops import operation
from catalog.ops.gemm.problem import GemmProblem
from catalog.runtime.inputs import make_inputs
from catalog.runtime.tensor_cores import PROMOTED, truncation_of_sums

Matrix = NDArray[np.float64]


def cut_off(a: Matrix, b: Matrix, promoted: int | None) -> Matrix:
    """A B; sums that tensor cores cut off begin anew every ``promoted`` elements, or never."""
    c, total = np.zeros((len(a), b.shape[1])), np.zeros((len(a), 1, b.shape[1]))
    for first in range(0, a.shape[1], 32):
        if promoted is not None and first % promoted == 0:
            c, total = c + total[:, 0], np.zeros_like(total)
        products = a[:, first : first + 32, None] * b[None, first : first + 32]
        numbers = np.concatenate([products, total], axis=1)
        unit = 2.0 ** (np.floor(np.log2(np.max(np.abs(numbers), axis=1, keepdims=True))) - 13)
        total = np.sum(np.trunc(numbers / unit) * unit, axis=1, keepdims=True)
    return c + total[:, 0]


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("k", [7, 128, 1031])
@pytest.mark.parametrize("promoted", [PROMOTED, None])
def test_sums_are_within_the_bound(k: int, positive: bool, promoted: int | None) -> None:
    rng = np.random.default_rng(k)
    a, b = np.round(4 * rng.standard_normal((9, k))) + 0.5, np.round(4 * rng.standard_normal((k, 11))) + 0.5
    a, b = (np.abs(a), np.abs(b)) if positive else (a, b)
    error, bound = np.abs(cut_off(a, b, promoted) - a @ b), truncation_of_sums(a, b, 14, promoted)
    assert np.all(error <= bound)
    assert np.all(bound <= 0.02 * np.sqrt(k) * np.max(np.abs(a)) * np.max(np.abs(b)) * (np.sqrt(k) if positive else 1))


def test_sums_that_are_not_promoted_exceed_it() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.uniform(1, 2, (4, 16384)), rng.uniform(1, 2, (16384, 4))
    assert np.all(np.abs(cut_off(a, b, None) - a @ b) > truncation_of_sums(a, b, 14, PROMOTED))


def test_only_arches_that_truncate_sums_have_the_term() -> None:
    problem = GemmProblem(m=4, n=4, k=4096, dtype="fp8")
    inputs = make_inputs(problem, 0)
    atol = {
        arch: np.median(operation("gemm").tolerances(problem, inputs, backend_of(arch).arithmetic(arch))["c"].atol)
        for arch in ("x86_64_v4", "gfx942", "sm_90")
    }
    assert atol["gfx942"] == atol["x86_64_v4"]
    assert atol["sm_90"] > 5 * atol["gfx942"]
