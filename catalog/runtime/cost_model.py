"""A model of the time of kernels: a sum of terms of work, each with a factor that is fitted on timings.

The time of kernel k for a problem is the sum over j of c[k, j] w[j], where w are the terms of its work
(:meth:`catalog.ops.protocol.Operation.work`), computed from the problem's sizes, the kernel's traits and the device.
It is fitted in two steps, so that few timings suffice:

1. Factors that all kernels share, up to a scale for each kernel, by least squares of the relative errors. They are at
   least 0: non-negative least squares (Lawson and Hanson, Solving Least Squares Problems, chapter 23). Terms that
   explain nothing get 0.
2. For each kernel, its deviation from these factors, by ridge regression (Hoerl and Kennard, Technometrics 12, 1970): a
   kernel with few timings stays near the shared factors. Cross-validation chooses how near. Errors that all kernels
   have in common for a problem do not count, because selection only compares kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from catalog.registry.learned import CostModel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RIDGES = (1.0, 0.1, 0.01, 1e-3, 1e-4)
"""Weights of the deviations' squares to choose from. A deviation is relative to a factor, and each timing weighs 1."""

ROUNDS = 3
"""How often the shared factors are fitted, each time with better scales of the kernels."""

_DIGITS = 8
"""Significant digits of a stored factor."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A timing: the place of its problem in a list, its kernel's id, the work, and the median in ms."""

    problem: int
    kernel_id: str
    work: Mapping[str, float]
    median_ms: float


def fit(samples: Sequence[Sample], ridge: float) -> CostModel:
    """The model that fits ``samples``, of which there is at least one, with terms that explain something.

    Args:
        samples: the timings.
        ridge: one of :data:`RIDGES`: with larger ones, kernels deviate less from the shared factors.
    """
    import numpy as np

    names = list(dict.fromkeys(name for sample in samples for name in sample.work))
    times = np.array([sample.median_ms for sample in samples])
    work = np.array([[sample.work.get(name, 0.0) for name in names] for sample in samples])
    kernels = np.array([sample.kernel_id for sample in samples])
    problems = np.array([sample.problem for sample in samples])
    scales = dict.fromkeys(dict.fromkeys(sample.kernel_id for sample in samples), 1.0)
    for _ in range(ROUNDS):
        relative = work * np.array([scales[kernel_id] for kernel_id in kernels])[:, None] / times[:, None]
        shared = _shared(relative)
        predicted = np.log(np.maximum(relative @ shared, 1e-9))
        for kernel_id in scales:
            of_kernel = predicted[kernels == kernel_id]
            scales[kernel_id] *= math.exp(-of_kernel.sum() / (len(of_kernel) + ridge))
    relative = work * np.array([scales[kernel_id] for kernel_id in kernels])[:, None] / times[:, None]
    kept = shared > 0
    shared, relative = shared[kept], relative[:, kept]
    names = [name for name, keep in zip(names, kept, strict=True) if keep]
    shares = relative * shared  # of the time of each sample: about 1 in a row
    errors = 1 - shares.sum(axis=1)
    for problem in np.unique(problems):
        errors[problems == problem] -= errors[problems == problem].mean()
    factors = {}
    for kernel_id, scale in scales.items():
        own, wrong = shares[kernels == kernel_id], errors[kernels == kernel_id]
        deviation = np.linalg.solve(own.T @ own + ridge * np.eye(len(names)), own.T @ wrong)
        own_factors = scale * shared * np.maximum(0, 1 + deviation)
        factors[kernel_id] = tuple(float(f"{factor:.{_DIGITS}g}") for factor in own_factors)
    return CostModel(tuple(names), factors)


def _shared(relative: NDArray[np.float64]) -> NDArray[np.float64]:
    """The factors from 0 that all kernels share, by the work of each sample over its time."""
    import numpy as np

    sizes = np.linalg.norm(relative, axis=0)
    sizes[sizes == 0] = 1
    found: NDArray[np.float64] = _non_negative(relative / sizes, np.ones(len(relative))) / sizes
    return found


def _non_negative(matrix: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """The x from 0 with the least squares of ``matrix @ x - wanted``, by active sets."""
    import numpy as np

    count = matrix.shape[1]
    found, active = np.zeros(count), np.zeros(count, bool)
    for _ in range(3 * count):
        slope = matrix.T @ (wanted - matrix @ found)
        slope[active] = 0
        if slope.max(initial=0) <= 1e-9:
            break
        active[int(slope.argmax())] = True
        while True:
            free = np.zeros(count)
            free[active] = np.linalg.lstsq(matrix[:, active], wanted, rcond=None)[0]
            bad = active & (free <= 0)
            if not bad.any():
                break
            gap = found[bad] - free[bad]
            steps = np.divide(found[bad], gap, out=np.zeros(len(gap)), where=gap > 0)
            found += steps.min() * (free - found)  # until the first factor is 0
            active &= found > 1e-12
            found[~active] = 0
            if not active.any():
                break
        found = np.where(active, free, 0.0)
    return found
