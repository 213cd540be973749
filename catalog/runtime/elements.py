"""The NumPy dtypes of tensors' element types."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from catalog.schema.problem import Problem


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype named ``name``, from NumPy or ml_dtypes."""
    if name.startswith(("bfloat", "float8")):
        import ml_dtypes

        element: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return element
    return np.dtype(name)


def element_type(problem: Problem, name: str) -> np.dtype[Any]:
    """The dtype of the problem's tensor ``name``."""
    return numpy_dtype(problem.tensors[name].element)
