"""Tolerances of results, compared with the float64 reference element by element."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Float64 = NDArray[np.float64]

ROUNDING: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "float32": (2.0**-24, 2.0**-126),
        "float16": (2.0**-11, 2.0**-14),
        "bfloat16": (2.0**-8, 2.0**-126),
        "float8_e4m3fn": (2.0**-4, 2.0**-6),
        "float8_e5m2": (2.0**-3, 2.0**-14),
    }
)
"""Unit roundoff (half the gap between 1 and the next number) and smallest normal number of an element type."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Allows |actual - expected| up to ``atol + rtol * |expected|``; ``atol`` is one number or one per element."""

    atol: Float64 | float
    rtol: float

    def used(self, actual: Array, expected: Array) -> float:
        """The largest error of an element as a fraction of its tolerance; up to 1 is allowed.

        Infinities must be equal, and a NaN matches only a NaN; otherwise the fraction is inf.
        """
        errors = _errors(actual, expected)
        expected = _widened(expected)
        allowed = self.atol + self.rtol * np.where(np.isfinite(expected), np.abs(expected), 0.0)
        shares = np.full(errors.shape, np.inf)
        np.divide(errors, allowed, out=shares, where=allowed > 0)
        return float(np.max(shares, initial=0.0, where=errors > 0))

    def allows(self, actual: Array, expected: Array) -> bool:
        """Whether every element is within tolerance; infinities must be equal, and a NaN matches only a NaN."""
        return self.used(actual, expected) <= 1


EXACT = Tolerance(0.0, 0.0)


def max_error(actual: Array, expected: Array) -> float:
    """The largest |actual - expected|; 0 for empty arrays, inf if infinities or NaNs disagree."""
    return float(np.max(_errors(actual, expected), initial=0.0))


def _errors(actual: Array, expected: Array) -> Float64:
    actual, expected = _widened(actual), _widened(expected)
    finite = np.isfinite(actual) & np.isfinite(expected)
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    errors = np.where(same, 0.0, np.inf)
    np.subtract(actual, expected, out=errors, where=finite)
    return np.abs(errors, out=errors)


def _widened(array: Array) -> Float64:
    with np.errstate(invalid="ignore"):  # a signalling NaN is an error of the kernel's, and is reported as one
        return array.astype(np.float64)
